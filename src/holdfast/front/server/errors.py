"""Whatever goes wrong on the way of a request becomes an answer here, in the form of the dialect
whose path was called.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from holdfast.front.server.dialect import Dialect, DialectTable
from holdfast.front.server.problem import Problem, problem_of, record_problem
from holdfast.telemetry.request_log import RequestRecord

RECORD = "holdfast.record"  # key of a request's RequestRecord in its ASGI scope
_LONGEST_PATH = 100


def problem_body(problem: Problem, dialect: Dialect) -> bytes:
    """The body of an answer that says what went wrong."""
    return msgspec.json.encode(dialect.error(problem))


def answer_of(error: Exception, scope: Scope) -> Response:
    """The answer to a request that failed; its record gets the reason, for the log."""
    table: DialectTable = scope["app"].state.dialects
    path = table.served_path(scope["path"])
    dialect = table.dialect_of(path, Headers(scope=scope))
    problem = (
        _path_problem(path, scope, dialect)
        if isinstance(error, HTTPException)
        else problem_of(error)
    )
    record: RequestRecord = scope[RECORD]
    record_problem(record, problem, error)
    status = dialect.statuses.get(problem.code, problem.status)
    problem = replace(problem, status=status, request_id=record.request_id)
    body = problem_body(problem, dialect)
    return Response(
        body, status_code=status, headers=problem.headers, media_type="application/json"
    )


async def handle(request: Request, error: Exception) -> Response:
    """Handler for all exceptions."""
    return answer_of(error, request.scope)


async def pass_on(request: Request, error: Exception) -> Response:
    """Handler for a client that has gone: whoever writes the log is told, and nobody is answered."""
    raise error


HANDLERS = {Exception: handle, HTTPException: handle, ClientDisconnect: pass_on}


def _path_problem(path: str, scope: Scope, dialect: Dialect) -> Problem:
    """What is wrong with a path or a method, in place of the framework's own error."""
    app, method = scope["app"], scope["method"]
    table: DialectTable = app.state.dialects
    if not dialect.operations:
        message = (
            f"{dialect.name} is not served by this version of Holdfast yet ({method} {path}). It "
            f"serves {table.serves}"
        )
        # No 5xx: the official clients would repeat the request, Claude Code ten times without a
        # word.
        return Problem(status=404, code="protocol_not_served", message=message)
    methods = sorted(
        {route.endpoint.method for route in app.routes if route.matches(scope)[0] is not Match.NONE}
    )
    if methods:
        allow = ", ".join(methods)
        return Problem(
            status=405,
            code="method_not_allowed",
            message=f"this path takes {allow}",
            headers={"allow": allow},
        )
    meant = table.meant_path(path)
    hint = f". It serves {table.serves}" if meant is None else f"; did you mean {meant}?"
    return Problem(
        status=404,
        code="unknown_path",
        message=f"this server has no path {path[:_LONGEST_PATH]}{hint}",
    )

"""What Codex wants to be told in a way of its own."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.errors import PromptTooLong
from holdfast.http.server.answers import AnswerFormat
from holdfast.http.server.errors import RECORD
from holdfast.http.server.problem import problem_of, record_problem

_NAME = "codex"


def is_codex(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from Codex."""
    return any(headers.get(name, "").lower().startswith(_NAME) for name in ("originator", "user-agent"))


class OverflowInStream(Response):
    """A streamed answer whose input may turn out to be too long, which is then told within the stream.

    Codex makes a conversation shorter when a response has failed for this reason; a status of 400 only ends its turn.
    """

    def __init__(self, answer: Response, form: AnswerFormat) -> None:
        super().__init__()
        self._answer, self._form = answer, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, or a stream that says that it failed."""
        try:
            await self._answer(scope, receive, send)
        except PromptTooLong as error:  # so nothing has been sent
            problem = problem_of(error)
            record_problem(scope[RECORD], problem, error)
            failed = Response(self._form.broken(problem), media_type=self._form.stream_type)
            await failed(scope, receive, send)

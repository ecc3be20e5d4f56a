"""The program that renders chat templates: it reads tasks from standard input and writes texts to
standard output.

It holds nothing but compiled templates, so the server may kill it at any time. Its own limits on
memory and processor time are a second line of defence, and end it even if the server is gone.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypeAlias

from jinja2 import Template, TemplateSyntaxError

from holdfast.front.prompt.jinja_environment import RENDER_ERRORS, jinja_environment
from holdfast.front.prompt.tool_definitions import unpacked_tool

MOST_MEMORY_BYTES = 1 << 30
MOST_TEXT_BYTES = 128 << 20
# in front of a task and of an answer: its length; the answer's first byte says what it is
HEAD_BYTES = 8
STARTED = b"+"  # what the process says first
_TEMPLATES_KEPT = 64

Outcome: TypeAlias = Literal["text", "refused", "broken", "memory"]
OUTCOMES: tuple[Outcome, ...] = ("text", "refused", "broken", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderTask:
    """One template to be rendered with these variables; without variables it is only compiled."""

    source: str
    variables: Mapping[str, Any] | None  # "tools" may be packed
    seconds: int  # of processor time


def main() -> None:
    """Answer tasks until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the server decides what it means
    with contextlib.suppress(ValueError, OSError):  # macOS does not limit the address space
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    tasks = sys.stdin.buffer
    sys.stdout.buffer.write(STARTED)
    sys.stdout.buffer.flush()
    while head := tasks.read(HEAD_BYTES):
        task: RenderTask = pickle.loads(tasks.read(int.from_bytes(head, "big")))
        _limit_time(task.seconds)
        outcome, text = _outcome_of(task)
        _answer(sys.stdout.buffer, outcome, text)


def _outcome_of(task: RenderTask) -> tuple[Outcome, bytes]:
    try:
        template = _compiled(task.source)
        if task.variables is None:
            return "text", b""
        tools = task.variables.get("tools")
        if tools is not None:
            tools = [unpacked_tool(tool) if isinstance(tool, bytes) else tool for tool in tools]
        text = template.render(task.variables, tools=tools).encode("utf-8", "surrogatepass")
    except TemplateSyntaxError as error:
        return "broken", f"{error.message} (line {error.lineno})".encode()
    except RENDER_ERRORS as error:
        return "refused", str(error).encode("utf-8", "surrogatepass")
    except MemoryError:
        return "memory", b""
    return ("text", text) if len(text) <= MOST_TEXT_BYTES else ("memory", b"")


@functools.lru_cache(maxsize=_TEMPLATES_KEPT)
def _compiled(source: str) -> Template:
    return jinja_environment().from_string(source)


def _limit_time(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    # the server ends it before that, and says why
    limit = int(used.ru_utime + used.ru_stime) + seconds + 5
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _answer(answers: BinaryIO, outcome: Outcome, text: bytes) -> None:
    answers.write(bytes([OUTCOMES.index(outcome)]) + len(text).to_bytes(HEAD_BYTES, "big"))
    answers.write(text)
    answers.flush()


if __name__ == "__main__":
    main()

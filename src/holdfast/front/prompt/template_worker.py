"""The program that renders chat templates: reads tasks from standard input, writes texts to
standard output.

It holds only compiled templates, so the server may kill it at any time. It also limits its
own memory and processor time, as a second line of defence that works even if the server is gone.

Templates run as in `transformers`: in a sandbox, with the same filters and functions.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, Literal, NoReturn, TypeAlias

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from holdfast.front.prompt.tool_definitions import KeptPart, made_once, unpacked_tool
from holdfast.models.chat_templates import EXTENSIONS

MAX_MEMORY_BYTES = 1 << 30
HEAD_BYTES = 8  # size of the length before a task or text; an answer has an outcome byte before it
STARTED = b"+"  # the first byte that the process writes
# exceptions that a template may raise by itself or through its expressions
RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_MAX_TEXT_BYTES = 128 << 20
_MAX_TEMPLATES = 64
_DICT_ATTRIBUTES = frozenset(dir(dict))

Outcome: TypeAlias = Literal["text", "refused", "broken", "memory"]
OUTCOMES: tuple[Outcome, ...] = ("text", "refused", "broken", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderTask:
    """A template to render with these variables. Without variables, it is only compiled."""

    source: str  # the template's text
    variables: Mapping[str, Any] | None  # "tools" may contain the bytes of `packed_tool`
    seconds: int  # limit of processor time


def main() -> None:
    """Carry out tasks until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the server
    with contextlib.suppress(ValueError, OSError):  # macOS does not limit the address space
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    tasks = sys.stdin.buffer
    answers = sys.stdout.buffer
    answers.write(STARTED)
    answers.flush()
    while head := tasks.read(HEAD_BYTES):
        task: RenderTask = pickle.loads(tasks.read(int.from_bytes(head, "big")))
        _limit_time(task.seconds)
        _write_answer(answers, *_carry_out(task))


def _carry_out(task: RenderTask) -> tuple[Outcome, bytes]:
    """Render or compile the template of a task. Returns the outcome, and the text or the reason."""
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
    return ("text", text) if len(text) <= _MAX_TEXT_BYTES else ("memory", b"")


@functools.lru_cache(maxsize=_MAX_TEMPLATES)
def _compiled(source: str) -> Template:
    return jinja_environment().from_string(source)


def _limit_time(seconds: int) -> None:
    """Let the system end this process when it uses more processor time from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    # five seconds more than the server allows, because only the server can report the reason
    limit = int(used.ru_utime + used.ru_stime) + seconds + 5
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _write_answer(answers: BinaryIO, outcome: Outcome, text: bytes) -> None:
    answers.write(bytes([OUTCOMES.index(outcome)]) + len(text).to_bytes(HEAD_BYTES, "big"))
    answers.write(text)
    answers.flush()


def jinja_environment() -> ImmutableSandboxedEnvironment:
    """A new environment that compiles chat templates."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=EXTENSIONS)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of `transformers`, except that templates may change lists.

    Some repaired templates use `append` and `pop`.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The same result as the original's, but faster for dictionaries such as messages, because
        # it raises no errors.
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) in (str, LoopContext):
            return not attr.startswith("_")  # the same result as the original's, faster
        if isinstance(obj, list) and attr in ("append", "pop"):
            return True
        return super().is_safe_attribute(obj, attr, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`.

    Unlike jinja2's own, it escapes nothing for HTML and keeps the order of keys.
    """

    def dump() -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
            default=_list_of_iterator,
        )

    if not isinstance(value, KeptPart):
        return dump()
    options = (ensure_ascii, indent, None if separators is None else tuple(separators), sort_keys)
    return made_once(value, options, dump)


def _list_of_iterator(value: Any) -> list[Any]:
    # Filters such as `map` return iterators; other implementations of Jinja serialize those as
    # lists.
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


if __name__ == "__main__":
    main()

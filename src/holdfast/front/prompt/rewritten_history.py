"""Proof at load that a chat template writes an answer of the past otherwise than the model has:
without its thought, above all.

What the next turn's prompt has behind the first difference has to be read anew, and can be read
before that turn comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

from holdfast.errors import InvalidRequest
from holdfast.front.prompt.conversation import answer_message
from holdfast.front.prompt.dialect_proof import PROBE_TOOLS
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenize import well_formed
from holdfast.front.prompt.tool_history import Message
from holdfast.front.toolcalls.dialect import ModelDialect
from holdfast.wire.output import ToolCall
from holdfast.wire.requests import ChatPrompt

NextTurn: TypeAlias = Literal["user", "results"]
"""What comes behind an answer: a message of the user, or, where it has called tools, their results.
"""

NEXT_TURNS: Final[tuple[NextTurn, ...]] = get_args(NextTurn)
_QUESTION, _THOUGHT, _ANSWER, _NEXT = "question4417", "thought5528", "answer6639", "next7740"


def next_messages(calls: Iterable[ToolCall], content: str) -> tuple[Message, ...]:
    """What comes behind an answer with these calls: a result of each, or a message of the user, of
    this content.
    """
    results = tuple({"role": "tool", "tool_call_id": call.id, "content": content} for call in calls)
    return results or ({"role": "user", "content": content},)


def rewritten_turns(
    template: ChatTemplate | None, dialect: ModelDialect, *, options: Mapping[str, Any]
) -> frozenset[NextTurn]:
    """What behind an answer makes the template leave out its thought, or write what precedes it
    otherwise than it was asked.
    """
    if template is None:
        return frozenset()
    return frozenset(
        turn for turn in NEXT_TURNS if _rewrites(template, dialect, turn, dict(options))
    )


def _rewrites(
    template: ChatTemplate, dialect: ModelDialect, turn: NextTurn, options: dict[str, Any]
) -> bool:
    has_thoughts = dialect.reasoning is not None
    calls = (
        (ToolCall(id="call00001", name="list_all", arguments="{}"),) if turn == "results" else ()
    )
    tools = PROBE_TOOLS if calls else ()
    question = {"role": "user", "content": _QUESTION}
    answer = answer_message(_ANSWER, reasoning=_THOUGHT if has_thoughts else "", calls=calls)
    asked, later = (
        _rendered(template, ChatPrompt(messages=messages, tools=tools, template_options=options))
        for messages in ((question,), (question, answer, *next_messages(calls, _NEXT)))
    )
    if not asked or _NEXT not in later:
        return False
    return not later.startswith(asked) or (has_thoughts and _THOUGHT not in later)


def _rendered(template: ChatTemplate, prompt: ChatPrompt) -> str:
    try:
        return well_formed(template.render(prompt))
    except InvalidRequest:
        return ""

"""Compaction: the model summarizes a conversation, and the client brings the summary back, sealed.

The summary is ordinary text that the model itself wrote when asked to. A `compaction` item carries
it in `encrypted_content`, and in a later prompt the text stands where the item stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.front.responses.answer import ResponseAnswer
from holdfast.front.responses.output_items import WrittenItem
from holdfast.front.responses.run import kept_input
from holdfast.front.responses.shapes import (
    CompactedResponse,
    CompactionItem,
    ItemStatus,
    ResponseStatus,
)
from holdfast.front.server.answers import AnswerFormat, Explanation, TokenCounts, WholeChoice
from holdfast.front.server.problem import Problem, RequestRefused
from holdfast.front.server.sealing import Seal
from holdfast.wire.output import ChoiceFinished, EndWord, OutputDelta, TextDelta
from holdfast.wire.requests import ChatPrompt, GenerationRequest, Thinking, ToolChoice

TRIGGER = "compaction_trigger"
_SUMMARY_TOKENS = 2048
_THOUGHT_TOKENS = 1024
_SUMMARY_REQUEST = {
    "role": "user",
    "content": (
        "The conversation above is about to be removed from your context. Write a summary that "
        "lets "
        "you continue without it: what the user wants, decisions and constraints, facts, names, "
        "paths "
        "and values that are still needed, what has been done, and what remains to be done. Do not "
        "call tools and do not continue the task. Reply with the summary only."
    ),
}


def asks_for_compaction(items: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the input ends with a trigger."""
    return bool(items) and items[-1].get("type") == TRIGGER


def summary_seal(seal: Seal, model: str) -> Seal:
    """The seal of the summaries that a model writes for the tenant whose seal is given."""
    return seal.of(f"summary by {model}")


def summary_request(request: GenerationRequest) -> GenerationRequest:
    """The request for a summary of a request's conversation.

    Its prompt begins with that of the conversation, tools included, so the prefix cache has most of
    it. Raises RequestRefused when no token of a summary may be generated.
    """
    if request.max_tokens == 0:
        reason = "`max_output_tokens`: a summary has at least 1 token"
        raise RequestRefused(reason, field="max_output_tokens", shown=", got 0")
    thinking = request.thinking
    if thinking.effort != "off" and thinking.budget_tokens is None:
        thinking = Thinking(effort=thinking.effort, budget_tokens=_THOUGHT_TOKENS)
    assert isinstance(request.prompt, ChatPrompt), "responses are made of conversations"
    messages = (*request.prompt.messages, _SUMMARY_REQUEST)
    return msgspec.structs.replace(
        request,
        prompt=msgspec.structs.replace(request.prompt, messages=messages),
        max_tokens=request.max_tokens or _SUMMARY_TOKENS + _THOUGHT_TOKENS,
        tool_choice=ToolChoice(mode="none"),
        thinking=thinking,
        output_format=None,
        want_logprobs=False,
        top_logprobs=0,
    )


@dataclass(slots=True, kw_only=True)
class WrittenCompaction(WrittenItem):
    """The compaction item; its summary is not shown while it is written."""

    seal: Callable[[str], str]

    id_prefix, text_event = "cmp", ""

    def item(self, status: ItemStatus) -> CompactionItem:
        """The item; sealed once the summary is whole."""
        sealed = "" if status == "in_progress" else self.seal(self.text)
        return CompactionItem(id=self.id, encrypted_content=sealed)

    def ending(self) -> list[Any]:
        """No events but that of the item itself."""
        return []


class CompactionAnswer(ResponseAnswer):
    """AnswerFormat of a response whose only item is the compaction item."""

    def delta(self, event: OutputDelta) -> bytes:
        """Take down the summary. Thoughts are left out."""
        if not isinstance(event, TextDelta) or event.kind != "text" or not event.text:
            return b""
        begun = b""
        if self._now is None:
            item_id = self._new_id(WrittenCompaction)
            begun = self._added(WrittenCompaction(id=item_id, seal=self._seal))
        assert self._now is not None, "the item has been added"
        self._now.pieces.append(event.text)
        return begun

    def _finished(self, end: EndWord) -> bytes:
        if self._now is None or not self._now.text.strip():
            reason = (
                "the model wrote no summary; please try again, or keep the conversation as it is"
            )
            raise RequestRefused(reason, status=422, code="empty_summary")
        return self._closed("completed")  # also when cut at the bound: what there is of it is used

    def _end_as(self, status: ResponseStatus, **changes: Any) -> None:
        self._now = None  # part of a summary must not stand for a conversation
        super()._end_as(status, **changes)


class CompactedFormat(AnswerFormat):
    """AnswerFormat of POST /v1/responses/compact, which is never streamed."""

    def __init__(self, answer: CompactionAnswer, items: Sequence[Mapping[str, Any]]) -> None:
        """items: of the conversation; the messages of the user are told again."""
        self._answer = answer
        self._told = [item for item in items if _is_from_user(item)]

    def delta(self, event: OutputDelta) -> bytes:
        """As in a response."""
        return self._answer.delta(event)

    def finish(self, event: ChoiceFinished) -> bytes:
        """As in a response."""
        return self._answer.finish(event)

    def closing(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        """As in a response."""
        return self._answer.closing(counts, explanation)

    def broken(self, problem: Problem) -> bytes:
        """As in a response."""
        return self._answer.broken(problem)

    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The user's messages and the compaction item."""
        self._answer.whole(choices, counts, explanation)
        response = self._answer.response
        assert response.usage is not None, "a response that has ended has its usage"
        compacted = CompactedResponse(
            id=response.id,
            created_at=response.created_at,
            output=[*kept_input(self._told), *response.output],
            usage=response.usage,
        )
        return msgspec.json.encode(compacted)


def _is_from_user(item: Mapping[str, Any]) -> bool:
    return (item.get("type") or "message") == "message" and item.get("role") == "user"

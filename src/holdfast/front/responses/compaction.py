"""Compaction: the model summarizes a conversation, and the client sends the sealed summary back in
place of it.

The summary is ordinary text that the model writes on request. A `compaction` item carries it in
`encrypted_content`; in a later prompt, the text takes the place of the item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from holdfast.front.responses.answer import ResponseAnswer, ResponseStatus, ResponseUsage
from holdfast.front.responses.items import kind_of, stored_input
from holdfast.front.responses.output_items import CompactionItem, Event, ItemStatus, WrittenItem
from holdfast.front.server.answers import Explanation, TokenCounts, WholeChoice
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.sealing import Seal
from holdfast.wire.output import EndWord, OutputDelta, TextDelta
from holdfast.wire.requests import ChatPrompt, GenerationRequest, Thinking, ToolChoice

_SUMMARY_TOKENS = 2048
_THOUGHT_TOKENS = 1024
_SUMMARY_REQUEST = {
    "role": "user",
    "content": (
        "The conversation above is about to be removed from your context. Write a summary that "
        "lets you continue without it: what the user wants, decisions and constraints, facts, "
        "names, paths and values that are still needed, what has been done, and what remains to "
        "be done. Do not call tools and do not continue the task. Reply with the summary only."
    ),
}


class CompactedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What replaces a conversation: the messages of its user, and one compaction item."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int  # seconds since 1970
    output: Sequence[Any]
    usage: ResponseUsage


def summary_seal(seal: Seal, model: str) -> Seal:
    """The seal of a model's summaries for the tenant of the given seal."""
    return seal.of(f"summary by {model}")


def summary_request(request: GenerationRequest) -> GenerationRequest:
    """The request for a summary of a request's conversation.

    Its prompt begins with the conversation, tools included, so most of it is in the prefix cache.
    Raises RequestRefused if no token may be generated.
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
    """The compaction item. Its summary is not shown while it is written."""

    seal: Callable[[str], str]

    id_prefix = "cmp"

    def item(self, status: ItemStatus) -> CompactionItem:
        """The item, sealed once the summary is complete."""
        sealed = "" if status == "in_progress" else self.seal(self.text)
        return CompactionItem(id=self.id, encrypted_content=sealed)

    def ending(self) -> list[Event]:
        """No events of its own."""
        return []


class CompactionAnswer(ResponseAnswer):
    """AnswerFormat of a response whose only item is a compaction item."""

    # answer with a CompactedResponse for this conversation
    replaces: Sequence[Mapping[str, Any]] | None = None

    def delta(self, event: OutputDelta) -> bytes:
        """Collect the summary. Thoughts are dropped."""
        if not isinstance(event, TextDelta) or event.kind != "text" or not event.text:
            return b""
        item = self._now
        begun = b""
        if item is None:
            item = WrittenCompaction(id=self._new_id(WrittenCompaction), seal=self._seal)
            begun = self._added(item)
        item.pieces.append(event.text)
        return begun

    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The response object, or the CompactedResponse."""
        whole = super().whole(choices, counts, explanation)
        if self.replaces is None:
            return whole
        response = self.response
        assert response.usage is not None, "a response that has ended has its usage"
        messages = [item for item in self.replaces if kind_of(item) == "message"]
        kept = [item for item in messages if item.get("role") == "user"]
        compacted = CompactedResponse(
            id=response.id,
            created_at=response.created_at,
            output=[*stored_input(kept), *response.output],
            usage=response.usage,
        )
        return msgspec.json.encode(compacted)

    def _finished(self, end: EndWord) -> bytes:
        if self._now is None or not self._now.text.strip():
            reason = (
                "the model wrote no summary; please try again, or keep the conversation as it is"
            )
            raise RequestRefused(reason, status=422, code="empty_summary")
        return self._closed("completed")  # a summary that was cut at the limit is used as it is

    def _end_as(self, status: ResponseStatus, **changes: Any) -> None:
        self._now = None  # part of a summary must not replace a conversation
        super()._end_as(status, **changes)

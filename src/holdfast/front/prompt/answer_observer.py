"""Takes down the answers of a chat while its client sees them, so that they can come back in its
next turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.front.prompt.answer_meaning import meaning_of_deltas, meaning_of_text
from holdfast.front.prompt.prepare import Prepared
from holdfast.front.prompt.read_history import answer_reader, without_hidden
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.wire.events import FinishReason
from holdfast.wire.output import (
    ChoiceFinished,
    OutputDelta,
    OutputEvent,
    PromptProgress,
    ToolCallStarted,
    tool_calls_of,
)
from holdfast.wire.requests import ChatPrompt, GenerationRequest
from holdfast.wire.token_ids import TokenIds

Observe: TypeAlias = Callable[[OutputEvent], None]


def observer(request: GenerationRequest, bundle: TokenizerBundle, prepared: Prepared) -> Observe:
    """What is to see all events of the answer to a request.

    Whoever continues a message gets back more than what is generated now.
    """
    if not isinstance(request.prompt, ChatPrompt) or prepared.opening is None:
        return lambda event: None
    opening_token_ids = tuple(bundle.tokenizer.encode(prepared.opening, add_special_tokens=False))
    prompt_ids = prepared.rules.prompt_token_ids
    if prompt_ids[len(prompt_ids) - len(opening_token_ids) :] != TokenIds.of(opening_token_ids):
        # what stands in front of the answer is in one token with what does not belong to it
        return lambda event: None
    return AnswerObserver(
        bundle=bundle,
        tools=request.prompt.tools,
        opening=prepared.opening,
        opening_token_ids=opening_token_ids,
        tenant=request.tenant,
    ).observe()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerObserver:
    """Keeps the answers to one request."""

    bundle: TokenizerBundle
    tools: tuple[dict[str, Any], ...]
    opening: str  # what the prompt has behind the header of the answer
    opening_token_ids: tuple[int, ...]
    tenant: str

    def observe(self) -> Observe:
        """What is to see all events of the answer."""
        deltas: defaultdict[int, list[OutputDelta]] = defaultdict(list)

        def observe(event: OutputEvent) -> None:
            if isinstance(event, ChoiceFinished):
                self._keep_arguments(deltas[event.index])
                self._keep(
                    deltas.pop(event.index, []), was_cut=event.reason is not FinishReason.STOP
                )
            elif not isinstance(event, PromptProgress):
                deltas[event.index].append(event)

        return observe

    def _keep_arguments(self, deltas: Sequence[OutputDelta]) -> None:
        for call in tool_calls_of(deltas):
            self.bundle.first_forms.arguments(call.arguments, call_id=call.id, tenant=self.tenant)

    def _keep(self, deltas: Sequence[OutputDelta], *, was_cut: bool) -> None:
        said = meaning_of_deltas(deltas)
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        if said is None or not token_ids:
            return
        tokenizer = self.bundle.tokenizer
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        opening = without_hidden(self.opening, self.bundle)
        encoded = self.bundle.dialect.markers.encode(opening + text)
        if meaning_of_text(encoded, answer_reader(self.tools, self.bundle), cut=was_cut) != said:
            # the tokens say more than the client saw: hidden ones, or one that a stop string cut
            return
        # A call or a thought is rendered as the template has it, so that nobody knows yet what it
        # will be tokenized into.
        is_plain = text == said.content and not opening.strip()
        self.bundle.known_answers.add(
            said,
            (*self.opening_token_ids, *token_ids),
            call_ids=[delta.id for delta in deltas if isinstance(delta, ToolCallStarted)],
            is_as_tokenized=is_plain
            and token_ids == tokenizer.encode(text, add_special_tokens=False),
            tenant=self.tenant,
        )

"""Takes down the answers of a chat while its client sees them, so that they can come back in its next turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.intake.answer_meaning import AnswerMeaning, meaning_of_deltas
from holdfast.intake.canonical import FirstForms
from holdfast.intake.known_answers import KnownAnswers
from holdfast.intake.tokenize import Tokenizer
from holdfast.messages.events import FinishReason
from holdfast.messages.output import ChoiceFinished, OutputDelta, OutputEvent, ToolCallStarted, tool_calls_of

Observe: TypeAlias = Callable[[OutputEvent], None]
ReadGenerated: TypeAlias = Callable[[str, bool], AnswerMeaning]
"""What a generated text says; True when it was cut because it had become too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerObserver:
    """Keeps the answers to one request."""

    known: KnownAnswers
    forms: FirstForms
    tokenizer: Tokenizer
    read: ReadGenerated
    opening: str  # what the prompt has behind the header of the answer
    opening_token_ids: tuple[int, ...]
    tenant: str

    def observe(self) -> Observe:
        """What is to see all events of the answer."""
        deltas: defaultdict[int, list[OutputDelta]] = defaultdict(list)

        def observe(event: OutputEvent) -> None:
            if isinstance(event, ChoiceFinished):
                self._keep_arguments(deltas[event.index])
                self._keep(deltas.pop(event.index, []), was_cut=event.reason is FinishReason.LENGTH)
            else:
                deltas[event.index].append(event)

        return observe

    def _keep_arguments(self, deltas: Sequence[OutputDelta]) -> None:
        for call in tool_calls_of(deltas):
            self.forms.arguments(call.arguments, call_id=call.id, tenant=self.tenant)

    def _keep(self, deltas: Sequence[OutputDelta], *, was_cut: bool) -> None:
        said = meaning_of_deltas(deltas)
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        if said is None or not token_ids:
            return
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        if self.read(self.opening + text, was_cut) != said:
            return  # the tokens say more than the client saw: hidden ones, or one that a stop string cut
        # A call or a thought is rendered as the template has it, so that nobody knows yet what it will be tokenized into.
        is_as_tokenized = (
            text == said.content
            and not self.opening.strip()
            and token_ids == self.tokenizer.encode(text, add_special_tokens=False)
        )
        self.known.add(
            said,
            (*self.opening_token_ids, *token_ids),
            call_ids=[delta.id for delta in deltas if isinstance(delta, ToolCallStarted)],
            is_as_tokenized=is_as_tokenized,
            tenant=self.tenant,
        )

"""One choice of an answer: the worker's events in, what a client sees out. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from holdfast.errors import GenerationFailed
from holdfast.messages.events import (
    CacheReport,
    Event,
    Finished,
    FinishReason,
    PromptScored,
    Started,
    Timings,
    TokenLogprob,
    TokensGenerated,
)
from holdfast.messages.output import ChoiceFinished, DivergentTexts, OutputEvent, TextDelta, TokenText
from holdfast.parsing.detokenize import IncrementalDetokenizer
from holdfast.parsing.pieces import TokenPieces
from holdfast.parsing.places import PlacedToken, spread
from holdfast.parsing.stops import StopScanner

_TOKENS_BEFORE = 16  # of the prompt, shown before the first token that differs from what is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRules:
    """What all choices of a request have in common."""

    prompt_token_ids: tuple[int, ...]
    stop_token_ids: frozenset[int]
    max_tokens: int
    stops: tuple[str, ...] = ()
    want_logprobs: bool = False
    at_start: bool = True  # the answer is a text of its own, not the continuation of one
    echo: bool = False
    echo_text: str = ""


class ChoiceText:
    """Turns the events of one sequence into text deltas and exactly one `ChoiceFinished`.

    Stop tokens are not shown. A stop string cuts the answer before its first character; tokens that begin behind the cut are
    dropped with their logprobs, the text and bytes of a token that straddles it are cut. `completion_tokens` counts every token
    that was drawn up to the one that ended the choice.
    """

    def __init__(self, *, index: int, pieces: TokenPieces, rules: ChoiceRules) -> None:
        self.index = index
        self.done = False  # the choice has ended; if the worker has not said Finished by then, its sequence is to be cancelled
        self.completion_tokens = 0
        self.memory = CacheReport()  # known from the first token on
        self.timings = Timings()
        self._pieces = pieces
        self._rules = rules
        self._detokenizer = IncrementalDetokenizer(pieces, at_start=rules.at_start)
        self._stops = StopScanner(rules.stops) if rules.stops else None
        self._tracks = bool(rules.stops) or rules.want_logprobs
        self._held_ids: list[int] = []  # tokens without visible text so far, on the path that does not track
        self._pending: deque[PlacedToken] = deque()
        self._uncertain: list[PlacedToken] = []  # those of them without certain text
        self._characters = 0  # of the answer that the detokenizer has given
        self._visible = 0  # of the answer that have been shown
        self._offset = len(rules.echo_text) if rules.echo else 0
        self._owes_echo = rules.echo

    def feed(self, event: Event) -> tuple[OutputEvent, ...]:
        """What a client is to be told about this event. Raises GenerationFailed when the sequence failed."""
        if self.done:
            return ()
        if isinstance(event, TokensGenerated):
            return self._generated(event)
        if isinstance(event, Finished):
            return self._finished(event)
        if isinstance(event, PromptScored):
            return self._echo(event.logprobs)
        if isinstance(event, Started):
            self.memory, self.timings = event.memory, event.timings
            return ()
        return self._echo(()) if self._owes_echo and not self._rules.want_logprobs else ()

    def _generated(self, event: TokensGenerated) -> tuple[OutputEvent, ...]:
        echo = self._echo(()) if self._owes_echo else ()
        if self._rules.max_tokens == 0:
            return echo  # only the prompt was to be scored
        delta = self._track(event) if self._tracks else self._pass_on(event.token_ids)
        told = echo if delta is None else (*echo, delta)
        return (*told, self._ending(FinishReason.STOP)) if self.done else told

    def _pass_on(self, token_ids: tuple[int, ...]) -> TextDelta | None:
        """The short way, when nobody needs to know which token made which character."""
        self.completion_tokens += len(token_ids)
        if token_ids and token_ids[-1] in self._rules.stop_token_ids:
            token_ids = token_ids[:-1]
        text = self._detokenizer.push(token_ids)
        if self._held_ids:
            token_ids = (*self._held_ids, *token_ids)
        if not text:
            self._held_ids = list(token_ids)
            return None
        self._held_ids = []
        return TextDelta(index=self.index, text=text, token_ids=token_ids)

    def _track(self, event: TokensGenerated) -> TextDelta | None:
        parts: list[str] = []
        for place, token_id in enumerate(event.token_ids):
            self.completion_tokens += 1
            if token_id in self._rules.stop_token_ids:
                break
            text = self._detokenizer.push((token_id,))
            self._expect(token_id, text, event.logprobs[place] if event.logprobs else None)
            parts.append(self._scan(text))
            if self.done:
                break
        return self._release("".join(parts))

    def _expect(self, token_id: int, text: str, logprob: TokenLogprob | None) -> None:
        start = self._characters
        self._characters += len(text)
        token = PlacedToken(token_id, start, self._characters, text, logprob)
        self._pending.append(token)
        if self._uncertain or not text:
            self._uncertain.append(token)
        if text and self._uncertain:
            self._settle(text, start=start)

    def _settle(self, text: str, *, start: int) -> None:
        """Place the tokens whose text was uncertain. Where bytes were replaced, all of it counts as made by the last of them."""
        if not spread(
            text, self._uncertain, [self._pieces.visible_bytes[token.token_id] for token in self._uncertain], start=start
        ):
            last = self._uncertain[-1]
            last.start, last.end, last.emitted = start, start + len(text), text
        self._uncertain.clear()

    def _scan(self, text: str) -> str:
        if self._stops is None:
            return text
        step = self._stops.push(text)
        self.done = step.stopped
        return step.visible

    def _finished(self, event: Finished) -> tuple[OutputEvent, ...]:
        self.done = True
        if event.reason is FinishReason.FAILED:
            raise GenerationFailed(event.error or "the generation failed")
        echo = self._echo(()) if self._owes_echo else ()
        delta = self._flush() if self._rules.max_tokens else None
        stopped = self._stops is not None and self._stops.stopped
        self.memory, self.timings = event.memory, event.timings
        ending = self._ending(FinishReason.STOP if stopped else event.reason)
        return (*echo, ending) if delta is None else (*echo, delta, ending)

    def _flush(self) -> TextDelta | None:
        text = self._detokenizer.flush()
        if not self._tracks:
            if not text and not self._held_ids:
                return None
            return TextDelta(index=self.index, text=text, token_ids=tuple(self._held_ids))
        if text and self._uncertain:
            self._settle(text, start=self._characters)
        self._characters += len(text)
        if self._stops is not None:
            step = self._stops.push(text)
            text = step.visible if step.stopped else step.visible + self._stops.flush()
        return self._release(text, all_of_it=True)

    def _release(self, text: str, *, all_of_it: bool = False) -> TextDelta | None:
        """The delta for newly visible text with the tokens that are wholly visible now."""
        self._visible += len(text)
        cut = self._stops is not None and self._stops.stopped
        token_ids: list[int] = []
        logprobs: list[TokenText] = []
        while self._pending:
            token = self._pending[0]
            seen = token.end <= self._visible and token.start < self._visible
            if cut and token.start >= self._visible:
                break
            if not (seen or cut or all_of_it):
                break
            self._pending.popleft()
            token_ids.append(token.token_id)
            if token.logprob is not None:
                logprobs.append(self._token_text(token, token.logprob))
        if not text and not token_ids:
            return None
        return TextDelta(index=self.index, text=text, token_ids=tuple(token_ids), logprobs=tuple(logprobs))

    def _token_text(self, token: PlacedToken, scored: TokenLogprob) -> TokenText:
        text, raw = self._shown(token.token_id)
        if (hidden := token.end - self._visible) > 0:
            raw = raw[: max(0, raw.rfind(token.emitted[-hidden:].encode()))]
            text = raw.decode("utf-8", "replace")
        return TokenText(
            text=text,
            raw=raw,
            logprob=scored.logprob,
            top=tuple(self._rival(token_id, logprob) for token_id, logprob in scored.top),
            text_offset=self._offset + token.start,
        )

    def _rival(self, token_id: int, logprob: float) -> TokenText:
        text, raw = self._shown(token_id)
        return TokenText(text=text, raw=raw, logprob=logprob)

    def _shown(self, token_id: int) -> tuple[str, bytes]:
        raw = self._pieces.all_bytes[token_id]
        return raw.decode("utf-8", "replace"), raw

    def _echo(self, scores: tuple[TokenLogprob, ...]) -> tuple[OutputEvent, ...]:
        """The prompt as the beginning of the answer. Its first token has no score: NaN, since nothing stands before it."""
        if not self._owes_echo:
            return ()
        self._owes_echo = False
        prompt = self._rules.prompt_token_ids
        logprobs: list[TokenText] = []
        if self._rules.want_logprobs and (scores or len(prompt) == 1):
            detokenizer = IncrementalDetokenizer(self._pieces, show_special=True)
            offset = 0
            for token_id, scored in zip(prompt, (None, *scores), strict=True):
                text, raw = self._shown(token_id)
                top = () if scored is None else tuple(self._rival(other, logprob) for other, logprob in scored.top)
                logprob = math.nan if scored is None else scored.logprob
                logprobs.append(TokenText(text=text, raw=raw, logprob=logprob, top=top, text_offset=offset))
                offset += len(detokenizer.push((token_id,)))
        return (TextDelta(index=self.index, text=self._rules.echo_text, token_ids=prompt, logprobs=tuple(logprobs)),)

    def _ending(self, reason: FinishReason) -> ChoiceFinished:
        return ChoiceFinished(
            index=self.index,
            reason=reason,
            prompt_tokens=len(self._rules.prompt_token_ids),
            completion_tokens=self.completion_tokens,
            timings=self.timings,
            memory=self.memory,
            divergent=self._divergent_texts(),
        )

    def _divergent_texts(self) -> DivergentTexts | None:
        found = self.memory.divergence
        if found is None:
            return None
        before = self._rules.prompt_token_ids[max(0, found.position - _TOKENS_BEFORE) : found.position]
        return DivergentTexts(
            before=b"".join(self._pieces.all_bytes[token_id] for token_id in before).decode("utf-8", "replace"),
            stored=self._shown(found.stored_token_id)[0],
            prompt=self._shown(found.prompt_token_id)[0],
        )

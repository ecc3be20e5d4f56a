"""One choice of an answer: the worker's events in, what a client sees out. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from holdfast.errors import GenerationFailed
from holdfast.messages.events import (
    CacheReport,
    Event,
    Finished,
    FinishReason,
    Started,
    Timings,
    TokenLogprob,
    TokensGenerated,
)
from holdfast.messages.output import ChoiceFinished, DivergentTexts, OutputEvent, TextDelta, TokenText
from holdfast.parsing.detokenize import detokenizer
from holdfast.parsing.formats.families import segment_format
from holdfast.parsing.pieces import TokenPieces
from holdfast.parsing.places import PlacedToken, spread
from holdfast.parsing.segments import AnswerPart, Segment
from holdfast.parsing.stops import StopScanner

_TOKENS_BEFORE = 16  # of the prompt, shown before the first token that differs from what is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRules:
    """What all choices of a request have in common."""

    prompt_token_ids: tuple[int, ...]
    stop_token_ids: frozenset[int]
    max_tokens: int
    stops: tuple[str, ...] = ()
    family: str = ""  # of the model whose format the text is in; empty: it is text throughout
    want_logprobs: bool = False
    at_start: bool = True  # the answer is a text of its own, not the continuation of one
    echo: bool = False
    echo_text: str = ""


class ChoiceText:
    """Turns the events of one sequence into text deltas and exactly one `ChoiceFinished`.

    Tokens become text, the text segments, and stop strings are looked for in those that are visible text.
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
        self._detokenizer = detokenizer(pieces, at_start=rules.at_start)
        self._format = segment_format(rules.family)
        self._stops = StopScanner(rules.stops) if rules.stops else None
        self._tracks = bool(rules.stops) or rules.want_logprobs
        self._held_ids: tuple[int, ...] = ()  # tokens without visible text so far, on the path that does not track
        self._pending: deque[PlacedToken] = deque()
        self._uncertain: list[PlacedToken] = []  # those of them without certain text
        self._characters = 0  # of the answer that the detokenizer has given
        self._visible = 0  # of the answer that have been shown
        self._offset = len(rules.echo_text) if rules.echo else 0
        self._owes_echo = rules.echo

    def feed(self, event: Event) -> tuple[OutputEvent, ...]:
        """What a client sees of this event. Raises GenerationFailed when the sequence failed."""
        if self.done:
            return ()
        if isinstance(event, TokensGenerated):
            return self._generated(event)
        if isinstance(event, Finished):
            return self._finished(event)
        if isinstance(event, Started):
            self.memory, self.timings = event.memory, event.timings
            return self._echo(event.logprobs)
        return self._echo(()) if self._owes_echo and not self._rules.want_logprobs else ()

    def _generated(self, event: TokensGenerated) -> tuple[OutputEvent, ...]:
        echo = self._echo(()) if self._owes_echo else ()
        if self._rules.max_tokens == 0:
            return echo  # only the prompt was to be scored
        deltas = self._track(event) if self._tracks else self._pass_on(event.token_ids)
        events = (*echo, *deltas)
        return (*events, self._ending(FinishReason.STOP)) if self.done else events

    def _pass_on(self, token_ids: tuple[int, ...]) -> tuple[TextDelta, ...]:
        """The short way, when nobody needs to know which token made which character."""
        self.completion_tokens += len(token_ids)
        if token_ids and token_ids[-1] in self._rules.stop_token_ids:
            token_ids = token_ids[:-1]
        text = self._detokenizer.push(token_ids)
        if self._held_ids:
            token_ids = (*self._held_ids, *token_ids)
        segments = _segments(self._format.push(text))
        self._held_ids = () if segments else token_ids
        return self._deltas(segments, token_ids) if segments else ()

    def _track(self, event: TokensGenerated) -> tuple[TextDelta, ...]:
        segments: list[Segment] = []
        for place, token_id in enumerate(event.token_ids):
            self.completion_tokens += 1
            if token_id in self._rules.stop_token_ids:
                break
            text = self._detokenizer.push((token_id,))
            self._expect(token_id, text, event.logprobs[place] if event.logprobs else None)
            segments += self._before_stop(_segments(self._format.push(text)))
            if self.done:
                break
        return self._show(segments)

    def _expect(self, token_id: int, text: str, logprob: TokenLogprob | None) -> None:
        start = self._characters
        self._characters += len(text)
        token = PlacedToken(token_id, start, self._characters, text, logprob)
        self._pending.append(token)
        if self._uncertain or not text:
            self._uncertain.append(token)
        if text and self._uncertain:
            self._place(text, start=start)

    def _place(self, text: str, *, start: int) -> None:
        """Place the tokens whose text was uncertain. Where bytes were replaced, all of it counts as made by the last of them."""
        if not spread(
            text, self._uncertain, [self._pieces.visible_bytes(token.token_id) for token in self._uncertain], start=start
        ):
            last = self._uncertain[-1]
            last.start, last.end, last.emitted = start, start + len(text), text
        self._uncertain.clear()

    def _before_stop(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        """What may be shown of them. A stop string has to stand in visible text, and in one piece of it."""
        for segment in segments:
            if self._stops is None:
                yield segment
            elif segment.kind == "text":
                yield Segment("text", self._stops.push(segment.text))
                if self._stops.stopped:
                    self.done = True
                    return
            else:
                yield Segment("text", self._stops.flush())
                yield segment

    def _finished(self, event: Finished) -> tuple[OutputEvent, ...]:
        self.done = True
        if event.reason is FinishReason.FAILED:
            raise GenerationFailed(event.error or "the generation failed")
        echo = self._echo(()) if self._owes_echo else ()
        deltas = self._flush() if self._rules.max_tokens else ()
        self.memory, self.timings = event.memory, event.timings
        return (*echo, *deltas, self._ending(event.reason))

    def _flush(self) -> tuple[TextDelta, ...]:
        text = self._detokenizer.flush()
        segments = _segments([*self._format.push(text), *self._format.flush()])
        if not self._tracks:
            return self._deltas(segments, self._held_ids)
        if text and self._uncertain:
            self._place(text, start=self._characters)
        self._characters += len(text)
        shown = [*self._before_stop(segments)]
        if self._stops is not None:
            shown.append(Segment("text", self._stops.flush()))
        return self._show(shown, all_of_it=True)

    def _show(self, segments: Sequence[Segment], *, all_of_it: bool = False) -> tuple[TextDelta, ...]:
        """Deltas for what may newly be shown, with the tokens that are wholly visible now."""
        self._visible += sum(len(segment.text) for segment in segments)
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
        return self._deltas(segments, tuple(token_ids), tuple(logprobs))

    def _deltas(
        self, segments: Sequence[Segment], token_ids: tuple[int, ...], logprobs: tuple[TokenText, ...] = ()
    ) -> tuple[TextDelta, ...]:
        """One delta for each run of segments of a kind. All tokens stand with the last one, though it be empty."""
        runs = segments if len(segments) == 1 else _runs(segments)
        *before, last = runs or [Segment("text", "")]
        if not last.text and not token_ids:
            return ()
        return (
            *(TextDelta(index=self.index, text=run.text, kind=run.kind) for run in before),
            TextDelta(index=self.index, text=last.text, kind=last.kind, token_ids=token_ids, logprobs=logprobs),
        )

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
        raw = self._pieces.all_bytes(token_id)
        return raw.decode("utf-8", "replace"), raw

    def _echo(self, scores: tuple[TokenLogprob, ...]) -> tuple[OutputEvent, ...]:
        """The prompt as the beginning of the answer. Its first token has no score: NaN, since nothing stands before it."""
        if not self._owes_echo:
            return ()
        self._owes_echo = False
        prompt = self._rules.prompt_token_ids
        logprobs: list[TokenText] = []
        if self._rules.want_logprobs and (scores or len(prompt) == 1):
            prompt_text = detokenizer(self._pieces, show_special=True)
            offset = 0
            for token_id, scored in zip(prompt, (None, *scores), strict=True):
                text, raw = self._shown(token_id)
                top = () if scored is None else tuple(self._rival(other, logprob) for other, logprob in scored.top)
                logprob = math.nan if scored is None else scored.logprob
                logprobs.append(TokenText(text=text, raw=raw, logprob=logprob, top=top, text_offset=offset))
                offset += len(prompt_text.push((token_id,)))
        return (TextDelta(index=self.index, text=self._rules.echo_text, token_ids=prompt, logprobs=tuple(logprobs)),)

    def _ending(self, reported: FinishReason) -> ChoiceFinished:
        """Why the answer ended is decided here: what the worker reports, unless a stop string ended it before."""
        stopped = self._stops is not None and self._stops.stopped
        return ChoiceFinished(
            index=self.index,
            reason=FinishReason.STOP if stopped else reported,
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
            before=b"".join(self._pieces.all_bytes(token_id) for token_id in before).decode("utf-8", "replace"),
            stored=self._shown(found.stored_token_id)[0],
            prompt=self._shown(found.prompt_token_id)[0],
        )


def _segments(parts: Iterable[AnswerPart]) -> list[Segment]:
    return [part for part in parts if isinstance(part, Segment)]


def _runs(segments: Iterable[Segment]) -> list[Segment]:
    """Segments of one kind that follow each other as one; none is empty."""
    runs = [(kind, "".join([segment.text for segment in run])) for kind, run in groupby(segments, key=lambda each: each.kind)]
    return [Segment(kind, text) for kind, text in runs if text]

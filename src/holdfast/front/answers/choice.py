"""One choice of an answer: turns the worker's events into what a client sees.

Pure: no clock, and no I/O except a source of random ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby

import msgspec

from holdfast.errors import GenerationFailed, InvalidRequest
from holdfast.front.answers.detokenize import PlacedTokens, detokenizer, rival, text_and_bytes
from holdfast.front.answers.pieces import TokenPieces
from holdfast.front.answers.reader import AnswerReader, PlainReader, TextSeparators
from holdfast.front.answers.stops import RepetitionGuard, VisibleStops
from holdfast.front.output import (
    ChoiceFinished,
    DivergentTexts,
    OutputDelta,
    OutputEvent,
    PromptProgress,
    TextDelta,
    TokenText,
    ToolArgumentsDelta,
    ToolCallFinished,
)
from holdfast.front.toolcalls.call_format import CallIds, random_text
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import PLAIN, ModelDialect
from holdfast.wire.events import (
    CacheReport,
    Event,
    Finished,
    FinishReason,
    PrefillFinished,
    PromptRead,
    Timings,
    TokenLogprob,
    TokensGenerated,
)
from holdfast.wire.images import FIRST_IMAGE_KEY
from holdfast.wire.requests import TokenIds

_IMAGE = "[an image]"
_OTHER_IMAGE = "[another image]"
_TOKENS_BEFORE = 16  # number of tokens to show before the first one that differs from the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRules:
    """The data that all choices of a request share."""

    prompt_token_ids: TokenIds
    stop_token_ids: frozenset[int]
    max_tokens: int  # of the answer
    stops: tuple[str, ...] = ()  # strings that end the answer
    dialect: ModelDialect = PLAIN  # syntax of the answer: the model's for a chat, else plain text
    tools: DeclaredTools = field(default_factory=DeclaredTools)  # the tools that the model may call
    format_field: str = ""  # the request's field that asks for a grammar; empty if none does
    reads_calls: bool = False  # if False, calls are treated as text
    one_call: bool = False  # the answer ends after its first call
    in_reasoning: bool = False  # the prompt has opened a thought
    earlier_call_ids: tuple[str, ...] = ()  # ids of earlier calls in the conversation
    random_text: Callable[[int], str] = random_text  # source of the letters and digits in call ids
    want_logprobs: bool = False  # the client asked for log-probabilities
    # after how many repeated tokens an answer ends (see `RepetitionGuard`); 0: never
    repeated_tokens: int = 0
    at_start: bool = True  # the answer begins a text, it does not continue one
    reports_progress: bool = False  # report the end of prefill before the first text
    echo: bool = False  # the answer begins with `echo_text`
    echo_text: str = ""  # the text of the prompt


class ChoiceText:
    """Turns the events of one sequence into deltas of text and calls, followed by exactly one
    `ChoiceFinished`.

    Tokens become text, text becomes the deltas of texts and calls, and visible text is searched for stop
    strings. Stop tokens are not shown. A stop string cuts off the answer just before the string:
    tokens after the cut are dropped with their logprobs, and a token across the cut is shortened.
    `completion_tokens` counts all sampled tokens up to the one that ended the choice.
    """

    def __init__(self, *, pieces: TokenPieces, rules: ChoiceRules) -> None:
        # the choice has ended; unless the worker has sent Finished, its sequence must be cancelled
        self.is_done = False
        self.completion_tokens = 0
        self.cache_report = CacheReport()  # known once the first token has arrived
        self.timings = Timings()
        # these three are known once the worker has sent Finished
        self.resumptions = 0
        self._accepted_tokens = 0
        self._rejected_tokens = 0
        self._pieces = pieces
        self._rules = rules
        self._reader = _new_reader(rules)
        self._stops = VisibleStops(rules.stops)  # looks for stop strings in the visible text
        self._is_plain = rules.dialect.is_plain and not rules.stops and not rules.want_logprobs
        self._can_end_early = bool(rules.stops) or rules.one_call  # before the worker's Finished
        self._detokenizer = detokenizer(pieces, at_start=rules.at_start)  # used only for plain text
        self._tokens = PlacedTokens(
            pieces,
            rules.dialect.markers,
            at_start=rules.at_start,
            offset=len(rules.echo_text) if rules.echo else 0,
        )
        # finds what to insert between texts that are interrupted
        self._separators = TextSeparators()
        self._guard = RepetitionGuard(rules.repeated_tokens)
        self._ended_by_repetition = False  # the answer was ended because it repeated itself
        self._calls = 0  # number of complete calls
        self._reasoning_tokens = 0
        # characters at the end of the last token that a stop string hid from the client
        self._unseen_characters = 0
        self._pending_token_ids: tuple[int, ...] = ()  # tokens that no delta had yet
        self._pending_logprobs: tuple[TokenText, ...] = ()
        self._must_echo = rules.echo  # the prompt is still to be repeated

    def feed(self, event: Event) -> tuple[OutputEvent, ...]:
        """Return what a client sees of this event. Raises GenerationFailed if generation failed."""
        if self.is_done:
            return ()
        if isinstance(event, TokensGenerated):
            return self._on_tokens(event)
        if isinstance(event, Finished):
            return self._on_finished(event)
        if isinstance(event, PrefillFinished):
            self.cache_report = event.cache_report
            self.timings = event.timings
            return (*self._prefill_progress(), *self._echo(event.logprobs))
        if isinstance(event, PromptRead):
            return (
                self._progress(
                    event.read_tokens, cached_tokens=event.cached_tokens, seconds=event.seconds
                ),
            )
        return self._echo(()) if self._must_echo and not self._rules.want_logprobs else ()

    def _progress(self, read_tokens: int, *, cached_tokens: int, seconds: float) -> PromptProgress:
        """The progress event after `read_tokens` prompt tokens and `seconds` of prefill."""
        return PromptProgress(
            total_tokens=len(self._rules.prompt_token_ids),
            cached_tokens=cached_tokens,
            read_tokens=read_tokens,
            seconds=seconds,
        )

    def _prefill_progress(self) -> tuple[PromptProgress, ...]:
        """The progress event for the end of prefill; empty unless it was requested."""
        if not self._rules.reports_progress:
            return ()
        total_tokens = len(self._rules.prompt_token_ids)
        seconds = self.timings.prefill_seconds
        return (
            self._progress(
                total_tokens, cached_tokens=self.cache_report.cached_tokens, seconds=seconds
            ),
        )

    def _on_tokens(self, event: TokensGenerated) -> tuple[OutputEvent, ...]:
        """Turn new tokens into deltas. Ends a choice whose visible part repeats itself."""
        echo = self._echo(()) if self._must_echo else ()
        if self._rules.max_tokens == 0:
            return echo  # the request only asks for the prompt's logprobs
        deltas = self._detokenize(event.token_ids) if self._is_plain else self._parse(event)
        events = (*echo, *deltas)
        if self.is_done:
            return (*events, self._choice_finished(FinishReason.STOP))
        # a thought that repeats itself is ended by the gateway, and its answer goes on
        visible_token_ids = (delta.token_ids for delta in deltas if not _is_thought(delta))
        self._ended_by_repetition = self._guard.push(chain.from_iterable(visible_token_ids))
        if self._ended_by_repetition:
            events = (
                *events,
                *self._flush(was_cut_off=True),
                self._choice_finished(FinishReason.LENGTH),
            )
            self.is_done = True
        return events

    def _detokenize(self, token_ids: tuple[int, ...]) -> tuple[OutputDelta, ...]:
        """Detokenize plain text, which the reader passes on unparsed, for requests that need no token
        positions.
        """
        self.completion_tokens += len(token_ids)
        if token_ids and token_ids[-1] in self._rules.stop_token_ids:
            token_ids = token_ids[:-1]
        return self._deltas_with_tokens(
            self._reader.push(self._detokenizer.push(token_ids)), token_ids
        )

    def _parse(self, event: TokensGenerated) -> tuple[OutputDelta, ...]:
        """Read the new tokens, up to the token or the text that ends the answer."""
        parts: list[OutputDelta] = []
        for place, token_id in enumerate(event.token_ids):
            self.completion_tokens += 1
            if token_id in self._rules.stop_token_ids:
                break
            text = self._tokens.push(token_id, event.logprobs[place] if event.logprobs else None)
            deltas = self._reader.push(text)
            parts += self._parts_until_end(deltas) if self._can_end_early else deltas
            if self._reader.ended_at is not None and not self.is_done:
                self.is_done = True
                parts += self._stops.flush()
            if self.is_done:
                break
        return self._release(parts)

    def _parts_until_end(self, parts: Iterable[OutputDelta]) -> Iterator[OutputDelta]:
        """Iterate over the parts up to a stop string, or up to the end of the only call allowed."""
        for part in parts:
            yield from self._stops.scan(part)
            self.is_done = self._stops.found_at is not None or (
                self._rules.one_call and isinstance(part, ToolCallFinished)
            )
            if self.is_done:
                return

    def _on_finished(self, event: Finished) -> tuple[OutputEvent, ...]:
        """Show what was held back, and end the choice. Raises GenerationFailed or InvalidRequest."""
        if event.reason is FinishReason.FAILED:
            self.is_done = True
            raise GenerationFailed(
                event.error or "the generation failed", is_deadly=event.is_deadly
            )
        if event.reason is FinishReason.REFUSED:
            self.is_done = True
            raise InvalidRequest(event.error, field=self._rules.format_field)
        echo = self._echo(()) if self._must_echo else ()
        deltas = (
            self._flush(was_cut_off=event.reason is not FinishReason.STOP)
            if self._rules.max_tokens
            else ()
        )
        self.is_done = True
        self.cache_report = event.cache_report
        self.timings = event.timings
        self.resumptions = event.resumptions
        self._accepted_tokens = event.accepted_tokens
        self._rejected_tokens = event.rejected_tokens
        return (*echo, *deltas, self._choice_finished(event.reason))

    def _flush(self, *, was_cut_off: bool) -> tuple[OutputDelta, ...]:
        """Return what the detokenizer, the reader and the stop scanner still hold back."""
        text = self._detokenizer.flush() if self._is_plain else self._tokens.flush()
        parts = [
            *self._parts_until_end(
                [*self._reader.push(text), *self._reader.flush(was_cut_off=was_cut_off)]
            )
        ]
        if not self.is_done:
            parts += self._stops.flush()
        return self._release(parts, is_end=True)

    def _release(
        self, parts: Sequence[OutputDelta], *, is_end: bool = False
    ) -> tuple[OutputDelta, ...]:
        """Return the parts that may be shown, with the tokens whose text is now certain.

        is_end: no more tokens follow, so all remaining tokens go with these parts.
        """
        # where a stop string or the end of the message cut off the answer; None: nowhere so far
        end_position = (
            self._reader.ended_at if self._stops.found_at is None else self._stops.found_at
        )
        certain_end = self._reader.settled_characters if end_position is None else end_position
        if self._stops.held_back_from is not None:
            certain_end = min(certain_end, self._stops.held_back_from)
        tokens = [*self._tokens.take_until(certain_end)]
        if end_position is not None or is_end:
            tokens += self._tokens.take_starting_before(end_position)
        if end_position is not None and tokens:
            self._unseen_characters = max(0, tokens[-1].end - end_position)
        thoughts = self._reader.thoughts
        if thoughts:
            self._reasoning_tokens += sum(
                any(start <= token.start < end for start, end in thoughts) for token in tokens
            )
        logprobs = tuple(
            self._tokens.shown(token, token.logprob, cut=end_position)
            for token in tokens
            if token.logprob is not None
        )
        return self._deltas_with_tokens(
            parts,
            tuple(token.token_id for token in tokens),
            logprobs,
            keeps_tokens=not (self.is_done or is_end),
        )

    def _deltas_with_tokens(
        self,
        parts: Sequence[OutputDelta],
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenText, ...] = (),
        *,
        keeps_tokens: bool = True,
    ) -> tuple[OutputDelta, ...]:
        """Turn parts of the answer into deltas: join adjacent parts of one kind, add the tokens.

        The last delta gets all tokens. Without a delta, the tokens are kept for the next one or,
        if `keeps_tokens` is false, sent with an empty text.
        """
        if self._pending_token_ids:
            token_ids = (*self._pending_token_ids, *token_ids)
            logprobs = (*self._pending_logprobs, *logprobs)
        merged = parts if len(parts) == 1 else _merge_adjacent(parts)
        deltas = [self._with_separator(part) for part in merged]
        if not deltas and token_ids and not keeps_tokens:
            deltas.append(TextDelta(text=""))
        if not deltas:
            self._pending_token_ids = token_ids
            self._pending_logprobs = logprobs
            return ()
        self._pending_token_ids = ()
        self._pending_logprobs = ()
        if token_ids:
            deltas[-1] = msgspec.structs.replace(deltas[-1], token_ids=token_ids, logprobs=logprobs)
        return tuple(deltas)

    def _with_separator(self, delta: OutputDelta) -> OutputDelta:
        """Return the delta with the separator that it needs (`TextSeparators`). Counts calls."""
        if isinstance(delta, ToolCallFinished):
            self._calls += 1
        if separator := self._separators.separator(delta):
            return msgspec.structs.replace(delta, separator=separator)
        return delta

    def _echo(self, scores: tuple[TokenLogprob, ...]) -> tuple[OutputEvent, ...]:
        """Return the events that echo the prompt. The prompt's first token has the logprob NaN.

        scores: of all prompt tokens but the first; empty if the worker sent none.
        """
        if not self._must_echo:
            return ()
        self._must_echo = False
        prompt = self._rules.prompt_token_ids
        logprobs: list[TokenText] = []
        if self._rules.want_logprobs and (scores or len(prompt) == 1):
            prompt_text = detokenizer(self._pieces, show_special=True)
            offset = 0
            for token_id, scored in zip(prompt, (None, *scores), strict=True):
                text, raw = text_and_bytes(self._pieces, token_id)
                top = (
                    ()
                    if scored is None
                    else tuple(rival(self._pieces, other, logprob) for other, logprob in scored.top)
                )
                logprob = math.nan if scored is None else scored.logprob
                logprobs.append(
                    TokenText(text=text, raw=raw, logprob=logprob, top=top, text_offset=offset)
                )
                offset += len(prompt_text.push((token_id,)))
        return (
            TextDelta(
                text=self._rules.echo_text, token_ids=tuple(prompt), logprobs=tuple(logprobs)
            ),
        )

    def _choice_finished(self, reported: FinishReason) -> ChoiceFinished:
        """Return the end of the choice. The reason is the worker's, unless a stop string, the only
        allowed call or the end of a message ended the choice earlier.
        """
        ended_here = (
            self._stops.found_at is not None
            or self._reader.ended_at is not None
            or (self._rules.one_call and self._calls > 0)
        )
        return ChoiceFinished(
            reason=FinishReason.STOP if ended_here else reported,
            prompt_tokens=len(self._rules.prompt_token_ids),
            completion_tokens=self.completion_tokens,
            timings=self.timings,
            cache_report=self.cache_report,
            divergent=self._texts_at_divergence(),
            reasoning_tokens=self._reasoning_tokens,
            accepted_tokens=self._accepted_tokens,
            rejected_tokens=self._rejected_tokens,
            calls=self._calls,
            stop_string=self._stops.found,
            unseen_characters=self._unseen_characters,
            repeats=self._ended_by_repetition,
            resumptions=self.resumptions,
        )

    def _texts_at_divergence(self) -> DivergentTexts | None:
        """The texts around the first token that differs from the cached prompt."""
        divergence = self.cache_report.divergence
        if divergence is None:
            return None
        preceding_ids = self._rules.prompt_token_ids[
            max(0, divergence.position - _TOKENS_BEFORE) : divergence.position
        ]
        texts = [
            _IMAGE
            if is_image
            else b"".join(map(self._pieces.all_bytes, run)).decode(errors="replace")
            for is_image, run in groupby(preceding_ids, key=_is_image)
        ]
        prompt = self._token_text(divergence.prompt_token_id)
        stored = self._token_text(divergence.stored_token_id)
        return DivergentTexts(
            before="".join(texts),
            stored=stored,
            prompt=_OTHER_IMAGE if prompt == stored == _IMAGE else prompt,
        )

    def _token_text(self, token_id: int) -> str:
        """The text of one prompt token; ids from FIRST_IMAGE_KEY on stand for images."""
        return _IMAGE if _is_image(token_id) else text_and_bytes(self._pieces, token_id)[0]


def _is_thought(delta: OutputDelta) -> bool:
    return isinstance(delta, TextDelta) and delta.kind == "reasoning"


def _is_image(token_id: int) -> bool:
    return token_id >= FIRST_IMAGE_KEY


def _new_reader(rules: ChoiceRules) -> AnswerReader | PlainReader:
    """The parser for one choice: of its model's syntax, or of plain text."""
    if rules.dialect.is_plain:
        return PlainReader()
    calls = rules.dialect.calls
    ids = CallIds(
        calls.id_form if calls else "random",
        earlier=rules.earlier_call_ids,
        random_text=rules.random_text,
    )
    return AnswerReader(
        rules.dialect,
        tools=rules.tools,
        reads_calls=rules.reads_calls,
        in_reasoning=rules.in_reasoning,
        ids=ids,
    )


def _merge_adjacent(parts: Iterable[OutputDelta]) -> Iterator[OutputDelta]:
    """Iterate over the parts; adjacent texts of one kind, and adjacent arguments, are joined."""
    for kind, run in groupby(
        parts, key=lambda part: part.kind if isinstance(part, TextDelta) else type(part)
    ):
        if kind not in ("text", "reasoning", ToolArgumentsDelta):
            yield from run
            continue
        texts = [part for part in run if isinstance(part, TextDelta | ToolArgumentsDelta)]
        if text := "".join([part.text for part in texts]):
            yield msgspec.structs.replace(texts[0], text=text)

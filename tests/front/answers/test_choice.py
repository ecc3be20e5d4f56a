"""One choice: consistent text, tokens and log-probabilities, and exactly one end."""

from __future__ import annotations

import math
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from holdfast.errors import GenerationFailed, InvalidRequest
from holdfast.front.answers.choice import ChoiceRules, ChoiceText
from holdfast.front.answers.pieces import TokenPieces
from holdfast.front.output import (
    ChoiceFinished,
    DivergentTexts,
    OutputEvent,
    PromptProgress,
    TextDelta,
)
from holdfast.wire.events import (
    Accepted,
    CacheOutcome,
    CacheReport,
    Divergence,
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
from tests.fakes import toy_tokenizers


@cache
def family(name: str = "byte_level") -> tuple[Tokenizer, TokenPieces]:
    tokenizer = toy_tokenizers.EXACT[name]()
    return tokenizer, TokenPieces(tokenizer)


def encode(text: str, name: str = "byte_level") -> tuple[int, ...]:
    return tuple(family(name)[0].encode(text, add_special_tokens=False).ids)


def choice(
    *, name: str = "byte_level", stop_tokens: tuple[int, ...] = (), **rules: object
) -> ChoiceText:
    defaults = {
        "prompt_token_ids": TokenIds.of((1, 2)),
        "stop_token_ids": frozenset(stop_tokens),
        "max_tokens": 100,
    }
    return ChoiceText(pieces=family(name)[1], rules=ChoiceRules(**{**defaults, **rules}))  # type: ignore[arg-type]


FOUND = CacheReport(outcome=CacheOutcome.NEW_TOKENS, ram_tokens=1)


def generated(ids: tuple[int, ...], *, scored: bool = False) -> TokensGenerated:
    logprobs = (
        tuple(
            TokenLogprob(token_id, -1.0 - place, ((token_id, -0.5),))
            for place, token_id in enumerate(ids)
        )
        if scored
        else ()
    )
    return TokensGenerated(request_id="r", token_ids=ids, logprobs=logprobs)


def finished(reason: FinishReason = FinishReason.STOP, error: str = "") -> Finished:
    return Finished(
        request_id="r",
        reason=reason,
        prompt_tokens=2,
        completion_tokens=0,
        cache_report=FOUND,
        error=error,
    )


def texts(events: list[OutputEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def run(
    reader: ChoiceText, parts: list[tuple[int, ...]], *, scored: bool = False
) -> list[OutputEvent]:
    events: list[OutputEvent] = []
    for part in parts:
        if reader.is_done:
            break
        events.extend(reader.feed(generated(part, scored=scored)))
    if not reader.is_done:
        events.extend(reader.feed(finished(FinishReason.LENGTH)))
    return events


def test_text_comes_as_deltas_and_the_end_once() -> None:
    reader = choice()
    ids = encode("hello the 🙂")
    events = run(reader, [(token_id,) for token_id in ids])
    assert texts(events) == "hello the 🙂"
    assert events[-1] == ChoiceFinished(
        reason=FinishReason.LENGTH,
        prompt_tokens=2,
        completion_tokens=len(ids),
        cache_report=FOUND,
    )
    assert sum(isinstance(event, ChoiceFinished) for event in events) == 1
    assert reader.is_done
    assert reader.feed(finished()) == ()


def test_deltas_carry_every_token_once_and_none_is_empty() -> None:
    ids = encode("a🙂b")
    events = run(choice(), [(token_id,) for token_id in ids])
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == list(ids)
    assert [delta.text for delta in deltas] == ["a", "🙂", "b"]


@pytest.mark.parametrize("wanted", [{}, {"want_logprobs": True}])
def test_the_stop_token_is_counted_but_never_shown(wanted: dict[str, object]) -> None:
    stop = family()[0].token_to_id("</think>")
    reader = choice(stop_tokens=(stop,), **wanted)
    events = list(reader.feed(generated((*encode("hello"), stop), scored=bool(wanted))))
    events += reader.feed(finished())
    assert texts(events) == "hello"
    end = events[-1]
    assert isinstance(end, ChoiceFinished)
    assert (end.reason, end.completion_tokens) == (FinishReason.STOP, len(encode("hello")) + 1)


def test_a_stop_string_ends_the_choice_before_the_worker_does() -> None:
    reader = choice(stops=("the w",))
    ids = encode("hello the world")
    events = run(reader, [(token_id,) for token_id in ids])
    assert texts(events) == "hello "
    end = events[-1]
    assert isinstance(end, ChoiceFinished)
    assert end.reason is FinishReason.STOP
    assert end.completion_tokens <= len(ids)
    assert reader.feed(generated((5,))) == ()


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]], tuple[str, ...]]:
    name = draw(st.sampled_from(["byte_level", "gemma"]))
    text = draw(st.text(alphabet="hello the🙂éx\n", max_size=20))
    ids = encode(text, name)
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    stops = draw(st.lists(st.text(alphabet="lo t🙂é\n", min_size=1, max_size=4), max_size=3))
    return (
        name,
        [
            ids[start:end]
            for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)
            if end > start
        ],
        tuple(stops),
    )


@given(answers())
def test_the_end_names_the_matched_stop_string(
    case: tuple[str, list[tuple[int, ...]], tuple[str, ...]],
) -> None:
    """The first complete one, the longest of several; none if the text ends without one."""
    name, parts, stops = case
    whole = texts(run(choice(name=name), parts))
    ends = [(whole.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
    end = run(choice(name=name, stops=stops), parts)[-1]
    assert isinstance(end, ChoiceFinished)
    assert end.stop_string == (min(ends)[2] if ends else None)


def test_withheld_text_is_flushed_at_the_end() -> None:
    reader = choice(stops=("hello!",))
    events = run(reader, [encode("hello")])
    assert texts(events) == "hello"


def test_incomplete_bytes_become_a_replacement_character_at_the_end() -> None:
    for wanted in ({}, {"want_logprobs": True}, {"stops": ("x",)}):
        ids = encode("🙂")[:-1]
        events = run(choice(**wanted), [ids], scored="want_logprobs" in wanted)
        assert texts(events) == "\ufffd"
        assert [
            token_id
            for event in events
            if isinstance(event, TextDelta)
            for token_id in event.token_ids
        ] == list(ids)


def test_a_failed_sequence_raises() -> None:
    reader = choice()
    with pytest.raises(GenerationFailed, match="NaN"):
        reader.feed(finished(FinishReason.FAILED, error="NaN in the logits"))
    assert reader.is_done


@pytest.mark.parametrize("field", ["response_format", "tools", ""])
def test_a_workers_refusal_is_a_request_error_with_its_field(field: str) -> None:
    reader = choice(format_field=field)
    with pytest.raises(InvalidRequest, match="allows no token") as refused:
        reader.feed(finished(FinishReason.REFUSED, error="the grammar allows no token"))
    assert (reader.is_done, refused.value.field) == (True, field)


def test_logprobs_have_text_bytes_offset_and_alternatives() -> None:
    events = run(choice(want_logprobs=True), [encode("hello world")], scored=True)
    tokens = [token for event in events if isinstance(event, TextDelta) for token in event.logprobs]
    assert [(token.text, token.raw, token.text_offset) for token in tokens] == [
        ("hello", b"hello", 0),
        (" world", b" world", 5),
    ]
    assert [token.logprob for token in tokens] == [-1.0, -2.0]
    assert tokens[0].top[0].text == "hello"
    assert tokens[0].top[0].logprob == -0.5


@given(answers())
def test_tokens_and_logprobs_spell_exactly_the_visible_text(
    case: tuple[str, list[tuple[int, ...]], tuple[str, ...]],
) -> None:
    name, parts, stops = case
    events = run(choice(name=name, stops=stops, want_logprobs=True), parts, scored=True)
    deltas = [event for event in events if isinstance(event, TextDelta)]
    tokens = [token for delta in deltas for token in delta.logprobs]
    assert b"".join(token.raw for token in tokens).decode() == texts(events)
    assert [token_id for delta in deltas for token_id in delta.token_ids] == [
        i for part in parts for i in part
    ][: len(tokens)]
    assert all(0 <= token.text_offset <= len(texts(events)) for token in tokens)
    assert not any(stop in texts(events) for stop in stops)


@given(answers())
def test_the_text_is_the_same_with_and_without_logprobs(
    case: tuple[str, list[tuple[int, ...]], tuple[str, ...]],
) -> None:
    name, parts, stops = case
    plain = run(choice(name=name, stops=stops), parts)
    scored = run(choice(name=name, stops=stops, want_logprobs=True), parts, scored=True)
    assert texts(plain) == texts(scored)
    assert plain[-1] == scored[-1]


def test_echo_opens_the_answer_with_the_prompt() -> None:
    prompt = encode("hello the")
    reader = choice(
        prompt_token_ids=TokenIds.of(prompt), echo=True, echo_text="hello the", at_start=False
    )
    events = [*reader.feed(Accepted(request_id="r")), *run(reader, [encode(" world")])]
    assert texts(events) == "hello the world"
    assert isinstance(events[0], TextDelta)
    assert events[0].token_ids == prompt


def test_echo_with_logprobs_waits_for_the_scores_and_continues_offsets() -> None:
    prompt = encode("hello world")
    reader = choice(
        prompt_token_ids=TokenIds.of(prompt),
        echo=True,
        echo_text="hello world",
        at_start=False,
        want_logprobs=True,
    )
    assert reader.feed(Accepted(request_id="r")) == ()
    scores = (TokenLogprob(prompt[1], -3.0, ((1, -2.0),)),)
    events = list(
        reader.feed(
            PrefillFinished(request_id="r", cache_report=FOUND, timings=Timings(), logprobs=scores)
        )
    )
    events += run(reader, [encode(" world")], scored=True)
    tokens = [token for event in events if isinstance(event, TextDelta) for token in event.logprobs]
    assert [token.text_offset for token in tokens] == [0, 5, 11]
    assert math.isnan(tokens[0].logprob)
    assert [token.logprob for token in tokens[1:]] == [-3.0, -1.0]


def test_scoring_alone_shows_only_the_prompt() -> None:
    prompt = encode("hello the")
    reader = choice(
        prompt_token_ids=TokenIds.of(prompt), echo=True, echo_text="hello the", max_tokens=0
    )
    events = [*reader.feed(Accepted(request_id="r")), *run(reader, [encode(" world")])]
    assert texts(events) == "hello the"
    assert isinstance(events[-1], ChoiceFinished)
    assert events[-1].completion_tokens == 0


def test_the_first_words_leading_space_is_kept_only_in_continuations() -> None:
    ids = encode("hello", "mistral")
    assert texts(run(choice(name="mistral"), [ids])) == "hello"
    assert texts(run(choice(name="mistral", at_start=False), [ids])) == " hello"


def test_a_stop_string_keeps_the_prefill_figures() -> None:
    reader = choice(stops=("!",))
    timings = Timings(queue_seconds=1.0, prefill_seconds=2.0)
    assert reader.feed(PrefillFinished(request_id="r", cache_report=FOUND, timings=timings)) == ()
    events = run(reader, [encode("a! b")])
    assert isinstance(events[-1], ChoiceFinished)
    assert (events[-1].cache_report, events[-1].cached_tokens, events[-1].timings) == (
        FOUND,
        1,
        timings,
    )


def divergent_texts(reader: ChoiceText, memory: CacheReport) -> DivergentTexts | None:
    """Those of an answer that ends immediately."""
    end = reader.feed(
        Finished(
            request_id="r",
            reason=FinishReason.STOP,
            prompt_tokens=1,
            completion_tokens=0,
            cache_report=memory,
        )
    )[-1]
    assert isinstance(end, ChoiceFinished)
    return end.divergent


def test_the_first_differing_token_is_shown_as_text() -> None:
    stored, own = encode("ab")
    diverged = CacheReport(
        outcome=CacheOutcome.DIVERGED,
        divergence=Divergence(position=1, stored_token_id=stored, prompt_token_id=own),
    )
    reader = choice(prompt_token_ids=TokenIds.of(encode("xb")))
    reader.feed(PrefillFinished(request_id="r", cache_report=diverged, timings=Timings()))
    (end,) = reader.feed(finished())
    assert isinstance(end, ChoiceFinished)
    assert end.divergent is None  # Finished has the last word

    reader = choice(prompt_token_ids=TokenIds.of(encode("xb")))
    assert divergent_texts(reader, diverged) == DivergentTexts(before="x", stored="a", prompt="b")


@pytest.mark.parametrize(
    ("stored", "own", "told"),
    [
        (FIRST_IMAGE_KEY + 5, FIRST_IMAGE_KEY + 9, ("[an image]", "[another image]")),
        (FIRST_IMAGE_KEY + 5, encode("b")[0], ("[an image]", "b")),
        (encode("a")[0], FIRST_IMAGE_KEY + 9, ("a", "[an image]")),
    ],
)
def test_a_difference_at_an_image_is_described(
    stored: int, own: int, told: tuple[str, str]
) -> None:
    prompt = (*encode("x"), FIRST_IMAGE_KEY, FIRST_IMAGE_KEY + 1, *encode("y"), own)
    diverged = CacheReport(
        outcome=CacheOutcome.DIVERGED,
        divergence=Divergence(position=4, stored_token_id=stored, prompt_token_id=own),
    )
    reader = choice(prompt_token_ids=TokenIds.of(prompt))
    assert divergent_texts(reader, diverged) == DivergentTexts(
        before="x[an image]y", stored=told[0], prompt=told[1]
    )


@pytest.mark.parametrize("reports_progress", [True, False])
def test_the_end_of_the_prefill_is_reported_only_on_request(reports_progress: bool) -> None:
    text = choice(reports_progress=reports_progress, prompt_token_ids=TokenIds.of((1, 2, 3, 4)))
    read = PromptRead(request_id="a", total_tokens=4, cached_tokens=1, read_tokens=2, seconds=0.5)
    memory, timings = CacheReport(ram_tokens=1), Timings(prefill_seconds=0.75)
    told = [
        *text.feed(read),
        *text.feed(PrefillFinished(request_id="a", cache_report=memory, timings=timings)),
    ]
    expected = [
        PromptProgress(total_tokens=4, cached_tokens=1, read_tokens=2, seconds=0.5),
        PromptProgress(total_tokens=4, cached_tokens=1, read_tokens=4, seconds=0.75),
    ]
    assert told == expected[: 2 if reports_progress else 1]


@pytest.mark.parametrize("stops", [(), ("never",)])
def test_an_unlimited_answer_that_keeps_repeating_is_ended(stops: tuple[str, ...]) -> None:
    said = encode("So. ")
    again = encode("hello the ")
    reader = choice(repeated_tokens=16 * len(again), stops=stops)
    events = run(reader, [said, *([again] * 400)])
    end = events[-1]
    assert isinstance(end, ChoiceFinished)
    assert (end.reason, end.finish_reason, end.repeats) == (FinishReason.LENGTH, "length", True)
    assert 16 * len(again) <= end.completion_tokens < 400 * len(again), (
        "it is ended before it is through"
    )
    assert texts(events).startswith("So. hello the hello the ")
    assert len([event for event in events if isinstance(event, ChoiceFinished)]) == 1
    unguarded = choice(stops=stops)
    assert texts(run(unguarded, [said, *([again] * 400)])) == "So. " + "hello the " * 400

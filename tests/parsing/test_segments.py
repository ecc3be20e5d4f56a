"""However a text is cut, its segments joined are the text, and their kinds are those of the whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.messages.events import Accepted, Finished, FinishReason, TokensGenerated
from holdfast.messages.output import OutputEvent, TextDelta
from holdfast.parsing.choice import ChoiceRules, ChoiceText
from holdfast.parsing.formats import families
from holdfast.parsing.formats.plain import PlainFormat
from holdfast.parsing.pieces import TokenPieces
from holdfast.parsing.segments import Segment, SegmentFormat
from tests.fakes import toy_tokenizers
from tests.fakes.thinking_format import ThinkingFormat

EVERY_FORMAT = [PlainFormat, ThinkingFormat, *families.FORMATS.values()]
texts = st.text(alphabet="<think/>ab🙂\n", max_size=40) | st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "a", "🙂", "stop"]), max_size=10
).map("".join)
TOKENIZER = toy_tokenizers.EXACT["byte_level"]()
PIECES = TokenPieces(TOKENIZER)


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def kinds_of(segments: list[Segment]) -> list[str]:
    """The kind of every character."""
    return [segment.kind for segment in segments for _ in segment.text]


@pytest.mark.parametrize("new_format", EVERY_FORMAT)
@given(text=texts, places=st.lists(st.integers(0, 100), max_size=8))
def test_segments_joined_are_the_text_and_cuts_change_no_kind(
    new_format: Callable[[], SegmentFormat], text: str, places: list[int]
) -> None:
    in_parts, at_once = new_format(), new_format()
    segments = [segment for part in cut(text, places) for segment in in_parts.push(part)] + [*in_parts.flush()]
    assert "".join(segment.text for segment in segments) == text
    assert all(segment.text for segment in segments)
    assert kinds_of(segments) == kinds_of([*at_once.push(text), *at_once.flush()])


def answer(text: str, *, per_event: int, wants_logprobs: bool = False, stops: tuple[str, ...] = ()) -> list[OutputEvent]:
    """What a client sees of a text that the model of the family `thinker` writes."""
    rules = ChoiceRules(
        prompt_token_ids=(1,),
        stop_token_ids=frozenset(),
        max_tokens=1000,
        family="thinker",
        stops=stops,
        want_logprobs=wants_logprobs,
    )
    reader, ids = ChoiceText(index=0, pieces=PIECES, rules=rules), tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)
    events = [*reader.feed(Accepted(request_id="r"))]
    for start in range(0, len(ids), per_event):
        events += reader.feed(TokensGenerated(request_id="r", token_ids=ids[start : start + per_event]))
    end = Finished(request_id="r", reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=len(ids))
    return [*events, *reader.feed(end)]


def shown(events: list[OutputEvent]) -> list[tuple[str, str]]:
    """The kinds and texts of the deltas, those of one kind joined."""
    deltas = [event for event in events if isinstance(event, TextDelta) and event.text]
    return [(kind, "".join(delta.text for delta in run)) for kind, run in groupby(deltas, key=lambda delta: delta.kind)]


@pytest.fixture(autouse=True, scope="module")
def thinker() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.FORMATS, "thinker", ThinkingFormat)  # type: ignore[arg-type]
        yield


@pytest.mark.parametrize("wants_logprobs", [False, True])
@given(text=texts, per_event=st.integers(1, 7))
def test_a_client_sees_each_kind_apart_and_every_token_once(text: str, per_event: int, wants_logprobs: bool) -> None:
    events = answer(text, per_event=per_event, wants_logprobs=wants_logprobs)
    whole = ThinkingFormat()
    kinds = kinds_of([*whole.push(text), *whole.flush()])
    assert [kind for kind, part in shown(events) for _ in part] == kinds
    assert "".join(part for _, part in shown(events)) == text
    ids = [token_id for event in events if isinstance(event, TextDelta) for token_id in event.token_ids]
    assert ids == TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("per_event", [1, 100])
def test_a_stop_string_counts_in_visible_text_only(per_event: int) -> None:
    events = answer("a<think>stop</think>bstopc", per_event=per_event, stops=("stop",))
    assert shown(events) == [("text", "a"), ("reasoning", "<think>stop</think>"), ("text", "b")]


def test_the_beginning_of_a_stop_string_is_shown_before_the_reasoning_behind_it() -> None:
    assert shown(answer("ast<think>op</think>", per_event=1, stops=("stop",))) == [
        ("text", "ast"),
        ("reasoning", "<think>op</think>"),
    ]


def test_a_family_without_a_format_writes_plain_text() -> None:
    assert isinstance(families.segment_format("llama"), PlainFormat)
    assert isinstance(families.segment_format(""), PlainFormat)

"""Anthropic's token counts: three disjoint parts of the prompt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.anthropic.answer import MessageUsage, usage_of
from holdfast.front.output import TokenCounts
from holdfast.front.request import MarkedPrefix


def usage(cached: int, *breakpoints: tuple[int, float], prompt: int = 100) -> MessageUsage:
    marked = tuple(MarkedPrefix(tokens=tokens, seconds=seconds) for tokens, seconds in breakpoints)
    return usage_of(
        TokenCounts(
            prompt_tokens=prompt, completion_tokens=7, cached_tokens=cached, breakpoints=marked
        )
    )


def test_without_breakpoints_no_tokens_count_as_cache_creation() -> None:
    assert usage(0).input_tokens == 100
    read = usage(60)
    assert (read.input_tokens, read.cache_creation_input_tokens, read.cache_read_input_tokens) == (
        40,
        0,
        60,
    )


def test_prefilled_tokens_before_the_last_breakpoint_count_as_cache_creation() -> None:
    cold, warm = usage(0, (40, 300.0), (90, 300.0)), usage(60, (40, 300.0), (90, 300.0))
    assert (cold.input_tokens, cold.cache_creation_input_tokens, cold.cache_read_input_tokens) == (
        10,
        90,
        0,
    )
    assert (warm.input_tokens, warm.cache_creation_input_tokens, warm.cache_read_input_tokens) == (
        10,
        30,
        60,
    )


def test_more_may_be_cached_than_the_client_has_marked() -> None:
    assert usage(99, (90, 300.0)).cache_creation_input_tokens == 0


def test_tokens_cached_for_an_hour_are_counted_separately() -> None:
    created = usage(10, (40, 3600.0), (90, 300.0)).cache_creation
    assert (created.ephemeral_1h_input_tokens, created.ephemeral_5m_input_tokens) == (30, 50)


@given(
    prompt=st.integers(1, 50),
    cached=st.integers(0, 49),
    breakpoints=st.lists(
        st.tuples(st.integers(1, 50), st.sampled_from((300.0, 3600.0))), max_size=4
    ),
)
def test_the_parts_add_up_to_the_prompt(
    prompt: int, cached: int, breakpoints: list[tuple[int, float]]
) -> None:
    cached = min(cached, prompt - 1)
    found = usage(
        cached, *[(min(tokens, prompt), seconds) for tokens, seconds in breakpoints], prompt=prompt
    )
    created = found.cache_creation
    parts = (found.input_tokens, found.cache_creation_input_tokens, found.cache_read_input_tokens)
    assert sum(parts) == prompt
    assert min(*parts, created.ephemeral_1h_input_tokens, created.ephemeral_5m_input_tokens) >= 0
    assert (
        created.ephemeral_1h_input_tokens + created.ephemeral_5m_input_tokens
        == found.cache_creation_input_tokens
    )

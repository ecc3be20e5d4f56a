"""Token counts as Anthropic's clients add them up: what was read from the cache, what was put
there, and the rest.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.front.server.answers import TokenCounts

_LONG_SECONDS = 3600.0


class CacheCreation(msgspec.Struct, frozen=True, kw_only=True):
    """cache_creation_input_tokens by the time for which they are kept."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class ThinkingTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Those of output_tokens that belong to thoughts, their markers included."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt has input_tokens + cache_creation_input_tokens + cache_read_input_tokens tokens."""

    input_tokens: int  # read anew, behind the last breakpoint
    cache_creation_input_tokens: int  # read anew, up to the last breakpoint
    cache_read_input_tokens: int  # not read again
    cache_creation: CacheCreation
    output_tokens: int  # with those of thoughts
    output_tokens_details: ThinkingTokens
    # Of Anthropic's own service; clients that check its types expect them.
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"
    inference_geo: None = None


def usage_of(counts: TokenCounts) -> MessageUsage:
    """The counts of one answer."""
    cached = counts.cached_tokens
    last = max((each.tokens for each in counts.breakpoints), default=0)
    last_long = max(
        (each.tokens for each in counts.breakpoints if each.seconds >= _LONG_SECONDS), default=0
    )
    created, long = max(0, last - cached), max(0, last_long - cached)
    return MessageUsage(
        input_tokens=counts.prompt_tokens - cached - created,
        cache_creation_input_tokens=created,
        cache_read_input_tokens=cached,
        cache_creation=CacheCreation(
            ephemeral_5m_input_tokens=created - long, ephemeral_1h_input_tokens=long
        ),
        output_tokens=counts.completion_tokens,
        output_tokens_details=ThinkingTokens(thinking_tokens=counts.reasoning_tokens),
    )

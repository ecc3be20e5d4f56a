"""What the prompt of a conversation's next turn will begin with, as far as it can be told when an
answer has ended.

It is rendered as that turn will be, answers put back and all, with two different next messages:
what both have in common in tokens does not depend on the message.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.front.prompt.conversation import REASONING_FIELDS, answer_message
from holdfast.front.prompt.prepare import Prepared, conversation_tokens
from holdfast.front.prompt.rewritten_history import next_messages
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.wire.commands import ReadAhead, SequenceRequest
from holdfast.wire.output import OutputDelta, text_of, tool_calls_of
from holdfast.wire.packed import common_tokens
from holdfast.wire.requests import ChatPrompt, GenerationRequest, SamplingParams
from holdfast.wire.token_ids import TokenIds

LEAST_TOKENS = 64  # fewer are read in no time when the turn comes
# what a message may begin with: a word, or what the tokenizer may join to the line before
_PROBES = ("Next", "\n\n1. next")


def read_ahead_request(
    request: GenerationRequest,
    prompt: ChatPrompt,
    bundle: TokenizerBundle,
    *,
    prepared: Prepared,
    deltas: Sequence[OutputDelta],
    context_tokens: int,
) -> SequenceRequest | None:
    """What is to be read before the next turn comes, of a request's conversation and its answer;
    None when there is too little.

    deltas: the whole answer. Raises InvalidRequest where the template refuses such a turn.
    """
    calls = tool_calls_of(deltas)
    sends_thoughts = any(map(_has_thought, prompt.messages))
    answer = answer_message(
        text_of(deltas),
        reasoning=text_of(deltas, "reasoning") if sends_thoughts else "",
        calls=calls,
    )
    ahead: TokenIds | None = None
    for probe in _PROBES:
        messages = (*prompt.messages, answer, *next_messages(calls, probe))
        tokens = conversation_tokens(
            request, msgspec.structs.replace(prompt, messages=messages), bundle
        )
        ahead = tokens if ahead is None else ahead[: common_tokens(ahead.packed, tokens.packed)]
    generated = TokenIds.of(token_id for delta in deltas for token_id in delta.token_ids)
    known = (
        0
        if ahead is None
        else common_tokens(ahead.packed, (prepared.rules.prompt_token_ids + generated).packed)
    )
    if ahead is None or len(ahead) - known < LEAST_TOKENS or len(ahead) >= context_tokens:
        return None
    return SequenceRequest(
        request_id=f"{request.request_id}/ahead",
        prompt_token_ids=ahead,
        max_tokens=0,
        sampling=SamplingParams(seed=0),
        tenant=request.tenant,
        session_id=request.session_id,
        read_ahead=ReadAhead(known_tokens=known),
    )


def _has_thought(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") == "assistant"
        and any(map(message.get, REASONING_FIELDS))
    )

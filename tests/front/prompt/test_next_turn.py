"""Tokens prefilled ahead are those that the next turn's prompt begins with, for any user message."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import InvalidRequest
from holdfast.front.output import OutputDelta
from holdfast.front.prompt.known_answers import KnownAnswers
from holdfast.front.prompt.next_turn import MIN_TOKENS, read_ahead_request
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.request import ChatPrompt
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import common_tokens
from tests.fakes.agent_turns import QUESTION, answer, ask, in_any_tokens, sent_back
from tests.fakes.thinking_bundle import TEMPLATE, bundle_of

BUNDLE = bundle_of()
CALL = '\n<tool_call>\n{"name":  "f", "arguments": {"a":1}}\n</tool_call>'
LONG = "hello world, hello. " * 30


def ahead_of(
    bundle: TokenizerBundle,
    messages: list[dict[str, Any]],
    said: str,
    *,
    context_tokens: int = 100_000,
    seed: int = 0,
) -> tuple[SequenceRequest | None, list[OutputDelta]]:
    """The request to prefill ahead after this answer, and the deltas for its client."""
    request, prepared = ask(bundle, messages, session_id="s", tenant="t")
    deltas = answer(bundle, request, prepared, in_any_tokens(said, bundle, random.Random(seed)))
    assert isinstance(request.prompt, ChatPrompt)
    ahead = read_ahead_request(
        request,
        request.prompt,
        bundle,
        prepared=prepared,
        deltas=deltas,
        context_tokens=context_tokens,
    )
    return ahead, deltas


def prompt_of(bundle: TokenizerBundle, messages: list[dict[str, Any]]) -> bytes:
    return ask(bundle, messages, tenant="t")[1].sequences[0].prompt_token_ids.packed


@settings(max_examples=60, deadline=None)
@given(
    thought=st.text("helo wrd\n.", min_size=1, max_size=30).filter(str.strip),
    text=st.text('helo wrd\n{}"é.', max_size=60).map(lambda text: text + LONG),
    following=st.text(min_size=1, max_size=20).filter(str.strip),
    keeps_thoughts=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_next_prompt_begins_with_it_for_any_user_message(
    thought: str, text: str, following: str, keeps_thoughts: bool, seed: int
) -> None:
    bundle = replace(BUNDLE, known_answers=KnownAnswers())
    ahead, deltas = ahead_of(
        bundle, [QUESTION], f"<think>\n{thought}\n</think>\n\n{text}", seed=seed
    )
    assert ahead is not None
    message, _ = sent_back(deltas, random.Random(seed), keeps_thoughts=keeps_thoughts)
    prompt = prompt_of(bundle, [QUESTION, message, {"role": "user", "content": following}])
    read = ahead.prompt_token_ids
    assert common_tokens(read.packed, prompt) == len(read)
    shown = bundle.tokenizer.decode(read, skip_special_tokens=False)
    assert shown.rstrip().endswith("<|im_end|>\n<|im_start|>user"), (
        "nearly all that is certain is read"
    )


def test_thoughts_since_the_last_question_are_left_out() -> None:
    bundle = replace(BUNDLE, known_answers=KnownAnswers())
    messages: list[dict[str, Any]] = [QUESTION]
    for number in range(3):
        ahead, deltas = ahead_of(
            bundle, messages, f"<think>\nhello {number}\n</think>\n\n{LONG}{CALL}"
        )
        assert ahead is None, "results follow: nothing is left out before them"
        messages += sent_back(deltas, random.Random(0), keeps_thoughts=False)
    ahead, deltas = ahead_of(bundle, messages, f"<think>\nworld\n</think>\n\n{LONG}")
    assert ahead is not None
    assert ahead.read_ahead is not None
    first = bundle.tokenizer.decode(
        ahead.prompt_token_ids[: ahead.read_ahead.known_tokens], skip_special_tokens=False
    )
    assert first.count("<|im_start|>assistant") == 1
    assert "<think>" not in bundle.tokenizer.decode(
        ahead.prompt_token_ids, skip_special_tokens=False
    )
    next_messages = [*messages, *sent_back(deltas, random.Random(0), keeps_thoughts=False)]
    assert prompt_of(bundle, next_messages).startswith(ahead.prompt_token_ids.packed)


def test_it_has_the_conversations_tenant_and_session_and_generates_nothing() -> None:
    ahead, _ = ahead_of(
        replace(BUNDLE, known_answers=KnownAnswers()),
        [QUESTION],
        f"<think>\nwhy\n</think>\n\n{LONG}",
    )
    assert ahead is not None
    assert (ahead.tenant, ahead.session_id, ahead.max_tokens) == ("t", "s", 0)
    assert ahead.is_idle_work


@pytest.mark.parametrize(
    "said",
    [LONG, "<think>\nwhy\n</think>\n\nhello"],
    ids=["nothing to leave out", "a short answer"],
)
def test_known_or_short_history_is_not_prefilled_ahead(said: str) -> None:
    ahead, _ = ahead_of(replace(BUNDLE, known_answers=KnownAnswers()), [QUESTION], said)
    assert ahead is None


def test_history_beyond_the_window_is_not_prefilled_ahead() -> None:
    said = f"<think>\nwhy\n</think>\n\n{LONG}"
    ahead, _ = ahead_of(replace(BUNDLE, known_answers=KnownAnswers()), [QUESTION], said)
    assert ahead is not None
    assert len(ahead.prompt_token_ids) > MIN_TOKENS
    short, _ = ahead_of(
        replace(BUNDLE, known_answers=KnownAnswers()),
        [QUESTION],
        said,
        context_tokens=len(ahead.prompt_token_ids),
    )
    assert short is None


def test_losses_are_counted_when_the_turn_arrives() -> None:
    bundle = replace(BUNDLE, known_answers=KnownAnswers())
    _, deltas = ahead_of(bundle, [QUESTION], f"<think>\nwhy\n</think>\n\n{LONG}")
    assert (bundle.known_answers.dropped_tokens, bundle.known_answers.put_back_answers) == (0, 0)
    messages = [QUESTION, *sent_back(deltas, random.Random(0))]
    assert ask(bundle, messages, tenant="t")[1].dropped_tokens > 0


def test_it_includes_thoughts_if_the_client_sends_them() -> None:
    keeping = bundle_of(TEMPLATE.replace(" and loop.index0 > ns.last", ""))
    before = [
        QUESTION,
        {"role": "assistant", "content": "hello", "reasoning_content": "why"},
        QUESTION,
    ]
    said = f"<think>\nwhy\n</think>\n\n{LONG}"
    assert ahead_of(keeping, before, said)[0] is None, "the answer comes back as it was written"
    without = [QUESTION, {"role": "assistant", "content": "hello"}, QUESTION]
    assert ahead_of(keeping, without, said)[0] is not None


def test_a_turn_refused_by_the_template_is_an_error() -> None:
    bundle = bundle_of(
        "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}" + TEMPLATE
    )
    with pytest.raises(InvalidRequest):
        ahead_of(bundle, [QUESTION], f"<think>\nwhy\n</think>\n\n{LONG}")

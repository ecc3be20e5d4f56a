"""Tokens restored in the next turn decode to exactly what the client received, however the answer
ended.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

import holdfast
from holdfast.front.output import (
    ChoiceFinished,
    OutputDelta,
    PromptProgress,
    text_of,
    tool_calls_of,
)
from holdfast.front.prompt.known_answers import KnownAnswers
from holdfast.front.prompt.next_turn import observer
from holdfast.front.prompt.prepare import prompt_text
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.request import ToolChoice
from holdfast.wire.events import Finished, FinishReason, TokensGenerated
from tests.fakes import toy_tokenizers
from tests.fakes.agent_turns import QUESTION, ask, in_any_tokens
from tests.fakes.family_bundles import bundle as family_bundle
from tests.fakes.scripted_client import model_info
from tests.fakes.thinking_bundle import bundle_of

_DEMO = Path(holdfast.__file__).parent / "models/bundled/holdfast-demo/tokenizer.json"
_CHATML = ("<|im_start|>", "<|im_end|>")
_SHOWN = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def _byte_fallback() -> Backend:
    backend = toy_tokenizers.gemma()
    toy_tokenizers.add(backend, _CHATML, _SHOWN)
    return backend


def _space_in_front() -> Backend:
    backend = toy_tokenizers.mistral()
    toy_tokenizers.add(backend, _CHATML, _SHOWN)
    return backend


BACKENDS = {
    "a real vocabulary": lambda: Backend.from_file(str(_DEMO)),
    "byte-level": lambda: toy_tokenizers.byte_level(shown=_SHOWN),
    "byte fallback": _byte_fallback,
    "a space in front": _space_in_front,
}


@cache
def bundle(name: str) -> TokenizerBundle:
    return bundle_of(backend=BACKENDS[name]())


def received(
    bundle: TokenizerBundle,
    tokens: tuple[int, ...],
    end: FinishReason | None,
    *,
    per_event: int = 3,
    **fields: Any,
) -> tuple[list[OutputDelta], FinishReason | None]:
    """Answer a request with these tokens. Returns what its client received and why it ended.

    end: None: the client, or the server at a deadline, closed the stream after the last token.
    """
    request, prepared = ask(bundle, [QUESTION], **fields)
    choice, observe = prepared.choice(), observer(request, bundle, prepared)
    events: list[Any] = [
        TokensGenerated(request_id="r/0", token_ids=tokens[place : place + per_event])
        for place in range(0, len(tokens), per_event)
    ]
    if end is not None:
        events.append(
            Finished(request_id="r/0", reason=end, prompt_tokens=1, completion_tokens=len(tokens))
        )
    deltas: list[OutputDelta] = []
    reason = None
    for event in events:
        for seen in choice.feed(event):
            observe(seen)
            if isinstance(seen, ChoiceFinished):
                reason = seen.reason
            else:
                assert not isinstance(seen, PromptProgress)
                deltas.append(seen)
    return deltas, reason


def as_message(deltas: list[OutputDelta]) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text_of(deltas),
        "reasoning_content": text_of(deltas, "reasoning"),
    }
    calls = [call for call in tool_calls_of(deltas) if call.is_complete]
    if calls:
        message["tool_calls"] = [
            {"id": each.id, "function": {"name": each.name, "arguments": each.arguments}}
            for each in calls
        ]
    return message


def meaning(deltas: list[OutputDelta]) -> tuple[Any, ...]:
    calls = [
        (call.name, json.loads(call.arguments) if call.is_complete else None)
        for call in tool_calls_of(deltas)
    ]
    return text_of(deltas, "reasoning").strip(), text_of(deltas).strip(), calls


def put_back(bundle: TokenizerBundle, message: dict[str, Any]) -> tuple[int, ...] | None:
    """The tokens that replace those of an answer in the next turn; None if nothing replaces them."""
    request, prepared = ask(bundle, [QUESTION, message])
    answers = prompt_text(
        request, bundle, request.prompt, info=model_info(context_tokens=100_000)
    ).answers
    if not answers:
        return None
    opening = bundle.tokenizer.encode(prepared.answer_opening or "", add_special_tokens=False)
    token_ids = tuple(answers[0].token_ids)
    assert token_ids[: len(opening)] == tuple(opening)
    return token_ids[len(opening) :]


CALL = '<tool_call>\n{"name": "f", "arguments": {"path": "a é b"}}\n</tool_call>'
texts = st.lists(
    st.sampled_from(
        [
            "hello",
            " world",
            " the",
            "é",
            "🙂",
            "你好",
            "\n\n",
            "(;\n\n",
            "  ",
            ", not",
            "STOP",
            " 12",
        ]
    ),
    max_size=8,
).map("".join)


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, tuple[str, ...], int]:
    """An answer, stop strings that occur in it, and the number of tokens that a length limit cuts
    off.
    """
    said = draw(texts)
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        if said:
            start = draw(st.integers(0, len(said) - 1))
            stops.append(said[start : start + draw(st.integers(1, 4))])
    thought = draw(st.sampled_from(["", "<think>\nwhy hello\n</think>\n\n"]))
    calls = draw(st.sampled_from(["", CALL, f"\n{CALL}\n{CALL}", f"{CALL} after"]))
    return thought + said + calls, tuple(stops), draw(st.sampled_from([0, 0, 1, 2, 5]))


@settings(max_examples=100, deadline=None)
@given(
    answer=answers(),
    name=st.sampled_from(sorted(BACKENDS)),
    mode=st.sampled_from(["auto", "none", "one call"]),
    end=st.sampled_from([*FinishReason, None]),
    per_event=st.integers(1, 9),
    seed=st.none() | st.integers(0, 2**16),
)
@example(("hello (;\n\n", ("\n\n",), 0), "a real vocabulary", "auto", FinishReason.STOP, 9, None)
def test_restored_tokens_mean_what_the_client_received(
    answer: tuple[str, tuple[str, ...], int],
    name: str,
    mode: str,
    end: FinishReason | None,
    per_event: int,
    seed: int | None,
) -> None:
    said, stops, left_out = answer
    if end in (FinishReason.FAILED, FinishReason.REFUSED):
        end = FinishReason.CANCELLED  # these raise an error and record nothing
    own = replace(bundle(name), known_answers=KnownAnswers())
    ids = (
        tuple(own.tokenizer.encode(said, add_special_tokens=False))
        if seed is None
        else in_any_tokens(said, own, random.Random(seed))
    )
    ids = ids[: len(ids) - left_out] if left_out < len(ids) else ids
    choice = {
        "auto": ToolChoice(),
        "none": ToolChoice(mode="none"),
        "one call": ToolChoice(parallel=False),
    }[mode]
    deltas, reason = received(own, ids, end, per_event=per_event, stop=stops, tool_choice=choice)
    tokens = put_back(own, as_message(deltas))
    if tokens is None:
        return
    again, _ = received(replace(own, known_answers=KnownAnswers()), tokens, reason)
    assert meaning(again) == meaning(deltas)
    if not tool_calls_of(deltas):
        whole = own.tokenizer.decode(tokens, skip_special_tokens=False)
        assert whole.endswith(text_of(deltas))
        assert text_of(deltas, "reasoning") or whole == text_of(deltas)


def test_tokens_before_a_cut_one_are_restored_as_generated() -> None:
    own = replace(bundle("byte-level"), known_answers=KnownAnswers())
    encode = own.tokenizer.encode
    letters = [token for letter in "the" for token in encode(letter, add_special_tokens=False)]
    (hello,) = encode("hello", add_special_tokens=False)
    deltas, _ = received(own, (*letters, hello), FinishReason.STOP, stop=("lo",))
    assert text_of(deltas) == "thehel"
    assert put_back(own, as_message(deltas)) == (
        *letters,
        *encode("hel", add_special_tokens=False),
    )


def test_answers_differing_in_white_space_return_as_received() -> None:
    own = replace(bundle("byte-level"), known_answers=KnownAnswers())
    encode = own.tokenizer.encode
    said = {}
    for text in ("the", "the\n\n", " the"):
        ids = tuple(token for each in text for token in encode(each, add_special_tokens=False))
        deltas, _ = received(own, ids, FinishReason.LENGTH)
        said[ids] = as_message(deltas)
    assert [put_back(own, message) for message in said.values()] == [*said]


@pytest.mark.parametrize("stop", [(), ("world!",)])
@pytest.mark.parametrize("tail", ["<|end|>", "<|end|>zz", "<|end|>\n", "<|end|>\nz"])
@pytest.mark.parametrize("said", ["hello", "<|content|>hello", "<|content|>hello world \n"])
def test_a_message_end_ends_an_answer_like_the_models_own_end(
    said: str, tail: str, stop: tuple[str, ...]
) -> None:
    """Text generated after it is neither shown nor remembered, and nothing before is lost."""
    own = family_bundle("solar")
    assert own.dialect.message_ends == ("<|end|>",)
    found = []
    for text in (said, said + tail):
        ids = tuple(own.tokenizer.encode(text, add_special_tokens=False))
        deltas, reason = received(own, ids, FinishReason.STOP, per_event=1, stop=stop)
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        found.append((text_of(deltas), token_ids, reason))
    assert found[0] == found[1]


def test_the_end_of_a_message_is_not_restored() -> None:
    own = family_bundle("solar")
    ids = tuple(own.tokenizer.encode("hello the world<|end|>zzz", add_special_tokens=False))
    deltas, _ = received(own, ids, FinishReason.STOP, per_event=1)
    turns = [QUESTION, as_message(deltas), QUESTION]
    known, fresh = (
        ask(replace(own, known_answers=answers), turns)[1].sequences[0].prompt_token_ids
        for answers in (own.known_answers, KnownAnswers())
    )
    assert known == fresh

"""Requests become sequences: whole prompts, true limits, one seed per choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import LimitsSettings
from holdfast.errors import InvalidRequest, PromptTooLong
from holdfast.front.prompt.dialects import find_dialect
from holdfast.front.prompt.prepare import Prepared, prepare, splice
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.token_memory import TokenMemory
from holdfast.front.prompt.tokenize import EncodedText, Tokenizer, load_tokenizer
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.request import (
    ChatPrompt,
    GenerationRequest,
    OutputFormat,
    PlacedAnswer,
    Prompt,
    PromptText,
    Thinking,
    ThinkingEffort,
)
from holdfast.models.download import demo_folder
from holdfast.wire.events import ModelInfo
from holdfast.wire.requests import SamplingParams, TokenIds
from tests.fakes import toy_tokenizers
from tests.fakes.scripted_client import model_info

HELLO = ChatPrompt(messages=({"role": "user", "content": "hello"},))


def ready(
    bundle: TokenizerBundle, prompt: Prompt, *, info: ModelInfo | None = None, **fields: Any
) -> Prepared:
    request = GenerationRequest(request_id="r", model="m", prompt=prompt, **fields)
    return prepare(request, bundle, info=info or model_info(), limits=LimitsSettings())


def test_a_conversation_is_tokenized_without_further_special_tokens(
    bundle: TokenizerBundle,
) -> None:
    prepared = ready(bundle, HELLO)
    text = bundle.tokenizer.decode(
        prepared.sequences[0].prompt_token_ids, skip_special_tokens=False
    )
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert prepared.sequences[0].stop_token_ids == bundle.tokenizer.eos_token_ids


def test_text_is_tokenized_with_special_tokens(base_side: TokenizerBundle) -> None:
    ids = tuple(ready(base_side, "hello").sequences[0].prompt_token_ids)
    assert ids[0] == base_side.tokenizer.bos_token_id
    assert ids.count(ids[0]) == 1


def test_a_bos_in_the_text_is_not_doubled(base_side: TokenizerBundle) -> None:
    once = ready(base_side, "hello").sequences[0].prompt_token_ids
    assert ready(base_side, "<|begin_of_text|>hello").sequences[0].prompt_token_ids == once


def test_token_ids_are_used_unchanged(base_side: TokenizerBundle) -> None:
    assert ready(base_side, (5, 6, 5)).sequences[0].prompt_token_ids == TokenIds.of((5, 6, 5))


def test_the_constrained_field_of_an_answer_is_known(bundle: TokenizerBundle) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    form = OutputFormat(kind="json_object", field="format")
    offered = msgspec.structs.replace(HELLO, tools=(tool,))
    assert ready(bundle, HELLO).rules.format_field == ""
    assert ready(bundle, offered).rules.format_field == "tools"
    assert ready(bundle, offered, output_format=form).rules.format_field == "format"


@pytest.mark.parametrize("prompt", ["", ()])
def test_an_empty_prompt_is_the_bos_token_or_refused(
    prompt: Prompt, bundle: TokenizerBundle, base_side: TokenizerBundle
) -> None:
    assert ready(base_side, prompt).sequences[0].prompt_token_ids.view.tolist() == [
        base_side.tokenizer.bos_token_id
    ]
    with pytest.raises(InvalidRequest, match="empty") as caught:
        ready(bundle, prompt, prompt_field="prompt")
    assert caught.value.field == "prompt"


def test_an_empty_conversation_is_refused(bundle: TokenizerBundle) -> None:
    with pytest.raises(InvalidRequest, match="at least one message") as caught:
        ready(bundle, ChatPrompt(messages=()))
    assert caught.value.field == "messages"


def test_a_model_without_template_cannot_chat(base_side: TokenizerBundle) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ready(base_side, HELLO)


@pytest.mark.parametrize("token_ids", [(1, -1), (1, 1000)])
def test_token_ids_outside_the_vocabulary_are_refused(
    bundle: TokenizerBundle, token_ids: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidRequest, match="0 to 999") as caught:
        ready(bundle, token_ids, prompt_field="prompt")
    assert caught.value.field == "prompt"


def test_a_tokenizer_larger_than_the_model_is_not_trusted(bundle: TokenizerBundle) -> None:
    with pytest.raises(InvalidRequest, match="0 to 9"):
        ready(bundle, "hello", info=model_info(vocab_size=10))


def test_a_prompt_that_leaves_no_room_is_too_long(bundle: TokenizerBundle) -> None:
    info = model_info(context_tokens=8)
    assert ready(bundle, (1,) * 7, info=info).sequences[0].max_tokens == 1
    with pytest.raises(PromptTooLong) as caught:
        ready(bundle, (1,) * 8, info=info, prompt_field="prompt")
    assert (caught.value.prompt_tokens, caught.value.context_tokens, caught.value.field) == (
        8,
        8,
        "prompt",
    )


def test_a_prompt_that_is_only_scored_may_fill_the_window(bundle: TokenizerBundle) -> None:
    prepared = ready(bundle, (1,) * 8, info=model_info(context_tokens=8), max_tokens=0, echo=True)
    assert prepared.sequences[0].max_tokens == 0


def test_a_text_of_many_megabytes_is_judged_by_its_beginning(bundle: TokenizerBundle) -> None:
    with pytest.raises(PromptTooLong) as caught:
        ready(bundle, "hello " * 2_000_000)
    assert caught.value.prompt_tokens > 1_000_000


def test_a_long_text_of_few_tokens_is_not_refused(bundle: TokenizerBundle) -> None:
    text = "<|endoftext|>" * 180  # 13 characters per token
    assert len(ready(bundle, text).sequences[0].prompt_token_ids) == 180


@pytest.mark.parametrize(("asked", "granted"), [(None, 195), (10, 10), (32_000, 195)])
def test_max_tokens_is_limited_to_the_remaining_window(
    bundle: TokenizerBundle, asked: int | None, granted: int
) -> None:
    assert ready(bundle, (1,) * 5, max_tokens=asked).sequences[0].max_tokens == granted


@pytest.mark.parametrize("kv_bits", ["", "auto"])
@pytest.mark.parametrize(
    ("prompt", "asked", "granted"),
    [
        (5, None, 95),  # without quantization
        (5, 95, 95),
        (5, 96, 96),  # in 8 bits
        (5, 32_000, 95),
        (75, None, 25),
        (76, None, 124),  # too little room for an answer without quantization
        (150, None, 50),
        (150, 32_000, 50),
        (199, 1, 1),
    ],
)
def test_auto_kv_bits_extend_the_context_only_when_needed(
    bundle: TokenizerBundle, kv_bits: Any, prompt: int, asked: int | None, granted: int
) -> None:
    info = model_info(context_tokens=200 if kv_bits == "" else 100)
    bits = "auto" if kv_bits == "" else "native"
    info = msgspec.structs.replace(
        info,
        kv=msgspec.structs.replace(info.kv, bits=bits),
        context_tokens_by_bits={"native": 100, "8": 200, "4": 300, "auto": 200},
    )
    prepared = ready(bundle, (1,) * prompt, info=info, max_tokens=asked, kv_bits=kv_bits)
    assert prepared.sequences[0].max_tokens == granted
    with pytest.raises(PromptTooLong, match="maximum context length is 200 tokens"):
        ready(bundle, (1,) * 200, info=info, kv_bits=kv_bits)


def test_choices_share_the_prompt_and_increment_the_seed(bundle: TokenizerBundle) -> None:
    prepared = ready(bundle, HELLO, choices=3, sampling=SamplingParams(seed=2**63 - 2))
    assert [sequence.sampling.seed for sequence in prepared.sequences] == [2**63 - 2, 2**63 - 1, 0]
    assert [sequence.request_id for sequence in prepared.sequences] == ["r/0", "r/1", "r/2"]
    assert prepared.sequences[0].prompt_token_ids is prepared.sequences[2].prompt_token_ids


def test_choices_share_the_session_and_later_ones_are_alternatives(bundle: TokenizerBundle) -> None:
    prepared = ready(bundle, HELLO, choices=3, session_id="s")
    assert [each.session_id for each in prepared.sequences] == ["s", "s", "s"]
    assert [each.is_alternative for each in prepared.sequences] == [False, True, True]


def test_without_a_seed_every_request_draws_one(bundle: TokenizerBundle) -> None:
    seeds = {ready(bundle, HELLO).sequences[0].sampling.seed for _ in range(8)}
    assert len(seeds) == 8


def test_the_models_recommendations_fill_open_fields(bundle: TokenizerBundle) -> None:
    sampling = ready(bundle, HELLO, unset_sampling=("temperature",)).sequences[0].sampling
    assert (sampling.temperature, sampling.top_k) == (0.6, 0)


def test_turn_end_tokens_end_chats_but_not_texts(bundle: TokenizerBundle) -> None:
    ending = replace(bundle, turn_end_token_ids=(7,))
    assert 7 in ready(ending, HELLO).sequences[0].stop_token_ids
    assert 7 not in ready(ending, "hello").sequences[0].stop_token_ids


def test_ignore_eos_removes_all_end_tokens_of_a_text(bundle: TokenizerBundle) -> None:
    assert ready(bundle, HELLO, ignore_eos=True).sequences[0].stop_token_ids == ()


def test_stop_tokens_outside_the_vocabulary_are_not_sent(base_side: TokenizerBundle) -> None:
    ids = ready(base_side, "x", info=model_info(vocab_size=998)).sequences[0].stop_token_ids
    assert ids == tuple(
        token_id for token_id in base_side.tokenizer.eos_token_ids if token_id < 998
    )


def test_echo_repeats_the_text_as_sent(base_side: TokenizerBundle) -> None:
    assert ready(base_side, "hello <|eot_id|>", echo=True).rules.echo_text == "hello <|eot_id|>"
    assert (
        ready(
            base_side,
            tuple(base_side.tokenizer.encode("hello", add_special_tokens=False)),
            echo=True,
        ).rules.echo_text
        == "hello"
    )


THINKING = (
    toy_tokenizers.CHATML
    + "{% if add_generation_prompt %}{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def thinker() -> TokenizerBundle:
    """A model that thinks on request, with markers that are tokens."""
    tokenizer = Tokenizer(toy_tokenizers.byte_level(), config={"eos_token": "<|im_end|>"})
    found = find_dialect(
        ChatTemplate({"default": THINKING}, special_tokens={}), tokenizer, config={}
    )
    return TokenizerBundle(
        tokenizer=tokenizer,
        template=found.template,
        generation_defaults={},
        dialect=found.dialect,
        thinking_switch=found.switch,
        dialect_report=found.report,
    )


@pytest.mark.parametrize(
    ("asked", "options", "opened"),
    [
        (Thinking(), {}, False),
        (Thinking(effort="high"), {}, True),
        (Thinking(effort="off"), {}, False),
        (Thinking(effort="high"), {"enable_thinking": False}, False),
        (Thinking(budget_tokens=0), {}, False),
    ],
)
def test_requested_thinking_becomes_the_templates_option_unless_already_set(
    thinker: TokenizerBundle, asked: Thinking, options: dict[str, Any], opened: bool
) -> None:
    prompt = ChatPrompt(messages=HELLO.messages, template_options=options)
    prepared = ready(thinker, prompt, thinking=asked)
    assert prepared.rules.in_reasoning is opened


@pytest.mark.parametrize(("effort", "opened"), [("on", True), (None, True), ("off", False)])
def test_a_thinking_budget_carries_the_tokens_that_end_a_thought(
    thinker: TokenizerBundle, effort: ThinkingEffort | None, opened: bool
) -> None:
    budget = (
        ready(thinker, HELLO, thinking=Thinking(effort=effort, budget_tokens=50))
        .sequences[0]
        .thinking_budget
    )
    assert budget is not None
    start, end = (thinker.tokenizer.backend.token_to_id(mark) for mark in ("<think>", "</think>"))
    assert (budget.tokens, budget.end_token_ids) == (50, (end,))
    assert budget.start_token_ids == (() if opened else (start,))


def test_a_thought_is_unlimited_without_a_budget_or_markers(
    thinker: TokenizerBundle, bundle: TokenizerBundle
) -> None:
    assert (
        ready(thinker, HELLO, thinking=Thinking(effort="on")).sequences[0].thinking_budget is None
    )
    assert (
        ready(bundle, HELLO, thinking=Thinking(budget_tokens=50)).sequences[0].thinking_budget
        is None
    )


# Answers in place of the tokenizer's tokens.

MARK = "|"


def by_characters(text: str, *, pair: str = "") -> EncodedText:
    """An encoding with a token for each `pair` and every other character; ids of single characters
    are their code points.
    """
    token_ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    at = 0
    while at < len(text):
        width = len(pair) if pair and text.startswith(pair, at) else 1
        token_ids.append(ord(text[at]) if width == 1 else 1_000_000)
        offsets.append((at, at + width))
        at += width

    def char_to_token(character: int) -> int | None:
        return next(
            (token for token, (start, end) in enumerate(offsets) if start <= character < end), None
        )

    found = SimpleNamespace(
        ids=token_ids,
        offsets=offsets,
        char_to_token=char_to_token,
        token_to_chars=offsets.__getitem__,
    )
    return EncodedText(found, characters=len(text))  # type: ignore[arg-type]


@cache
def bundled_tokenizer() -> Tokenizer:
    return load_tokenizer(demo_folder())


def singly(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_only_the_answers_tokens_are_replaced() -> None:
    whole = "|u|bb|a|abba|u|bb|"
    prompt = PromptText(text=whole, answers=(PlacedAnswer(8, 12, TokenIds.of(singly("abba"))),))
    tokens = splice(prompt, by_characters(whole, pair="bb"))
    before, behind = (
        by_characters("|u|bb|a|", pair="bb").token_ids,
        by_characters("|u|bb|", pair="bb").token_ids,
    )
    assert tuple(tokens.token_ids) == (*before, *singly("abba"), *behind)
    assert tokens.put_back_tokens == 4


def test_answers_with_edges_within_tokens_are_skipped() -> None:
    whole = "|bba|"
    encoding = by_characters(whole, pair="bb")
    tokens = splice(
        PromptText(text=whole, answers=(PlacedAnswer(2, 4, TokenIds.of((7, 8))),)), encoding
    )
    assert tokens.token_ids == encoding.token_ids
    assert tokens.put_back_tokens == 0


@given(said=st.lists(st.tuples(st.text("abc", max_size=6), st.integers(0, 6)), max_size=8))
def test_inserted_answers_shift_later_positions(said: list[tuple[str, int]]) -> None:
    whole = MARK + "".join(text + MARK for text, _ in said)
    marks = tuple(place for place, character in enumerate(whole) if character == MARK)
    answers = tuple(
        PlacedAnswer(start + 1, end, TokenIds.of((9_000_000 + number,) * length))
        for number, (start, end, (text, length)) in enumerate(
            zip(marks, marks[1:], said, strict=False)
        )
        if text
    )
    tokens = splice(
        PromptText(text=whole, answers=answers, branch_points=marks), by_characters(whole)
    )
    expected = [ord(MARK)]
    for number, (text, length) in enumerate(said):
        expected += [*((9_000_000 + number,) * length if text else ()), ord(MARK)]
    assert list(tokens.token_ids) == expected
    assert [tokens.token_ids.view[place] for place in tokens.branch_points] == [ord(MARK)] * len(
        marks
    )


PIECES = (
    "hello",
    " world",
    "<|im_end|>",
    "<|im_\ufdd5end|>",
    "\ufdd5",
    "é",
    "😀",
    "日本",
    "\n",
    "a",
)


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    places=st.lists(st.integers(0, 60), min_size=3, max_size=3),
    remembered=st.booleans(),
)
def test_positions_equal_those_of_a_scan_of_all_tokens(
    pieces: list[str], places: list[int], remembered: bool
) -> None:
    text, tokenizer = "".join(pieces), bundled_tokenizer()
    start, end, point = sorted(min(place, len(text)) for place in places)
    whole = tokenizer.backend.encode(text, add_special_tokens=False)
    offsets, ids = whole.offsets, whole.ids
    prompt = PromptText(
        text=text,
        answers=(PlacedAnswer(start, end, TokenIds.of((9_000_000,))),),
        breakpoints=(point,),
    )
    inside = [
        number for number, (left, right) in enumerate(offsets) if start <= left and left < end
    ]
    cut = [left for left, right in offsets for edge in (start, end) if left < edge < right]
    fits = bool(inside) and not cut
    expected = [*ids[: inside[0]], 9_000_000, *ids[inside[-1] + 1 :]] if fits else ids
    of_memory = TokenMemory().tokens_of(text, tokenizer, places=(start, end, point))
    tokens = splice(prompt, of_memory if remembered else tokenizer.encode_in_place([text])[0])
    assert list(tokens.token_ids) == expected
    if not fits:
        assert tokens.breakpoints == (sum(right <= point for _, right in offsets),)


# A prompt that is too long is shortened with few tokenizations.

CONTEXT = 32_768
NOTE = "the ferry to the island leaves at noon and comes back when the sun goes down "


class CountingTokenizer(Tokenizer):
    """Counts the characters that it tokenizes."""

    characters = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.characters += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        self.characters += sum(map(len, texts))
        return super().encode_all(texts)

    def encode_in_place(self, texts: Sequence[str]) -> list[EncodedText]:
        self.characters += sum(map(len, texts))
        return super().encode_in_place(texts)


@pytest.fixture
def counting(bundle: TokenizerBundle) -> TokenizerBundle:
    tokenizer = CountingTokenizer(toy_tokenizers.byte_level(), config={"eos_token": "<|im_end|>"})
    return replace(bundle, tokenizer=tokenizer, token_memory=TokenMemory())


def short(bundle: TokenizerBundle, prompt: Prompt) -> Prepared:
    request = GenerationRequest(
        request_id="r", model="m", prompt=prompt, max_tokens=64, truncation="middle"
    )
    return prepare(
        request, bundle, info=model_info(context_tokens=CONTEXT), limits=LimitsSettings()
    )


@pytest.mark.parametrize("truncation", ["disabled", "middle"])
@pytest.mark.parametrize("is_chat", [True, False])
def test_a_bad_schema_is_refused_before_the_prompt_is_tokenized(
    counting: TokenizerBundle, truncation: str, is_chat: bool
) -> None:
    assert isinstance(counting.tokenizer, CountingTokenizer)
    text = "a long note " * 1000
    prompt = ChatPrompt(messages=(user(text),)) if is_chat else text
    bad = OutputFormat(kind="json_schema", schema={"type": "no such type"})
    fields = {"info": model_info(context_tokens=CONTEXT), "truncation": truncation}
    before = counting.tokenizer.characters
    with pytest.raises(InvalidRequest, match="no such type"):
        ready(counting, prompt, output_format=bad, **fields)
    assert counting.tokenizer.characters == before
    ready(counting, prompt, **fields)
    assert counting.tokenizer.characters > before


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def conversation(turns: int, notes: int) -> list[dict[str, Any]]:
    told = [{"role": "system", "content": NOTE * 10}]
    for turn in range(turns):
        told += [user(f"{turn}: {NOTE * notes}"), {"role": "assistant", "content": NOTE * notes}]
    return [*told, user("what now?")]


@pytest.mark.parametrize(
    "messages",
    [
        conversation(500, 3),
        conversation(20, 80),
        [user(NOTE * 3000)],
        [user((NOTE * 3000).replace(" ", "_"))],  # cannot be cut into pieces
        [*conversation(2, 2), user(NOTE * 3000), {"role": "assistant", "content": "ok"}, user("?")],
    ],
    ids=["many", "fewer", "one", "one piece", "one of several"],
)
def test_the_next_turn_of_a_shortened_conversation_tokenizes_little(
    counting: TokenizerBundle, messages: list[dict[str, Any]]
) -> None:
    tokenizer = counting.tokenizer
    assert isinstance(tokenizer, CountingTokenizer)
    characters = sum(len(message["content"]) for message in messages)
    first = short(counting, ChatPrompt(messages=tuple(messages)))
    assert first.left_out is not None
    assert first.prompt_tokens <= CONTEXT - 64
    assert tokenizer.characters < 4.5 * characters
    tokenizer.characters = 0
    told = [*messages, {"role": "assistant", "content": "go"}, user("and then?")]
    later = short(counting, ChatPrompt(messages=tuple(told)))
    assert later.left_out is not None
    assert tokenizer.characters < characters
    # everything except the end of the prompt is the same, so it is cached
    assert first.left_out is not None
    assert later.left_out is not None
    assert isinstance(first.prompt, ChatPrompt)
    assert isinstance(later.prompt, ChatPrompt)
    kept = first.prompt.messages
    assert later.prompt.messages[: len(kept)] == kept


@pytest.mark.parametrize(
    "text", ["\ufdd5" * 300_000 + NOTE * 3000, NOTE * 3000 + "\ufdd5" * 300_000]
)
def test_characters_without_tokens_are_harmless(counting: TokenizerBundle, text: str) -> None:
    prepared = short(counting, ChatPrompt(messages=(user(text),)))
    assert prepared.left_out is not None
    assert prepared.prompt_tokens <= CONTEXT - 64

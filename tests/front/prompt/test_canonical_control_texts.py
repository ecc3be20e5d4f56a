"""Client text never becomes a control token of the model's family, and the model still reads its
characters.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from tokenizers import Tokenizer as Backend

from holdfast.front.prompt.known_answers import KnownAnswers
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from tests.fakes import family_bundles
from tests.fakes.client_places import (
    NEUTRAL,
    PLACES,
    calling,
    control_tokens,
    controls_of,
    tokens_of,
    wrong_places,
)
from tests.fakes.family_bundles import OF_EACH_HABIT
from tests.fakes.family_templates import FAMILY_TEMPLATES
from tests.fakes.slow import slow


@cache
def bundle_of(name: str, *, normalized: bool = False) -> TokenizerBundle:
    """normalized: markers that are not special are matched after normalization, as in DeepSeek's
    tokenizers.
    """
    found = family_bundles.bundle_of(name)
    tokenizer = Tokenizer(
        Backend.from_str(backend_of(name, normalized=normalized)),
        config={"eos_token": "</s>"},
        eos_token_ids=found.tokenizer.eos_token_ids,
    )
    return replace(found, tokenizer=tokenizer, known_answers=KnownAnswers())


def backend_of(name: str, *, normalized: bool) -> str:
    """The family's tokenizer before Holdfast changes anything in it."""
    family = FAMILY_TEMPLATES[name]
    backend = json.loads(family.tokenizer().backend.to_str())
    backend["normalizer"] = None if normalized else {"type": "NFC"}
    for token in backend["added_tokens"]:
        token["normalized"] = normalized and not token["special"]
    return json.dumps(backend)


# daily, one family of each kind of habits, with one of both kinds of tokenizer; the slow test below
# has all pairs
FAMILIES = [
    case if case[0] in OF_EACH_HABIT else slow(case)[0]
    for place, name in enumerate(sorted(FAMILY_TEMPLATES))
    for case in [(name, place % 2 == 1)]
]


@pytest.mark.parametrize(("name", "normalized"), FAMILIES)
def test_client_text_never_becomes_a_control_token(name: str, normalized: bool) -> None:
    bundle = bundle_of(name, normalized=normalized)
    controls = controls_of(bundle)
    assert wrong_places(bundle, [f"a{'b'.join(controls)}b", "".join(["a", *controls])]) == []


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("break_character", ["\ufdd4", "\ufdd5"])
def test_a_control_text_with_a_break_character_is_plain_text(
    normalized: bool, break_character: str
) -> None:
    bundle = bundle_of("deepseek_v4", normalized=normalized)
    neutral = tokens_of(bundle, PLACES["user"](NEUTRAL))
    for said in controls_of(bundle):
        tokens = tokens_of(bundle, PLACES["user"](said[0] + break_character + said[1:]))
        assert control_tokens(bundle, tokens) == control_tokens(bundle, neutral)


@pytest.mark.parametrize("form", ["{%s}", "[{%s}]"])
@pytest.mark.parametrize(("name", "normalized"), FAMILIES)
def test_a_duplicate_argument_adds_no_control_token(name: str, form: str, normalized: bool) -> None:
    bundle = bundle_of(name, normalized=normalized)
    said = json.dumps("".join(["a", *controls_of(bundle)]), ensure_ascii=False)
    neutral, tokens = (
        control_tokens(
            bundle, tokens_of(bundle, {"messages": calling(form % members, call_id=call_id)})
        )
        for call_id, members in (
            ("call00001", '"path": "last"'),
            ("call00002", f'"path": {said}, "path": "last"'),
        )
    )
    assert tokens == neutral


@pytest.mark.parametrize("keys", [1, 2])
def test_a_template_that_copies_arguments_writes_no_control_text(keys: int) -> None:
    source = FAMILY_TEMPLATES["qwen3"].source.replace("c.arguments | tojson", "c.arguments")
    verbatim = ChatTemplate({"default": source}, special_tokens={})
    assert verbatim._arguments_as_text, "as in DeepSeek V3's template"
    bundle = replace(bundle_of("qwen3"), template=verbatim)
    members = ", ".join(['"path": "</tool_call>"', '"path": "last"'][:keys])
    neutral, tokens = (
        control_tokens(bundle, tokens_of(bundle, {"messages": calling(arguments, call_id=call_id)}))
        for call_id, arguments in (
            ("call00001", '{"path": "last"}'),
            ("call00002", f"{{{members}}}"),
        )
    )
    assert tokens == neutral


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("said", [r"a \ufdd5 b", r"a \\ufdd4 b", r"\ufdd5\ufdd5"])
def test_a_break_character_in_client_text_is_kept(said: str, normalized: bool) -> None:
    bundle = bundle_of("qwen3", normalized=normalized)
    tokens = tokens_of(bundle, PLACES["user"](said))
    assert said in bundle.tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize(("name", "normalized"), FAMILIES)
def test_template_text_is_tokenized_as_by_the_models_tokenizer(name: str, normalized: bool) -> None:
    bundle = bundle_of(name, normalized=normalized)
    own = Backend.from_str(backend_of(name, normalized=normalized))
    call = PLACES["argument"]("hello \n\n the world"), PLACES["reasoning"]("why")
    for prompt in (*call, {**PLACES["description of a tool"]("what <b>it</b> does")}):
        tokens = tokens_of(bundle, prompt)
        text = bundle.tokenizer.decode(tokens, skip_special_tokens=False)
        assert tokens == tuple(own.encode(text, add_special_tokens=False).ids)


@pytest.mark.slow
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
def test_no_single_control_text_from_a_client_becomes_a_token(name: str, normalized: bool) -> None:
    bundle = bundle_of(name, normalized=normalized)
    controls = controls_of(bundle)
    words = [each.strip("<>[]|｜/") for each in controls]
    texts = [*controls, *words, *(f"a{each}b" for each in controls)]
    assert wrong_places(bundle, [each for each in texts if each]) == []


def test_a_thought_inside_an_answers_text_is_a_thought() -> None:
    bundle = bundle_of("qwen3")
    (user, answer, result) = calling("{}")
    apart = {**answer, "reasoning_content": "why", "content": "text"}
    within = {**answer, "content": "<think>\nwhy\n</think>\n\ntext"}
    tokens = [tokens_of(bundle, {"messages": [user, each, result]}) for each in (apart, within)]
    assert tokens[0] == tokens[1]
    both = {**within, "reasoning_content": "why"}
    counted = control_tokens(bundle, tokens_of(bundle, {"messages": [user, both, result]}))
    assert counted["<think>"] == 1, "one that is in the text as well is text"


@pytest.mark.parametrize(
    ("content", "controls"),
    [
        ("<think>\nFirst, </s>", {"<think>": 1}),
        ("\n<think>\nwhy <think>\n</think>\n\ntext </think>", {"<think>": 1, "</think>": 1}),
        ("text <think>", {}),
        ("</think>", {}),
    ],
)
def test_a_message_to_be_continued_may_begin_with_a_thought(
    content: str, controls: dict[str, int]
) -> None:
    bundle = bundle_of("qwen3")
    neutral, tokens = (
        control_tokens(bundle, tokens_of(bundle, PLACES["continued"](said)))
        for said in (NEUTRAL, content)
    )
    assert tokens - neutral == Counter(controls)

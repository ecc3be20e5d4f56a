"""No text of a client becomes a control token of the model's family, wherever it stands, and the
model still reads its characters.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from holdfast.errors import InvalidRequest
from holdfast.front.prompt.known_answers import KnownAnswers
from holdfast.front.prompt.tokenize import Tokenizer, without_breaks
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.wire.requests import ChatPrompt, GenerationRequest
from tests.fakes.agent_turns import prepared_for
from tests.fakes.family_bundles import bundle
from tests.fakes.family_templates import FAMILY_TEMPLATES

NEUTRAL = "aXb"
USER = {"role": "user", "content": "hello"}


@cache
def bundle_of(name: str, *, normalized: bool = False) -> TokenizerBundle:
    """normalized: markers that are not special are matched after normalization, as in DeepSeek's
    tokenizers.
    """
    found = bundle(FAMILY_TEMPLATES[name])
    tokenizer = Tokenizer(
        Backend.from_str(backend_of(name, normalized=normalized)),
        config={"eos_token": "</s>"},
        eos_token_ids=found.tokenizer.eos_token_ids,
    )
    return replace(found, tokenizer=tokenizer, known_answers=KnownAnswers())


def backend_of(name: str, *, normalized: bool) -> str:
    """The family's tokenizer as it is before anything is changed for its use here."""
    family = FAMILY_TEMPLATES[name]
    backend = json.loads(family.tokenizer().backend.to_str())
    backend["normalizer"] = None if normalized else {"type": "NFC"}
    for token in backend["added_tokens"]:
        token["normalized"] = normalized and not token["special"]
    return json.dumps(backend)


def tool(**changes: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"path": {"type": "string", "description": "d"}}}
    function = {"name": "f", "description": "text", "parameters": schema, **changes}
    return {"type": "function", "function": function}


def calling(arguments: Any, *, name: str = "f", call_id: str = "call00001") -> list[dict[str, Any]]:
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "result"},
    ]


def escaped(said: str) -> str:
    return "".join(f"\\u{ord(character):04x}" for character in said)


def property_called(said: str) -> dict[str, Any]:
    return {"type": "object", "properties": {said: {"type": "string", "description": "d"}}}


# every place of a conversation that a client writes, as the field and the prompt with a text there
PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "system": lambda said: {"messages": [{"role": "system", "content": said}, USER]},
    "developer": lambda said: {"messages": [{"role": "developer", "content": said}, USER]},
    "user": lambda said: {"messages": [{"role": "user", "content": said}]},
    "user, in parts": lambda said: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": said}] * 2}]
    },
    "user's name": lambda said: {"messages": [{**USER, "name": said}]},
    "assistant": lambda said: {"messages": [USER, {"role": "assistant", "content": said}, USER]},
    "assistant, in parts": lambda said: {
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "text", "text": said}]},
            USER,
        ]
    },
    "reasoning": lambda said: {
        "messages": [
            USER,
            {**calling({})[1], "content": "", "reasoning_content": said},
            calling({})[2],
        ]
    },
    "reasoning of an answer": lambda said: {
        "messages": [USER, {"role": "assistant", "content": "t", "reasoning": said}, USER]
    },
    "text beside a call": lambda said: {
        "messages": [USER, {**calling({})[1], "content": said}, calling({})[2]]
    },
    "name of a call": lambda said: {"messages": calling("{}", name=said)},
    "id of a call": lambda said: {"messages": calling("{}", call_id=said)},
    "key of an argument": lambda said: {"messages": calling(json.dumps({said: 1}))},
    "argument": lambda said: {"messages": calling(json.dumps({"path": said}, ensure_ascii=False))},
    "argument, escaped": lambda said: {"messages": calling(f'{{"path": "{escaped(said)}"}}')},
    "argument, as an object": lambda said: {"messages": calling({"path": said})},
    "argument, nested": lambda said: {"messages": calling({"path": [{"a": [said, {said: 1}]}]})},
    "arguments that are no JSON": lambda said: {"messages": calling(said)},
    "result": lambda said: {
        "messages": [*calling("{}")[:2], {**calling("{}")[2], "content": said}]
    },
    "name of a result": lambda said: {
        "messages": [*calling("{}")[:2], {**calling("{}")[2], "name": said}]
    },
    "description of a tool": lambda said: {"messages": [USER], "tools": [tool(description=said)]},
    "name of a tool": lambda said: {"messages": [USER], "tools": [tool(name=said)]},
    "parameter of a tool": lambda said: {
        "messages": [USER],
        "tools": [tool(parameters=property_called(said))],
    },
    "schema of a tool": lambda said: {
        "messages": [USER],
        "tools": [tool(parameters={**property_called("path"), "title": said, "enum": [said]})],
    },
    "continued": lambda said: {
        "messages": [USER, {"role": "assistant", "content": said}],
        "continue_last": True,
    },
    "option of the template": lambda said: {
        "messages": [USER],
        "template_options": {"reasoning_effort": said, "thinking_budget": said, "bos_token": said},
    },
}


def tokens_of(bundle: TokenizerBundle, prompt: dict[str, Any]) -> tuple[int, ...]:
    prompt = copy.deepcopy(prompt)
    request = GenerationRequest(
        request_id="r",
        model="m",
        prompt=ChatPrompt(
            messages=tuple(prompt.pop("messages")), tools=tuple(prompt.pop("tools", ())), **prompt
        ),
    )
    return tuple(prepared_for(request, bundle).sequences[0].prompt_token_ids)


def control_tokens(bundle: TokenizerBundle, token_ids: tuple[int, ...]) -> Counter[str]:
    added = bundle.tokenizer.backend.get_added_tokens_decoder()
    return Counter(added[each].content for each in token_ids if each in added)


def wrong_places(bundle: TokenizerBundle, texts: Sequence[str]) -> list[str]:
    """The places and texts that add a control token, or that the model does not read as sent."""
    wrong: list[str] = []
    thought = bundle.dialect.reasoning
    for place, prompt in PLACES.items():
        try:
            neutral = tokens_of(bundle, prompt(NEUTRAL))
        except InvalidRequest:
            continue  # the template refuses any such text
        shown = without_breaks(bundle.tokenizer.decode(neutral, skip_special_tokens=False))
        for said in texts:
            if place == "continued" and thought and said.startswith(thought.start.strip()):
                continue  # which begins the answer with a thought
            tokens = tokens_of(bundle, prompt(said))
            read = bundle.tokenizer.decode(tokens, skip_special_tokens=False)
            is_verbatim = not set(said) & {'"', "\\"} and "id" not in place.split()
            if control_tokens(bundle, tokens) != control_tokens(bundle, neutral):
                wrong.append(f"{place}: {said}")
            elif is_verbatim and read != shown.replace(NEUTRAL, said):
                wrong.append(f"{place}: {said} is read as {read}")
    return wrong


def controls_of(bundle: TokenizerBundle) -> list[str]:
    added = bundle.tokenizer.backend.get_added_tokens_decoder().values()
    return [token.content for token in added]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
def test_no_text_of_a_client_becomes_a_control_token_of_the_family(
    name: str, normalized: bool
) -> None:
    bundle = bundle_of(name, normalized=normalized)
    controls = controls_of(bundle)
    assert wrong_places(bundle, [f"a{'b'.join(controls)}b", "".join(["a", *controls])]) == []


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("break_character", ["\ufdd4", "\ufdd5"])
def test_a_control_text_with_a_character_that_is_dropped_later_is_no_control_token(
    normalized: bool, break_character: str
) -> None:
    bundle = bundle_of("deepseek_v4", normalized=normalized)
    neutral = tokens_of(bundle, PLACES["user"](NEUTRAL))
    for said in controls_of(bundle):
        tokens = tokens_of(bundle, PLACES["user"](said[0] + break_character + said[1:]))
        assert control_tokens(bundle, tokens) == control_tokens(bundle, neutral)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
def test_what_the_template_writes_is_tokenized_as_by_the_model_s_own_tokenizer(
    name: str, normalized: bool
) -> None:
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
def test_no_single_control_text_of_a_client_becomes_a_control_token(
    name: str, normalized: bool
) -> None:
    bundle = bundle_of(name, normalized=normalized)
    controls = controls_of(bundle)
    words = [each.strip("<>[]|｜/") for each in controls]
    texts = [*controls, *words, *(f"a{each}b" for each in controls)]
    assert wrong_places(bundle, [each for each in texts if each]) == []


def test_a_thought_that_a_client_sends_within_the_text_of_an_answer_is_a_thought() -> None:
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

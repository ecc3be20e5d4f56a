"""Every place in a conversation where a client can write, and how a model reads text there."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import InvalidRequest
from holdfast.front.prompt.tokenize import without_breaks
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.request import ChatPrompt, GenerationRequest
from tests.fakes.agent_turns import prepared_for

NEUTRAL = "aXb"
USER = {"role": "user", "content": "hello"}


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


# every place in a conversation where a client writes → makes a prompt with a text there
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
    """The places and texts that add a control token, or that the model reads differently from the
    sent text.
    """
    wrong: list[str] = []
    thought = bundle.dialect.reasoning
    for place, prompt in PLACES.items():
        try:
            neutral = tokens_of(bundle, prompt(NEUTRAL))
        except InvalidRequest:
            continue  # the template refuses any text here
        shown = without_breaks(bundle.tokenizer.decode(neutral, skip_special_tokens=False))
        for said in texts:
            if place == "continued" and thought and said.startswith(thought.start.strip()):
                continue  # it begins the answer with a thought
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

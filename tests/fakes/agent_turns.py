"""Turns of an agent that calls tools: its requests, the deltas for a client, and how the client
sends the answer back.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from holdfast.config import LimitsSettings
from holdfast.front.output import OutputDelta, ToolCall, text_of, tool_calls_of
from holdfast.front.prompt.next_turn import observer
from holdfast.front.prompt.prepare import Prepared, prepare
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.request import ChatPrompt, GenerationRequest
from holdfast.front.toolcalls.call_format import Call
from holdfast.wire.events import Finished, FinishReason, TokensGenerated
from tests.fakes.scripted_client import model_info

TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does something.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "Where"}},
                "required": [],
            },
        },
    }
    for name in ("f", "read_file")
)
QUESTION = {"role": "user", "content": "hello the world"}


def in_any_tokens(text: str, bundle: TokenizerBundle, choose: random.Random) -> tuple[int, ...]:
    """The text as tokens of arbitrary pieces between markers, each tokenized alone."""
    tokenizer, markers = bundle.tokenizer, bundle.dialect.markers
    ids: list[int] = []
    start = 0
    for end in (*sorted(choose.sample(range(len(text) + 1), min(len(text), 8))), len(text)):
        ids += tokenizer.encode(text[start:end], add_special_tokens=False)
        start = end
    canonical = tokenizer.encode(text, add_special_tokens=False)
    is_same = tokenizer.decode(ids, skip_special_tokens=False) == text
    special = [[each for each in some if each in markers.characters] for some in (ids, canonical)]
    return tuple(ids) if is_same and special[0] == special[1] else tuple(canonical)


def ask(
    bundle: TokenizerBundle, messages: list[dict[str, Any]], **fields: Any
) -> tuple[GenerationRequest, Prepared]:
    request = GenerationRequest(
        request_id="r",
        model="m",
        prompt=ChatPrompt(messages=tuple(messages), tools=TOOLS, **fields.pop("prompt", {})),
        **fields,
    )
    return request, prepared_for(request, bundle)


def prepared_for(request: GenerationRequest, bundle: TokenizerBundle) -> Prepared:
    info = model_info(context_tokens=100_000, vocab_size=bundle.tokenizer.vocab_size)
    return prepare(request, bundle, info=info, limits=LimitsSettings())


def answer(
    bundle: TokenizerBundle, request: GenerationRequest, prepared: Prepared, ids: tuple[int, ...]
) -> list[OutputDelta]:
    """The deltas for a client of an answer with these tokens."""
    choice, observe = prepared.choice(), observer(request, bundle, prepared)
    eos = bundle.tokenizer.eos_token_ids[0]
    generated = TokensGenerated(request_id="r/0", token_ids=(*ids, eos))
    finished = Finished(
        request_id="r/0", reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=1
    )
    seen = [*choice.feed(generated), *choice.feed(finished)]
    for event in seen:
        observe(event)
    return [event for event in seen if not hasattr(event, "reason")]


def sent_back(
    deltas: list[OutputDelta], choose: random.Random, *, keeps_thoughts: bool = True
) -> list[dict[str, Any]]:
    """The answer and results as a client sends them: arguments rewritten, content null or empty, in
    parts or not.
    """
    text, made = text_of(deltas), tool_calls_of(deltas)
    content: Any = choose.choice([text or None, text, [{"type": "text", "text": text}]])
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if (thought := text_of(deltas, "reasoning")) and keeps_thoughts:
        message[choose.choice(["reasoning", "reasoning_content"])] = thought
    if made:
        functions = [{"name": call.name, "arguments": rewritten(call, choose)} for call in made]
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(made, functions, strict=True)
        ]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "world"} for call in made]
    return [message, *(results or [QUESTION])]


def rewritten(call: ToolCall, choose: random.Random) -> str:
    arguments = json.loads(call.arguments)
    keys = list(arguments)
    choose.shuffle(keys)
    return json.dumps({key: arguments[key] for key in keys}, indent=choose.choice([None, 2]))


def spoken(
    bundle: TokenizerBundle, messages: list[dict[str, Any]], number: int, *, thinks: bool = True
) -> str:
    """Possible output of a bundle's model: a thought if it has markers for one, and a call in its
    own syntax.
    """
    dialect = bundle.dialect
    assert dialect.calls is not None
    made = Call(
        "read_file", {"path": f"é{number}", "limit": number, "deep": {"b": [1, 2], "a": "c"}}
    )
    # already written by the prompt
    text = dialect.calls.write([made]).removeprefix("<|start|>assistant")
    if dialect.reasoning is None:
        return text
    opened = ask(bundle, messages)[1].rules.in_reasoning
    thought = f"why {number}" if thinks else ""
    start, end = "" if opened else dialect.reasoning.start, dialect.reasoning.end
    return f"{start if thinks else ''}{thought}{end if thinks or opened else ''}{text}"


def turn(
    bundle: TokenizerBundle,
    messages: list[dict[str, Any]],
    said: str,
    choose: random.Random,
    *,
    keeps_thoughts: bool = True,
) -> tuple[tuple[int, ...], list[dict[str, Any]]]:
    """All tokens of a turn, its answer's included, and the messages that it adds to the
    conversation.
    """
    request, prepared = ask(bundle, messages)
    ids = in_any_tokens(said, bundle, choose)
    deltas = answer(bundle, request, prepared, ids) if said else []
    return (*prepared.sequences[0].prompt_token_ids, *ids), sent_back(
        deltas, choose, keeps_thoughts=keeps_thoughts
    )


def turns(
    bundle: TokenizerBundle, *, keeps_thoughts: bool
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Three turns of a conversation: all tokens of each, and the prompt of the next."""
    choose = random.Random(3)
    messages: list[dict[str, Any]] = [QUESTION]
    for number in range(1, 4):
        before, said = turn(
            bundle,
            messages,
            spoken(bundle, messages, number),
            choose,
            keeps_thoughts=keeps_thoughts,
        )
        messages += said
        after, _ = turn(bundle, messages, "", choose)
        yield before, after

"""A conversation as each protocol sends it, and as the model must read it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.simulation.actions import Turn
from tests.simulation.device import BUNDLED
from tests.simulation.formats import format_fields
from tests.simulation.pictures import MARK, PICTURES, mark, mark_of_url
from tests.simulation.tools import (
    DEFINITIONS,
    as_template_reads,
    chat_message,
    has_tools,
    items_of,
    messages_of_anthropic,
    tool_fields,
    with_plain_calls,
)

# with the calls of an assistant's message; and of a tool's result, the id of its call
Message: TypeAlias = dict[str, Any]
_SPLIT = re.compile(f"({MARK.pattern.replace('(', '(?:')})")
_ANSWERS = "<|im_start|>assistant\n"
_NO_THOUGHT = "<think>\n\n</think>\n\n"
_UNREADABLE = "[image left out: it cannot be read]"
_TEXT_ONLY = "[image/png left out: this model takes text only]"
OLLAMA = ("ollama", "generate")  # the protocols of Ollama's API
PREFILL = "Well"  # the beginning of an answer that a request prefills
# system prompts that agents share, by name
SYSTEMS: Mapping[str, str] = {
    "short": "You are brief.",
    "wide": "Réponds en français, 日本語でも。 🎉",
    "long": "You check every step." + " fast" * 600,
}


@dataclass(frozen=True, kw_only=True)
class Continues:
    """What a request continues. response, conversation: their ids. context: of an answer of
    /api/generate. items: of a compacted conversation.
    """

    response: str = ""
    conversation: str = ""
    context: Sequence[int] = ()
    items: Sequence[Mapping[str, Any]] = ()


def body(
    turn: Turn, messages: Sequence[Message], *, continues: Continues | None = None
) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request. messages: those that the server does not have."""
    continues = continues or Continues()
    if turn.protocol in OLLAMA:
        return _ollama_body(turn, messages, continues.context)
    common: dict[str, Any] = {
        "model": turn.model_id,
        "stream": turn.streams,
        "temperature": 0.7 if turn.seed is not None else 0.0,
    }
    common |= tool_fields(turn) or format_fields(turn)
    if turn.kv_bits:
        common["kv_bits"] = turn.kv_bits
    if turn.tenant:
        common["cache_salt"] = turn.tenant
    if turn.seed is not None and turn.protocol != "messages":
        common["seed"] = turn.seed
    if turn.streams and turn.protocol in ("chat", "completions"):
        common["stream_options"] = {"include_usage": True}
    match turn.protocol:
        case "chat":
            return "/v1/chat/completions", {
                **common,
                **_chat_fields(turn),
                "messages": sent(turn, _with_system(turn, messages)),
                "max_completion_tokens": turn.max_tokens,
                "n": turn.choices,
            }
        case "completions":
            return "/v1/completions", {
                **common,
                **({"stop": list(stops_of(turn))} if stops_of(turn) else {}),
                "prompt": prompt(turn, messages),
                "max_tokens": turn.max_tokens,
                "n": turn.choices,
            }
        case "messages":
            return "/v1/messages", {
                **common,
                **({"stop_sequences": list(stops_of(turn))} if stops_of(turn) else {}),
                **({"system": SYSTEMS[turn.system]} if turn.system else {}),
                "messages": sent(turn, messages),
                "max_tokens": turn.max_tokens,
            }
        case "responses":
            return "/v1/responses", {
                **common,
                **({"instructions": SYSTEMS[turn.system]} if turn.system else {}),
                "input": [*continues.items, *sent(turn, messages)],
                **({"previous_response_id": continues.response} if continues.response else {}),
                **({"conversation": continues.conversation} if continues.conversation else {}),
                **({"background": True} if runs_in_background(turn) else {}),
                "max_output_tokens": turn.max_tokens,
                "store": turn.stores,
            }
    raise AssertionError(turn.protocol)


def _ollama_body(
    turn: Turn, messages: Sequence[Message], context: Sequence[int]
) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {
        "num_predict": turn.max_tokens,
        "temperature": 0.7 if turn.seed is not None else 0.0,
        "seed": turn.seed,
        "stop": list(turn.stop) or None,
    }
    common = {
        "model": turn.model_id,
        "stream": turn.streams,
        "kv_bits": turn.kv_bits or None,
        "cache_salt": turn.tenant or None,
        "logprobs": turn.logprobs,
        "options": options,
    }
    if turn.protocol == "ollama":
        return "/api/chat", {**common, "messages": sent(turn, _with_system(turn, messages))}
    return "/api/generate", {
        **common,
        "system": SYSTEMS[turn.system] if turn.system else None,
        "prompt": messages[-1]["content"],
        "context": list(context) or None,
    }


def _chat_fields(turn: Turn) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if turn.prefills:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if stops_of(turn):
        fields["stop"] = list(stops_of(turn))
    if turn.logprobs:
        fields["logprobs"] = True
    return fields


def stops_of(turn: Turn) -> tuple[str, ...]:
    """The stop sequences of the request."""
    return () if turn.protocol == "responses" else turn.stop


def choices_of(turn: Turn) -> int:
    """How many answers the request asks for."""
    return turn.choices if turn.protocol in ("chat", "completions") else 1


def is_stored(turn: Turn) -> bool:
    """Whether the answer becomes a stored response."""
    return turn.stores and turn.protocol == "responses"


def runs_in_background(turn: Turn) -> bool:
    """Whether the answer is generated without its client."""
    return turn.background and is_stored(turn)


def begins_answer(turn: Turn) -> bool:
    """Whether the last message of the request begins the answer."""
    return turn.prefills and turn.protocol in ("chat", "messages", "ollama")


def _with_system(turn: Turn, messages: Sequence[Message]) -> list[Message]:
    system = [{"role": "system", "content": SYSTEMS[turn.system]}] if turn.system else []
    return [*system, *messages]


def sent(turn: Turn, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages in JSON."""
    messages_sent = [{**each, "content": _parts(turn, each)} for each in [*messages, *_begun(turn)]]
    if turn.protocol == "messages":
        return messages_of_anthropic(messages_sent)
    if turn.protocol == "responses":
        return [item for each in messages_sent for item in items_of(each)]
    return [chat_message(each) for each in messages_sent]


def _begun(turn: Turn) -> list[Message]:
    return [{"role": "assistant", "content": PREFILL}] if begins_answer(turn) else []


def has_parts(turn: Turn) -> bool:
    """Whether messages are sent in parts."""
    return turn.parts and turn.protocol not in ("completions", *OLLAMA)


def _pieces(turn: Turn, message: Message) -> list[str]:
    """The texts and marks that a user's message consists of: two texts, or its images and the texts
    between them.
    """
    text = message["content"]
    if has_parts(turn) and not MARK.search(text):
        half = len(text) // 2
        return [text[:half], text[half:]]
    return [piece for piece in _SPLIT.split(text) if piece]


def _parts(turn: Turn, message: Message) -> str | list[dict[str, Any]]:
    """The content of a message in JSON."""
    is_answer = message["role"] == "assistant"
    if is_answer and turn.protocol == "messages" and has_parts(turn) and not message["content"]:
        return []  # as the Messages API sends an empty answer
    pieces = _pieces(turn, message)
    if message["role"] != "user" or not (has_parts(turn) or has_images(message)):
        return message["content"]
    kind = "input_text" if turn.protocol == "responses" else "text"
    return [
        _image_part(turn, found[1])
        if (found := MARK.fullmatch(piece))
        else {"type": kind, "text": piece}
        for piece in pieces
    ]


def _image_part(turn: Turn, name: str) -> dict[str, Any]:
    data = base64.b64encode(PICTURES[name].data).decode()
    url = f"data:image/png;base64,{data}"
    match turn.protocol:
        case "messages":
            source = {"type": "base64", "media_type": "image/png", "data": data}
            return {"type": "image", "source": source}
        case "responses":
            return {"type": "input_image", "image_url": url}
        case _:
            return {"type": "image_url", "image_url": {"url": url}}


def is_plain(messages: Sequence[Message]) -> bool:
    """Whether no message has images, calls or the result of a call."""
    return not any(
        each["role"] == "tool" or each.get("calls") or has_images(each) for each in messages
    )


def simplified(turn: Turn, messages: Sequence[Message]) -> Turn:
    """The turn without features that are not simulated together. messages: before it."""
    if turn.protocol in OLLAMA:
        return replace(turn, tools=False, format="", images=())
    if turn.tools or turn.images or not is_plain(messages):
        return replace(turn, converses=False, compacts=False)
    return turn


def has_images(message: Message) -> bool:
    """Whether a message has images."""
    return MARK.search(message["content"]) is not None


# -- the model's side


def as_read(turn: Turn, messages: Sequence[Message], *, sees_images: bool) -> list[Message]:
    """The messages as the model reads them, with marks in place of the images that it sees."""
    if turn.protocol == "completions":
        return [{**each, "content": MARK.sub("", each["content"])} for each in messages]

    def read(message: Message) -> Message:
        if message["role"] != "user":
            return message
        pieces = [_seen(piece, sees_images=sees_images) for piece in _pieces(turn, message)]
        return {**message, "content": _joined(pieces)}

    return [read(each) for each in messages]


def _seen(piece: str, *, sees_images: bool) -> str:
    """A piece of a message, with a note in place of an image that cannot be seen."""
    found = MARK.fullmatch(piece)
    if found is None:
        return piece
    if not sees_images:
        return _TEXT_ONLY
    return _UNREADABLE if PICTURES[found[1]].is_damaged else piece


def without_images(messages: Sequence[Message], names: Set[str]) -> list[Message]:
    """Messages as the model reads them if it cannot see these images."""

    def read(message: Message) -> Message:
        pieces = [piece for piece in _SPLIT.split(message["content"]) if piece]
        notes = {mark(name): _UNREADABLE for name in names}
        return {**message, "content": _joined([notes.get(piece, piece) for piece in pieces])}

    return [read(each) for each in messages]


def read_parts(parts: Sequence[Mapping[str, Any]], *, sees_images: bool) -> str:
    """The parts of an item of the Responses API as the model reads them."""
    pieces = [
        mark_of_url(part["image_url"]) if part["type"] == "input_image" else part["text"]
        for part in parts
    ]
    return _joined([_seen(piece, sees_images=sees_images) for piece in pieces])


def is_refused(turn: Turn, messages: Sequence[Message], *, sees_images: bool) -> bool:
    """Whether a request must be refused because an image of its new message cannot be used."""
    if turn.protocol == "completions" or begins_answer(turn) or messages[-1]["role"] != "user":
        return False
    names = MARK.findall(messages[-1]["content"])
    return any(PICTURES[name].is_damaged or not sees_images for name in names)


def prompt(turn: Turn, messages: Sequence[Message]) -> str:
    """The text that the model must read. messages: as it reads them."""
    read = _with_system(turn, messages)
    if turn.protocol == "completions":
        return "\n".join(MARK.sub("", message["content"]) for message in read)
    # Anthropic's clients must ask for thinking
    options: dict[str, Any] = {"enable_thinking": False} if turn.protocol == "messages" else {}
    if has_tools(turn):
        options["tools"] = DEFINITIONS
    read = [as_template_reads(each) for each in read]
    rendered = _template().render(messages=read, add_generation_prompt=True, **options)
    return rendered + "".join(each["content"] for each in _begun(turn))


def comparable(text: str) -> str:
    """A prompt without the empty thoughts and the white space of calls in earlier answers. The server
    restores the text that the model has read and written, which may or may not have them.
    """
    *before, last = text.split(_ANSWERS)
    parts = [each.removeprefix(_NO_THOUGHT) for each in before]
    return _ANSWERS.join([with_plain_calls(each) for each in [*parts, last]])


def _joined(pieces: Sequence[str]) -> str:
    """The pieces of a message as one text: line breaks separate texts, but not texts and images."""
    joined, is_after_text = "", False
    for piece in pieces:
        is_text = not MARK.fullmatch(piece)
        joined += f"\n{piece}" if is_after_text and is_text else piece
        is_after_text = is_text
    return joined


@cache
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((BUNDLED / "chat_template.jinja").read_text("utf-8"))


_template()  # before worlds begin

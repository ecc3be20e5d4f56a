"""A conversation as each protocol sends it, and as the model must read it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.simulation.actions import Turn
from tests.simulation.device import BUNDLED

Message: TypeAlias = dict[str, str]
_ANSWERS = "<|im_start|>assistant\n"
_NO_THOUGHT = "<think>\n\n</think>\n\n"
PREFILL = "Well"  # the beginning of an answer that a request prefills
# system prompts that agents share, by name
SYSTEMS: Mapping[str, str] = {
    "short": "You are brief.",
    "wide": "Réponds en français, 日本語でも。 🎉",
    "long": "You check every step." + " fast" * 600,
}


def body(
    turn: Turn, messages: Sequence[Message], *, previous: str = ""
) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request that continues a conversation. previous: the id of the
    response that it continues.
    """
    common: dict[str, Any] = {
        "model": turn.model_id,
        "stream": turn.streams,
        "temperature": 0.7 if turn.seed is not None else 0.0,
    }
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
                "messages": _sent(turn, _with_system(turn, messages)),
                "max_completion_tokens": turn.max_tokens,
                "n": turn.choices,
            }
        case "completions":
            return "/v1/completions", {
                **common,
                **({"stop": list(turn.stop)} if turn.stop else {}),
                "prompt": prompt(turn, messages),
                "max_tokens": turn.max_tokens,
                "n": turn.choices,
            }
        case "messages":
            return "/v1/messages", {
                **common,
                **({"stop_sequences": list(turn.stop)} if turn.stop else {}),
                **({"system": SYSTEMS[turn.system]} if turn.system else {}),
                "messages": _sent(turn, messages),
                "max_tokens": turn.max_tokens,
            }
        case "responses":
            return "/v1/responses", {
                **common,
                **({"instructions": SYSTEMS[turn.system]} if turn.system else {}),
                "input": _sent(turn, messages),
                **({"previous_response_id": previous} if previous else {}),
                **({"background": True} if runs_in_background(turn) else {}),
                "max_output_tokens": turn.max_tokens,
                "store": turn.stores,
            }


def _chat_fields(turn: Turn) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if turn.prefills:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if turn.stop:
        fields["stop"] = list(turn.stop)
    if turn.logprobs:
        fields["logprobs"] = True
    return fields


def is_stored(turn: Turn) -> bool:
    """Whether the answer becomes a stored response."""
    return turn.stores and turn.protocol == "responses"


def runs_in_background(turn: Turn) -> bool:
    """Whether the answer is generated without its client."""
    return turn.background and is_stored(turn)


def begins_answer(turn: Turn) -> bool:
    """Whether the last message of the request begins the answer."""
    return turn.prefills and turn.protocol in ("chat", "messages")


def _with_system(turn: Turn, messages: Sequence[Message]) -> list[Message]:
    system = [{"role": "system", "content": SYSTEMS[turn.system]}] if turn.system else []
    return [*system, *messages]


def _sent(turn: Turn, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages in JSON."""
    return [
        {"role": each["role"], "content": _parts(turn, each) if turn.parts else each["content"]}
        for each in [*messages, *_begun(turn)]
    ]


def _begun(turn: Turn) -> list[Message]:
    return [{"role": "assistant", "content": PREFILL}] if begins_answer(turn) else []


def _parts(turn: Turn, message: Message) -> str | list[dict[str, Any]]:
    """The content of a user's message, in two parts."""
    text = message["content"]
    if message["role"] != "user":
        return text
    kind = "input_text" if turn.protocol == "responses" else "text"
    half = len(text) // 2
    return [{"type": kind, "text": part} for part in (text[:half], text[half:])]


# -- the model's side


def as_read(turn: Turn, messages: Sequence[Message]) -> list[Message]:
    """The messages as the model reads them."""
    if not turn.parts or turn.protocol == "completions":
        return list(messages)
    return [{**each, "content": _joined(_parts(turn, each))} for each in messages]


def prompt(turn: Turn, messages: Sequence[Message]) -> str:
    """The text that the model must read. messages: as it reads them."""
    read = _with_system(turn, messages)
    if turn.protocol == "completions":
        return "\n".join(message["content"] for message in read)
    # Anthropic's clients must ask for thinking
    options = {"enable_thinking": False} if turn.protocol == "messages" else {}
    rendered = _template().render(messages=read, add_generation_prompt=True, **options)
    return rendered + "".join(each["content"] for each in _begun(turn))


def comparable(text: str) -> str:
    """A prompt without the empty thoughts of earlier answers. The server restores the text that the
    model has read and written, which may or may not have them.
    """
    *before, last = text.split(_ANSWERS)
    return _ANSWERS.join([each.removeprefix(_NO_THOUGHT) for each in before] + [last])


def _joined(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


@cache
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((BUNDLED / "chat_template.jinja").read_text("utf-8"))


_template()  # before worlds begin

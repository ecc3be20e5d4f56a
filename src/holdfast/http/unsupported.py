"""Fields that clients send and whose meaning is known, but which this version does not act on: they are refused, not ignored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.http.errors import RequestRefused

_log = logging.getLogger(__name__)
_NOT_YET = "this version does not support it yet"
_MOST_REMEMBERED = 1000
_already_logged: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """A known field, the values with which it asks for nothing, and what to tell who asks for something."""

    neutral: tuple[Any, ...] = ()  # null is neutral for every field
    reason: str = _NOT_YET


_OFF = Unsupported(neutral=(False,))
_EMPTY = Unsupported(neutral=([], {}, ""))
_TOOLS = {
    "tools": Unsupported(neutral=([],)),
    "tool_choice": Unsupported(neutral=("none",)),
    "functions": Unsupported(neutral=([],)),
    "function_call": Unsupported(neutral=("none",)),
}
_FORMATS = {
    "response_format": Unsupported(neutral=({"type": "text"},)),
    "structured_outputs": _EMPTY,
    "guided_json": _EMPTY,
    "guided_regex": _EMPTY,
    "guided_choice": _EMPTY,
    "guided_grammar": _EMPTY,
    "grammar": _EMPTY,
    "json_schema": _EMPTY,
}
_MEDIA = {
    "audio": Unsupported(),
    "modalities": Unsupported(neutral=(["text"],)),
    "web_search_options": Unsupported(),
    "prediction": Unsupported(),
    "mm_processor_kwargs": _EMPTY,
    "media_io_kwargs": _EMPTY,
}
_DECODING = {
    "use_beam_search": _OFF,
    "length_penalty": Unsupported(neutral=(1, 1.0)),
    "early_stopping": _OFF,
    "min_tokens": Unsupported(neutral=(0,)),
    "stop_token_ids": _EMPTY,
    "bad_words": _EMPTY,
    "allowed_token_ids": Unsupported(),
    "include_stop_str_in_output": _OFF,
    "skip_special_tokens": Unsupported(neutral=(True,)),
    "logits_processors": _EMPTY,
    "logit_processors": _EMPTY,
    "truncate_prompt_tokens": Unsupported(),
    "prompt_logprobs": Unsupported(reason="use `echo` with `logprobs` on /v1/completions"),
    "xtc_probability": Unsupported(neutral=(0, 0.0)),
    "dry_multiplier": Unsupported(neutral=(0, 0.0)),
    "mirostat": Unsupported(neutral=(0,)),
    "typical_p": Unsupported(neutral=(1, 1.0)),
    "top_a": Unsupported(neutral=(0, 0.0)),
    "tfs_z": Unsupported(neutral=(1, 1.0)),
    "repetition_context_size": Unsupported(reason="`repetition_penalty` here looks at the whole prompt and answer"),
    "repeat_penalty": Unsupported(reason="the field is called `repetition_penalty` here"),
    "repeat_last_n": Unsupported(reason="`repetition_penalty` here looks at the whole prompt and answer"),
    "n_predict": Unsupported(reason="the field is called `max_tokens` here"),
    "num_predict": Unsupported(reason="the field is called `max_tokens` here"),
    "num_ctx": Unsupported(reason="the context is set when the server is started"),
}
_PROMPTING = {
    "chat_template": Unsupported(reason="the model's own template is used"),
    "documents": _EMPTY,
    "role_mapping": _EMPTY,
    "prompt_embeds": Unsupported(),
    "adapters": _EMPTY,
    "draft_model": _EMPTY,
    "num_draft_tokens": Unsupported(),
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
}
KNOWN: Mapping[str, Unsupported] = {**_TOOLS, **_FORMATS, **_MEDIA, **_DECODING, **_PROMPTING}


def refuse_unsupported(extras: Mapping[str, Any] | None) -> None:
    """Raise for the first field of `extras` that asks for something known and unsupported; log the unknown ones, each once."""
    for name, value in (extras or {}).items():
        known = KNOWN.get(name)
        if known is None:
            _log_once(name)
        elif value is not None and not any(_same(value, neutral) for neutral in known.neutral):
            raise RequestRefused(f"`{name}`: {known.reason}", code="unsupported_parameter", field=name)


def _same(value: Any, neutral: Any) -> bool:
    # True == 1 in Python, but not for who reads JSON.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _log_once(name: str) -> None:
    if name not in _already_logged and len(_already_logged) < _MOST_REMEMBERED:
        _already_logged.add(name)
        _log.warning("requests carry a field that means nothing here and is ignored: %r", name[:100])

"""Fields that clients send and whose meaning is known, but which this version does not act on: they are refused, not ignored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from holdfast.http.server.problem import RequestRefused

_log = logging.getLogger(__name__)
_NOT_YET = "this version does not support it yet"
_MOST_REMEMBERED = 1000
_already_logged: set[str] = set()
_OFF = (False,)
_EMPTY: tuple[Any, ...] = ([], {}, "")
KNOWN: Mapping[str, tuple[Any, ...]] = {  # field → the values with which it asks for nothing; null does for every field
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "structured_outputs": _EMPTY,
    "guided_json": _EMPTY,
    "guided_regex": _EMPTY,
    "guided_choice": _EMPTY,
    "guided_grammar": _EMPTY,
    "grammar": _EMPTY,
    "json_schema": _EMPTY,
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "prediction": (),
    "mm_processor_kwargs": _EMPTY,
    "media_io_kwargs": _EMPTY,
    "use_beam_search": _OFF,
    "length_penalty": (1, 1.0),
    "early_stopping": _OFF,
    "min_tokens": (0,),
    "stop_token_ids": _EMPTY,
    "bad_words": _EMPTY,
    "allowed_token_ids": (),
    "include_stop_str_in_output": _OFF,
    "skip_special_tokens": (True,),
    "logits_processors": _EMPTY,
    "logit_processors": _EMPTY,
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "xtc_probability": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "mirostat": (0,),
    "typical_p": (1, 1.0),
    "top_a": (0, 0.0),
    "tfs_z": (1, 1.0),
    "repetition_context_size": (),
    "repeat_penalty": (),
    "repeat_last_n": (),
    "n_predict": (),
    "num_predict": (),
    "num_ctx": (),
    "chat_template": (),
    "documents": _EMPTY,
    "role_mapping": _EMPTY,
    "prompt_embeds": (),
    "adapters": _EMPTY,
    "draft_model": _EMPTY,
    "num_draft_tokens": (),
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
}
_REASONS = {
    "prompt_logprobs": "use `echo` with `logprobs` on /v1/completions",
    "repetition_context_size": "`repetition_penalty` here looks at the whole prompt and answer",
    "repeat_penalty": "the field is called `repetition_penalty` here",
    "repeat_last_n": "`repetition_penalty` here looks at the whole prompt and answer",
    "n_predict": "the field is called `max_tokens` here",
    "num_predict": "the field is called `max_tokens` here",
    "num_ctx": "the context is set when the server is started",
    "chat_template": "the model's own template is used",
}


def refuse_unsupported(extras: Mapping[str, Any] | None) -> None:
    """Raise for the first field of `extras` that asks for something known and unsupported; log the unknown ones, each once."""
    for name, value in (extras or {}).items():
        if name not in KNOWN:
            _log_once(name)
        elif value is not None and not any(_same(value, neutral) for neutral in KNOWN[name]):
            raise RequestRefused(f"`{name}`: {_REASONS.get(name, _NOT_YET)}", code="unsupported_parameter", field=name)


def _same(value: Any, neutral: Any) -> bool:
    # True == 1 in Python, but not for who reads JSON.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _log_once(name: str) -> None:
    if name not in _already_logged and len(_already_logged) < _MOST_REMEMBERED:
        _already_logged.add(name)
        _log.warning("requests carry a field that means nothing here and is ignored: %r", name[:100])

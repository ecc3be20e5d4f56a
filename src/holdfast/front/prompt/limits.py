"""Checks what a request may ask for, and determines its sampling defaults, the length of its answer,
and the tenant whose cache it uses.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from holdfast.config import LimitsSettings
from holdfast.errors import InvalidRequest
from holdfast.front.request import GenerationRequest
from holdfast.models.model_folder import DEFAULT_SAMPLING, planned_answer_tokens
from holdfast.models.tokenizer_files import default_sampling
from holdfast.wire.events import ModelInfo
from holdfast.wire.requests import SAMPLING_RANGES, SamplingParams

# Maximum length of a stop string. Each new token is searched together with preceding text of the
# length of a stop string.
MAX_STOP_CHARACTERS = 1024

_CONTAINERS = (dict, list, tuple)


class Nesting(NamedTuple):
    """The size of a JSON value."""

    parts: int  # objects, lists and their elements
    levels: int  # the deepest level of nesting


def nesting_of(value: Any, *, max_parts: int) -> Nesting:
    """Measure a JSON value. Counting stops as soon as there are more than `max_parts` parts."""
    parts = 1
    levels = 0
    values_of_level = [value]
    while parts <= max_parts:
        # most values are strings, so they are filtered out first
        containers = [
            each
            for each in values_of_level
            if type(each) is not str and isinstance(each, _CONTAINERS)
        ]
        if not containers:
            break
        levels += 1
        values_of_level = list(
            chain.from_iterable(
                each.values() if isinstance(each, dict) else each for each in containers
            )
        )
        parts += len(values_of_level)
    return Nesting(parts, levels)


def check_limits(
    request: GenerationRequest, sampling: SamplingParams, *, limits: LimitsSettings, vocab_size: int
) -> None:
    """Check that a request respects the limits of the server and the model.

    Raises InvalidRequest, which names the field.

    sampling: the request's parameters, completed by the model's defaults.
    """
    _check_between("n", request.choices, 1, limits.max_choices)
    if request.max_tokens is not None:
        _check_between("max_tokens", request.max_tokens, 0, math.inf)
    _check_between("top_logprobs", request.top_logprobs, 0, limits.max_top_logprobs)
    if request.top_logprobs and not request.want_logprobs:
        raise InvalidRequest("top_logprobs requires logprobs", field="top_logprobs")
    _check_stops(request.stop, limits.max_stop_strings)
    _check_sampling(sampling, vocab_size)


def check_token_ids(token_ids: Collection[int], *, vocab_size: int, field: str) -> None:
    """Raise InvalidRequest if the model lacks one of these tokens."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token ids must be 0 to {vocab_size - 1}, got {token_id} at index {index}",
                field=field,
            )


def _check_stops(stops: tuple[str, ...], max_stops: int) -> None:
    """Raise InvalidRequest if there are too many stop strings, or if one is empty or too long."""
    if len(stops) > max_stops:
        raise InvalidRequest(
            f"at most {max_stops} stop strings are allowed, got {len(stops)}", field="stop"
        )
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(stop)}",
                field="stop",
            )


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest for values outside their ranges, and biases that allow no token at all."""
    for field, allowed in SAMPLING_RANGES.items():
        value = getattr(sampling, field)
        for each in value.values() if field == "logit_bias" else (value,):
            _check_between(field, each, allowed.lowest, allowed.highest)
    for token_id in sampling.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token ids must be 0 to {vocab_size - 1}, got {token_id}",
                field="logit_bias",
            )
    biases = sampling.logit_bias.values()
    if len(biases) >= vocab_size and max(biases) <= SAMPLING_RANGES["logit_bias"].lowest:
        raise InvalidRequest(
            f"logit_bias bans all {vocab_size} tokens of the model: no token is left to generate",
            field="logit_bias",
        )


def _check_between(field: str, value: float, lowest: float, highest: float) -> None:
    """Raise InvalidRequest, which names the field, if its value is outside this range."""
    if not lowest <= value <= highest:  # true also for NaN
        allowed_range = f"at least {lowest}" if highest == math.inf else f"{lowest} to {highest}"
        raise InvalidRequest(f"{field} must be {allowed_range}, got {value}", field=field)


def with_model_defaults(
    sampling: SamplingParams, *, unset: Collection[str], defaults: Mapping[str, float]
) -> SamplingParams:
    """The parameters, with the model's recommendations for the fields in `unset`.

    If the model recommends nothing, `DEFAULT_SAMPLING` applies, unless the client sets any of its
    fields: then the others are neutral.
    """
    sets_no_default_field = DEFAULT_SAMPLING.keys() <= set(unset)
    model_defaults = default_sampling(defaults) if sets_no_default_field else defaults
    recommended = {name: value for name, value in model_defaults.items() if name in unset}
    return msgspec.structs.replace(sampling, **recommended) if recommended else sampling


def answer_tokens_of(request: GenerationRequest, *, prompt_tokens: int, info: ModelInfo) -> int:
    """The length of the longest answer: that of the request, or the longest that fits.

    If the worker chooses the precision (`auto`), an answer that the request does not limit, or by
    more than fits, is limited to the length that fits without quantization, if that is enough for
    an ordinary answer.
    """
    remaining_tokens = info.context_tokens - prompt_tokens
    if request.max_tokens is not None and request.max_tokens <= remaining_tokens:
        return request.max_tokens
    native_tokens = info.context_tokens_by_bits.get("native", info.context_tokens)
    native_remaining_tokens = native_tokens - prompt_tokens
    is_auto = info.kv.bits_of(request) == "auto"
    return (
        native_remaining_tokens
        if is_auto and native_remaining_tokens >= planned_answer_tokens(native_tokens)
        else remaining_tokens
    )


def tenant_of(*, api_key: str, name: str, cache_salt: str) -> str:
    """An opaque name for the combination of key, tenant and salt; empty if all are empty.

    name: the tenant that the client names.
    api_key: the server's single, unnamed key. If the key changes, another cache is used.
    """
    parts = (api_key, name, cache_salt)
    return _digest(parts, person=b"holdfast tenant") if any(parts) else ""


def tenant_of_key(key_name: str, *, name: str, cache_salt: str) -> str:
    """An opaque name as from `tenant_of`, for a named key.

    A new key with the same name uses the same cache.
    """
    return _digest((key_name, name, cache_salt), person=b"holdfast key")


def _digest(parts: tuple[str, ...], *, person: bytes) -> str:
    """A hash of the parts, in hexadecimal digits. person: separates hashes for different purposes."""
    digest = hashlib.blake2b(digest_size=16, person=person)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        # each part follows its length, so that "a" and "bc" differ from "ab" and "c"
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()

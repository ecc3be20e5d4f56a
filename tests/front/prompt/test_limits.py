"""Impossible requests are refused by field before any work."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast.config import LimitsSettings
from holdfast.errors import InvalidRequest
from holdfast.front.prompt.limits import (
    MAX_STOP_CHARACTERS,
    check_limits,
    check_token_ids,
    nesting_of,
    with_model_defaults,
)
from holdfast.front.request import GenerationRequest
from holdfast.models.model_folder import DEFAULT_SAMPLING
from holdfast.models.tokenizer_files import recommended_sampling
from holdfast.wire.requests import SAMPLING_RANGES, SamplingParams


def check(*, sampling: dict[str, Any] | None = None, **fields: Any) -> None:
    request = GenerationRequest(
        request_id="r", model="m", prompt="x", sampling=SamplingParams(**(sampling or {})), **fields
    )
    check_limits(request, request.sampling, limits=LimitsSettings(), vocab_size=100)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"choices": 0}, "n"),
        ({"choices": 17}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"top_logprobs": 21, "want_logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x" * (MAX_STOP_CHARACTERS + 1),)}, "stop"),
        ({"sampling": {"temperature": -0.1}}, "temperature"),
        ({"sampling": {"temperature": math.nan}}, "temperature"),
        ({"sampling": {"temperature": math.inf}}, "temperature"),
        ({"sampling": {"top_p": 1.1}}, "top_p"),
        ({"sampling": {"top_k": -2}}, "top_k"),
        ({"sampling": {"min_p": -1.0}}, "min_p"),
        ({"sampling": {"presence_penalty": 2.5}}, "presence_penalty"),
        ({"sampling": {"frequency_penalty": -2.5}}, "frequency_penalty"),
        ({"sampling": {"repetition_penalty": 0.0}}, "repetition_penalty"),
        ({"sampling": {"logit_bias": {100: 1.0}}}, "logit_bias"),
        ({"sampling": {"logit_bias": {-1: 1.0}}}, "logit_bias"),
        ({"sampling": {"logit_bias": {5: 101.0}}}, "logit_bias"),
        ({"sampling": {"logit_bias": dict.fromkeys(range(100), -100.0)}}, "logit_bias"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(**fields)
    assert caught.value.field == named


def test_values_at_the_edges_are_accepted() -> None:
    edges = {"temperature": 0.0, "top_p": 0.0, "top_k": 0, "min_p": 1.0, "logit_bias": {99: -100.0}}
    check(
        choices=16,
        max_tokens=1,
        top_logprobs=20,
        want_logprobs=True,
        stop=("x" * MAX_STOP_CHARACTERS,) * 16,
        sampling=edges,
    )
    check(max_tokens=0, echo=True)
    check(max_tokens=0)
    check(sampling={"logit_bias": dict.fromkeys(range(99), -100.0)})
    check(sampling={"logit_bias": dict.fromkeys(range(100), -99.0)})


@pytest.mark.parametrize("field", SAMPLING_RANGES)
def test_both_ends_of_every_range_are_accepted_and_nothing_beyond(field: str) -> None:
    lowest, highest, *_ = SAMPLING_RANGES[field]
    for value, is_good in (
        (lowest, True),
        (highest, True),
        (lowest - 1, False),
        (highest + 1, False),
    ):
        sampling = {field: {7: value} if field == "logit_bias" else value}
        if is_good:
            check(sampling=sampling)
        else:
            with pytest.raises(InvalidRequest, match=f"{field} must be"):
                check(sampling=sampling)


def test_every_sampling_field_except_the_seed_has_a_range() -> None:
    assert {*SAMPLING_RANGES, "seed"} == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(("token_ids", "place"), [((1, 100), 1), ((-1,), 0)])
def test_a_token_outside_the_vocabulary_is_refused_with_its_position(
    token_ids: tuple[int, ...], place: int
) -> None:
    with pytest.raises(InvalidRequest, match=f"at index {place}") as caught:
        check_token_ids(token_ids, vocab_size=100, field="prompt")
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("value", "nesting"),
    [
        (5, (1, 0)),
        ([], (1, 1)),
        ({"a": 1, "b": [2, 3]}, (5, 2)),
        ([[[[]]]], (4, 4)),
        (({"a": ()},), (3, 3)),
    ],
)
def test_the_size_of_a_value_is_its_parts_and_depth(value: Any, nesting: tuple[int, int]) -> None:
    assert nesting_of(value, max_parts=100) == nesting


def test_counting_stops_at_the_limit() -> None:
    itself: list[Any] = []
    itself.append([itself, itself])
    assert nesting_of(itself, max_parts=50).parts > 50


# A model's recommended values fill only the fields that the client left open.


def test_only_open_fields_are_filled() -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.5)
    filled = with_model_defaults(
        sampling,
        unset=("top_p", "min_p"),
        defaults={"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    )
    assert filled == SamplingParams(temperature=1.0, top_p=0.95)


def test_without_open_fields_nothing_changes() -> None:
    assert (
        with_model_defaults(SamplingParams(), unset=(), defaults={"temperature": 0.6})
        == SamplingParams()
    )


def test_invalid_recommendations_are_left_out() -> None:
    recommended = {
        "temperature": "hot",
        "top_p": 3,
        "top_k": True,
        "min_p": None,
        "repetition_penalty": 1.05,
        "max_length": 20,
    }
    assert recommended_sampling(recommended) == {"repetition_penalty": 1.05}


def test_a_model_marked_as_greedy_is_greedy_unless_overridden() -> None:
    assert recommended_sampling({"do_sample": False, "temperature": 0.7}) == {"temperature": 0.0}
    assert recommended_sampling({"do_sample": True, "temperature": 0.7}) == {"temperature": 0.7}


def test_integers_stay_integers() -> None:
    found = recommended_sampling({"temperature": 1, "top_k": 64.0})
    assert found == {"temperature": 1.0, "top_k": 64}
    assert isinstance(found["top_k"], int)


@pytest.mark.parametrize(
    ("top_k", "meant"),
    [(40.5, {"top_k": 40}), (0.5, {"top_k": 0}), (1e300, {}), (-0.5, {}), (float("nan"), {})],
)
def test_a_fractional_top_k_of_a_model_is_truncated(top_k: float, meant: dict[str, float]) -> None:
    assert recommended_sampling({"top_k": top_k}) == meant


def test_a_model_without_recommendations_gets_defaults_for_open_fields() -> None:
    every = tuple(DEFAULT_SAMPLING)
    filled = with_model_defaults(SamplingParams(), unset=every, defaults={})
    assert filled == SamplingParams(**DEFAULT_SAMPLING)
    penalized = with_model_defaults(
        SamplingParams(), unset=(*every, "repetition_penalty"), defaults={"repetition_penalty": 1.1}
    )
    assert penalized == SamplingParams(**DEFAULT_SAMPLING, repetition_penalty=1.1)
    for chosen in ("temperature", "top_p", "top_k", "min_p"):
        unset = tuple(name for name in every if name != chosen)
        assert with_model_defaults(SamplingParams(), unset=unset, defaults={}) == SamplingParams()

"""A model's recommended values fill only the fields that the client left open."""

from __future__ import annotations

from holdfast.front.prompt.limits import with_model_defaults
from holdfast.models.model_folder import DEFAULT_SAMPLING
from holdfast.models.tokenizer_files import recommended_sampling
from holdfast.wire.requests import SamplingParams


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

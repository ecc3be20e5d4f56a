"""What a model's makers recommend fills what the client left open, and nothing else."""

from __future__ import annotations

from holdfast.front.prompt.limits import recommended_sampling, with_model_defaults
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


def test_nonsense_is_left_out() -> None:
    recommended = {
        "temperature": "hot",
        "top_p": 3,
        "top_k": True,
        "min_p": None,
        "repetition_penalty": 1.05,
        "max_length": 20,
    }
    assert recommended_sampling(recommended) == {"repetition_penalty": 1.05}


def test_a_model_that_is_not_to_be_sampled_is_greedy_unless_a_client_says_otherwise() -> None:
    assert recommended_sampling({"do_sample": False, "temperature": 0.7}) == {"temperature": 0.0}
    assert recommended_sampling({"do_sample": True, "temperature": 0.7}) == {"temperature": 0.7}


def test_whole_numbers_stay_whole() -> None:
    found = recommended_sampling({"temperature": 1, "top_k": 64.0})
    assert found == {"temperature": 1.0, "top_k": 64}
    assert isinstance(found["top_k"], int)

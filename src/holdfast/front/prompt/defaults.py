"""What a model's makers recommend for sampling (generation_config.json), for the fields that a
client left open.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.models.tokenizer_files import read_json
from holdfast.wire.requests import SAMPLING_RANGES, SamplingParams

# named there as in SamplingParams
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generation_defaults(folder: Path) -> dict[str, float]:
    """The recommended values of a model folder; nonsense is left out.

    Raises ModelLoadError when the file is damaged.
    """
    return usable_defaults(read_json(folder / "generation_config.json"))


def usable_defaults(recommended: Mapping[str, Any]) -> dict[str, float]:
    """The usable sampling parameters of a generation_config. `do_sample: false` is temperature 0."""
    usable: dict[str, float] = {}
    for name in _RECOMMENDED:
        value, (lowest, highest) = recommended.get(name), SAMPLING_RANGES[name]
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and lowest <= value <= highest
        ):
            usable[name] = int(value) if name == "top_k" else float(value)
    if recommended.get("do_sample") is False:
        usable["temperature"] = 0.0
    return usable


def with_model_defaults(
    sampling: SamplingParams, *, unset: Collection[str], defaults: Mapping[str, float]
) -> SamplingParams:
    """The parameters with the model's recommendation in each field that is in `unset`."""
    recommended = {name: value for name, value in defaults.items() if name in unset}
    return msgspec.structs.replace(sampling, **recommended) if recommended else sampling

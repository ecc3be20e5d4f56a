"""`options` of a request: how to draw and when to stop, under the names that Ollama has for it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from holdfast.config import LimitsSettings
from holdfast.front.server.fields import (
    INT32_MAX,
    INT64_MAX,
    MANY,
    ONE,
    STRICT,
    one_or_many,
    within,
)
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.unsupported import UnsupportedFields
from holdfast.wire.requests import SAMPLING_RANGES, SamplingParams

_ALL = -1  # of top_k. Of seed: any.
_OF_THE_ENGINE = (
    "num_ctx num_keep num_batch num_ubatch num_gpu main_gpu low_vram f16_kv logits_all vocab_only "
    "use_mmap use_mlock numa "
    "num_thread embedding_only draft_num_predict mirostat mirostat_tau mirostat_eta tfs_z "
    "typical_p penalize_newline"
)
WITHOUT_EFFECT = frozenset(_OF_THE_ENGINE.split())
"""Options of Ollama's engine, which clients send with every request: taken, without effect."""
_UNKNOWN = UnsupportedFields(neutral={})


def _whole(value: Any) -> Any:
    # Clients that compute in doubles, and Home Assistant, send 40.0 for 40, which Ollama takes.
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_whole)]
StopText = Annotated[str, Field(min_length=1)]
Stops = Annotated[
    Annotated[StopText, Tag(ONE)] | Annotated[list[StopText], Field(fail_fast=True), Tag(MANY)],
    Discriminator(one_or_many),
]
# of SamplingParams → here, where it has another name
_FIELD = {"repetition_penalty": "repeat_penalty"}
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class OllamaOptions(BaseModel):
    """What is left out is as the model's generation_config.json has it; Ollama's own defaults are
    not used.
    """

    model_config = STRICT

    num_predict: Annotated[WholeNumber, Field(ge=-2, le=INT32_MAX)] | None = Field(
        None, description="Most tokens of the answer; 0, -1 and -2: as many as fit the context."
    )
    temperature: Annotated[float, within("temperature")] | None = Field(
        None, description="0: the likeliest token each time."
    )
    top_k: Annotated[WholeNumber, Field(ge=-1, le=SAMPLING_RANGES["top_k"][1])] | None = Field(
        None, description="Draw from so many of the likeliest tokens; 0 and -1: from all."
    )
    top_p: Annotated[float, within("top_p")] | None = Field(
        None, description="Draw from the likeliest tokens of this share."
    )
    min_p: Annotated[float, within("min_p")] | None = Field(
        None, description="Only tokens at least so likely as the likeliest."
    )
    seed: Annotated[WholeNumber, Field(ge=-(2**63), le=2**64 - 1)] | None = Field(
        None, description="The same seed gives the same answer; -1: another one each time."
    )
    stop: Stops | None = Field(None, description="The answer ends before any of these texts.")
    repeat_penalty: Annotated[float, within("repetition_penalty")] | None = Field(
        None, description="Above 1: tokens of the prompt and the answer become less likely."
    )
    repeat_last_n: Annotated[WholeNumber, Field(ge=-1, le=INT32_MAX)] | None = Field(
        None,
        description="0 switches repeat_penalty off; it looks at the whole prompt and answer otherwise.",
    )
    presence_penalty: Annotated[float, within("presence_penalty")] | None = Field(
        None, description="As OpenAI's."
    )
    frequency_penalty: Annotated[float, within("frequency_penalty")] | None = Field(
        None, description="As OpenAI's."
    )

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of the answer; None: as many as fit."""
        return None if self.num_predict is None or self.num_predict <= 0 else self.num_predict

    def request_options(self, limits: LimitsSettings) -> dict[str, Any]:
        """Fields of a GenerationRequest.

        Raises RequestRefused for more stop strings than this server takes.
        """
        _UNKNOWN.refuse(
            {
                name: value
                for name, value in (self.model_extra or {}).items()
                if name not in WITHOUT_EFFECT
            }
        )
        stop = (
            ()
            if self.stop is None
            else (self.stop,)
            if isinstance(self.stop, str)
            else tuple(self.stop)
        )
        if len(stop) > limits.max_stop_strings:
            raise RequestRefused(
                f"`options.stop`: at most {limits.max_stop_strings} strings", field="options.stop"
            )
        asked = {name: getattr(self, _FIELD.get(name, name)) for name in _SAMPLING}
        if self.repeat_last_n == 0:
            asked["repetition_penalty"] = 1.0
        if asked["top_k"] == _ALL:
            asked["top_k"] = 0
        given = {name: value for name, value in asked.items() if value is not None}
        if self.seed not in (None, _ALL):
            given["seed"] = self.seed & INT64_MAX
        return {
            "max_tokens": self.max_tokens,
            "sampling": SamplingParams(**given),
            "unset_sampling": tuple(name for name, value in asked.items() if value is None),
            "stop": stop,
        }

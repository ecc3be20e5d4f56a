"""Chooses for each sequence whether its keys and values are held unquantized (`native`) or
quantized, from the forms (values of `kv_bits`) that the model supports. Does not import MLX.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.config import KVBitsChoice, ModelSettings
from holdfast.errors import InvalidRequest
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.kv import KVHealth
from holdfast.worker.kv.bits import AUTO_WHEN_SHORT, KVBits

if TYPE_CHECKING:  # this module imports MLX, which is not needed here at run time
    from holdfast.worker.engine.engine import KVCosts
    from holdfast.worker.kv.live import Conversion

logger = logging.getLogger("holdfast.worker")

LEAST_SAVED_SHARE = 0.2  # a running sequence is quantized if this saves this share of its bytes


@dataclass(slots=True, kw_only=True)
class KVForms:
    """The values of `kv_bits` (here: forms of keys and values) that a model supports. Device thread only.

    default: the form of requests that do not choose one. costs: memory of a sequence, by form;
    "native" is always supported. refused: the reasons why forms are not supported, if they were
    tried. test_form: tests a form when it is needed for the first time; returns why its results
    are wrong, or an empty text. warnings: one if the configured default is not supported.
    """

    costs: Mapping[KVBits, KVCosts]
    refused: dict[KVBits, str]
    default: KVBitsChoice = "native"
    test_form: Callable[[KVBits], str] = lambda kv_bits: ""
    warnings: tuple[str, ...] = ()
    _tested: set[KVBits] = field(default_factory=set)

    def refusal(self, kv_bits: KVBits) -> str:
        """Why the model does not support a quantized form; empty if it does. May test the form."""
        if kv_bits in self.costs and kv_bits not in self._tested:
            self._tested.add(kv_bits)
            try:
                reason = self.test_form(kv_bits)
            except (RuntimeError, ValueError, TypeError, MemoryError) as error:  # of MLX
                logger.exception("kv_bits %s could not be tried", kv_bits)
                reason = f"{type(error).__name__}: {error}"
            if reason:
                self.refused[kv_bits] = reason
        if kv_bits in self.costs:
            return self.refused.get(kv_bits, "")
        return self.refused.get(kv_bits, "only native keys and values are supported")

    def choose_default(self, settings: ModelSettings) -> None:
        """Use the form of the settings, or the native one, with a warning, if that is refused."""
        form = AUTO_WHEN_SHORT if settings.kv_bits == "auto" else settings.kv_bits
        reason = "" if form == "native" else self.refusal(form)
        if not reason or settings.kv_bits == "auto":
            self.default = settings.kv_bits
        else:
            self.warnings = (
                f"keys and values are not quantized, although the setting is kv_bits {form}: {reason}",
            )

    def health(self) -> KVHealth:
        """What the worker reports about the forms."""
        return KVHealth(
            bits=self.default,
            bytes_per_token=self.costs[self.default_now].bytes_per_token,
            forms={
                form: each.bytes_per_token
                for form, each in self.costs.items()
                if form not in self.refused
            },
            refused=dict(self.refused.items()),
        )

    @property
    def default_now(self) -> KVBits:
        """The form of a request that does not choose one, while memory does not run short."""
        return "native" if self.default == "auto" else self.default

    def is_automatic(self, request: SequenceRequest) -> bool:
        """Whether the server chooses the form of a request."""
        return (request.kv_bits or self.default) == "auto"

    def is_worth_it(self, conversion: Conversion) -> bool:
        """Whether quantizing running sequences saves enough memory. Short sequences save little,
        because the current block and its buffer stay unquantized; tokens that other sequences hold
        save nothing.
        """
        native = self.costs["native"]
        quantized = self.costs[AUTO_WHEN_SHORT]
        new_tokens = conversion.tokens - conversion.converted_tokens
        native_bytes = native.bytes_per_token * conversion.tokens
        converted_bytes = native.bytes_per_token * conversion.shared_tokens
        converted_bytes += quantized.bytes_per_token * new_tokens
        native_bytes += native.fixed_bytes * conversion.sequences
        converted_bytes += quantized.fixed_bytes * conversion.sequences
        return native_bytes - converted_bytes >= native_bytes * LEAST_SAVED_SHARE

    def choose(
        self,
        request: SequenceRequest,
        *,
        is_short: bool,
        cached_tokens: Callable[[KVBits], int],
        fits: Callable[[KVBits], bool],
    ) -> KVBits:
        """Choose the form of a new sequence. Raises InvalidRequest if the model does not support
        the form that the request asks for.

        is_short: whether memory runs short, or the sequence would have to wait for memory in its
        native form. cached_tokens: returns how many tokens of the prompt need no prefill in a form.
        fits: returns whether the sequence fits the KV budget in a form if it runs alone.

        "auto" is native unless memory is short now, regardless of earlier choices and
        requests. While memory is short, a native prefix counts only if it is more than half of the
        prompt; otherwise, prefilling again usually takes less time than waiting for memory.
        """
        requested_form = request.kv_bits or self.default
        if requested_form != "auto":
            if requested_form == "native" or not (reason := self.refusal(requested_form)):
                return requested_form
            possible_forms = [each for each in self.costs if each not in self.refused]
            raise InvalidRequest(
                f"this model cannot hold keys and values in kv_bits {requested_form!r}: {reason}; "
                f"possible: {', '.join(('auto', *possible_forms))}",
                field="kv_bits",
            )
        if self.refusal(AUTO_WHEN_SHORT):
            return "native"
        if not fits("native"):
            # even if this does not fit either: the error message then names the smallest size
            return AUTO_WHEN_SHORT
        if not is_short:
            return "native"
        native_cached_tokens = cached_tokens("native")
        half_prompt_tokens = len(request.prompt_token_ids) // 2
        is_mostly_native = native_cached_tokens > max(
            cached_tokens(AUTO_WHEN_SHORT), half_prompt_tokens
        )
        return "native" if is_mostly_native else AUTO_WHEN_SHORT


ONLY_NATIVE = KVForms(costs={}, refused={})

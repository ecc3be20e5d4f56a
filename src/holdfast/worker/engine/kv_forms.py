"""Which forms of keys and values the sequences of a model may have: as they were computed, or
quantized; what each costs, and which one a sequence gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.config import KVBitsChoice
from holdfast.errors import InvalidRequest
from holdfast.worker.engine.engine import Engine, KVCosts
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.probe import broken_kv_bits
from holdfast.worker.kv.layer import KVBits
from holdfast.worker.kv.quantized import BITS

SAVING: KVBits = "8"  # what "auto" means when memory runs short


LEAST_SAVED_SHARE = 0.2  # of the bytes of a running sequence, or it is not quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class KVForms:
    """The forms that a model supports.

    default: for requests that do not choose. costs: by supported form; "native" is always
    supported. refused: why each other form is not supported. warnings: if the default that was
    asked for is not supported.
    """

    default: KVBitsChoice
    costs: Mapping[KVBits, KVCosts]
    refused: Mapping[KVBits, str]
    warnings: tuple[str, ...] = ()

    @property
    def usual(self) -> KVBits:
        """The form of a request that does not choose, while memory lasts."""
        return "native" if self.default == "auto" else self.default

    def is_free(self, asked: KVBitsChoice | str) -> bool:
        """Whether the server chooses the form of a request. asked: empty: the default."""
        return (asked or self.default) == "auto"

    def is_worth_it(self, tokens: int) -> bool:
        """Whether a running sequence of this length becomes much smaller if it is quantized: its
        current block and the buffer for it stay as they are.
        """
        native = self.costs["native"]
        saving = self.costs[SAVING]
        before = native.bytes_per_token * tokens + native.fixed_bytes
        after = saving.bytes_per_token * tokens + saving.fixed_bytes
        return before - after >= before * LEAST_SAVED_SHARE

    def choose(
        self,
        asked: KVBitsChoice | str,
        *,
        is_short: bool,
        cached_tokens: Callable[[KVBits], int],
    ) -> KVBits:
        """Choose the form of a new sequence. Raises InvalidRequest if the model does not support
        the form that the request asks for.

        asked: empty: the default. is_short: whether memory runs short. cached_tokens: the length of
        the cached prefix in a form; "auto" takes the form with the longer one, so that no token is
        read twice.
        """
        wanted = asked or self.default
        if wanted != "auto":
            for kv_bits in self.costs:
                if kv_bits == wanted:
                    return kv_bits
            raise InvalidRequest(
                f"this model cannot hold keys and values in kv_bits {wanted!r}: "
                f"{self.refused.get(wanted, 'there is no such form')}; "  # type: ignore[call-overload]
                f"possible: {', '.join(('auto', *self.costs))}",
                field="kv_bits",
            )
        if SAVING not in self.costs:
            return "native"
        saved = cached_tokens(SAVING)
        if not saved and not is_short:
            return "native"
        native = cached_tokens("native")
        return SAVING if saved > native or (is_short and saved == native) else "native"


ONLY_NATIVE = KVForms(
    default="native",
    costs={"native": KVCosts(bytes_per_token=0, fixed_bytes=0, form=None)},
    refused={},
)


def examine_forms(
    engine: Engine, runner: Runner, *, default: KVBitsChoice, vocab_size: int
) -> KVForms:
    """Find out which forms a loaded model supports, and what each costs. Device thread only."""
    native = engine.measure_costs()
    costs: dict[KVBits, KVCosts] = {"native": native}
    refused: dict[KVBits, str] = {}
    if native.form is None:
        refused = dict.fromkeys(BITS, "the state of this model has no form that can be copied")
    else:
        runner.learn_form(native.form)
        reason = runner.refusal()
        refused = (
            dict.fromkeys(BITS, reason) if reason else broken_kv_bits(runner, vocab_size=vocab_size)
        )
        costs |= {
            kv_bits: engine.measure_costs(kv_bits) for kv_bits in BITS if kv_bits not in refused
        }
    warnings = tuple(
        f"keys and values stay as they are computed, not in kv_bits {name}: {why}"
        for name, why in refused.items()
        if name == default
    )
    return KVForms(
        default="native" if warnings else default, costs=costs, refused=refused, warnings=warnings
    )

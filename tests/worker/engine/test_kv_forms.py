"""The form of keys and values that a sequence gets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import ModelSettings
from holdfast.errors import InvalidRequest
from holdfast.worker.engine import views
from holdfast.worker.engine.engine import Engine, KVCosts
from holdfast.worker.engine.kv_forms import KVForms
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.probe import choose_layout, probe_kv_forms
from holdfast.worker.kv.bits import BITS
from holdfast.worker.kv.quantized import QuantizedKV
from tests.fakes.caching_worker import greedy
from tests.fakes.tiny_models import VOCAB_SIZE, make_tiny


@cache
def wide_runner() -> Runner:
    # with two layers, wrong codes change too little
    model = make_tiny("llama", head_dim=32, num_hidden_layers=3)
    return choose_layout(model, vocab_size=VOCAB_SIZE)


def forms_of(**settings: Any) -> KVForms:
    engine = Engine(wide_runner(), vocab_size=VOCAB_SIZE)
    forms = probe_kv_forms(engine, wide_runner(), vocab_size=VOCAB_SIZE)
    forms.choose_default(ModelSettings(**settings))
    return forms


FORMS = KVForms(
    default="auto",
    costs=dict.fromkeys(BITS, KVCosts(bytes_per_token=1, fixed_bytes=0, form=None)),
    refused={},
)


def chosen(
    forms: KVForms,
    asked: Any,
    *,
    is_short: bool = False,
    fitting: Collection[str] = ("native", "8"),
    **cached: int,
) -> str:
    """The form of a request with 400 prompt tokens."""
    found = {"native": cached.get("native", 0), "8": cached.get("eight", 0)}
    return forms.choose(
        greedy("a", (1,) * 400, kv_bits=asked),
        is_short=is_short,
        cached_tokens=lambda bits: found[bits],
        fits=lambda bits: bits in fitting,
    )


def test_auto_is_native_while_memory_lasts() -> None:
    forms = forms_of(kv_bits="auto")
    assert chosen(forms, "") == "native"
    for eight in range(0, 401, 50):
        assert chosen(forms, "", eight=eight) == "native"
        assert chosen(forms, "", eight=eight, native=eight // 2) == "native"
    assert chosen(forms, "4") == "4"
    assert chosen(forms, "8") == "8"
    assert chosen(forms, "", eight=400) == "native", "somebody has asked for 8 bits"
    assert chosen(forms_of(kv_bits="8"), "", is_short=True) == "8"
    assert chosen(forms_of(kv_bits="native"), "", is_short=True, eight=300) == "native"


@given(
    eight=st.integers(0, 400),
    native=st.integers(0, 400),
    shortages=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_the_form_depends_only_on_the_current_pressure(
    eight: int, native: int, shortages: list[bool]
) -> None:
    used = replace(FORMS)
    for is_short in shortages:
        form = chosen(used, "auto", is_short=is_short, eight=eight, native=native)
        fresh = replace(FORMS)
        assert form == chosen(fresh, "auto", is_short=is_short, eight=eight, native=native)
        assert is_short or form == "native"


def test_after_a_shortage_an_8_bit_conversation_is_native_again() -> None:
    forms = forms_of(kv_bits="auto")
    assert chosen(forms, "", is_short=True) == "8"
    assert chosen(forms, "", fitting=("8",)) == "8"
    assert chosen(forms, "", eight=400) == "native"


def test_during_a_shortage_a_large_native_prefix_decides() -> None:
    forms = forms_of(kv_bits="auto")
    assert chosen(forms, "", is_short=True, native=201) == "native"
    assert chosen(forms, "", is_short=True, native=200) == "8"
    assert chosen(forms, "", is_short=True, native=300, eight=300) == "8"
    assert chosen(forms, "", is_short=True, native=300, eight=256) == "native"


def test_a_request_that_fits_only_in_8_bits_gets_8_bits() -> None:
    forms = forms_of(kv_bits="auto")
    assert chosen(forms, "", fitting=("8",), native=399) == "8"
    assert chosen(forms, "", fitting=()) == "8", "the refusal names what it needs in 8 bits"
    assert chosen(forms, "native", fitting=("8",)) == "native"
    assert chosen(forms_of(kv_bits="native"), "", fitting=("8",)) == "native"


def test_all_forms_of_a_sound_model_are_possible() -> None:
    forms = forms_of(kv_bits="native")
    assert [forms.refusal(kv_bits) for kv_bits in BITS] == [""] * len(BITS)


def test_a_form_with_wrong_results_is_refused_and_native_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = QuantizedKV._codes_of_native

    def wrong(layer: QuantizedKV, start: int, end: int) -> Any:
        arrays = right(layer, start, end)
        if layer.bits != (8, 8):
            return arrays
        return tuple(-array if array.dtype != views.mx.uint32 else array for array in arrays)

    monkeypatch.setattr(QuantizedKV, "_codes_of_native", wrong)
    forms = forms_of(kv_bits="8")
    assert forms.default_now == "native"
    assert "kv_bits 8: its results are wrong" in forms.warnings[0]
    assert chosen(forms, "4") == "4"
    with pytest.raises(InvalidRequest, match="possible: auto, native, 8/4, 4"):
        chosen(forms, "8")
    assert chosen(forms, "auto", is_short=True) == "native", "there is no other form to save memory"


def test_an_untestable_form_fails_only_requests_for_it() -> None:
    def fail(kv_bits: str) -> str:
        raise RuntimeError("out of memory")

    forms = forms_of(kv_bits="native")
    forms.test_form = fail
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="RuntimeError: out of memory"):
            chosen(forms, "4")
    assert chosen(forms, "native") == "native"

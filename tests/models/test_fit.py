from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.models.fit import Need, choice_for, usable_of

GIB = 1 << 30
sizes = st.integers(1, 200 * GIB)


def qwen3_4b(bits: float) -> Need:
    """36 layers of 8 heads of 128, in 16 bits."""
    return Need(
        weight_bytes=int(4.02e9 * bits / 8), bytes_per_token=36 * 8 * 128 * 2 * 2, fixed_bytes=0
    )


def test_a_16_bit_model_is_quantized_only_on_small_machines() -> None:
    choices = [
        choice_for(total * GIB, qwen3_4b(16), parameters=4_020_000_000, context_tokens=40960)
        for total in (8, 16, 32, 64)
    ]
    assert [choice.form for choice in choices] == ["8 bits", "8 bits", "as is", "as is"]
    assert [(choice.agents, choice.tokens) for choice in choices] == [
        (1, 8192),
        (1, 32768),
        (2, 32768),
        (5, 32768),
    ]


def test_a_quantized_model_is_kept() -> None:
    choice = choice_for(64 * GIB, qwen3_4b(4.5), parameters=4_020_000_000, context_tokens=8192)
    assert (choice.form, choice.tokens) == ("as is", 8192)


def test_weights_that_do_not_fit_leave_no_room() -> None:
    need = Need(weight_bytes=10, bytes_per_token=1, fixed_bytes=0)
    assert need.agents(1, memory_bytes=10) == need.agents(1, memory_bytes=5) == 0


@given(
    weights=sizes,
    per_token=st.integers(0, 1 << 20),
    fixed=st.integers(0, 1 << 30),
    memory=sizes,
    tokens=st.integers(1, 1 << 20),
)
def test_the_promised_agents_fit(
    weights: int, per_token: int, fixed: int, memory: int, tokens: int
) -> None:
    need = Need(weight_bytes=weights, bytes_per_token=per_token, fixed_bytes=fixed)
    agents = need.agents(tokens, memory_bytes=memory)
    assert agents >= 0
    if agents and per_token + fixed:
        assert weights + agents * (tokens * per_token + fixed) <= memory
    assert need.agents(tokens, memory_bytes=memory + GIB) >= agents
    assert need.agents(tokens + 1, memory_bytes=memory) <= agents


@given(total=sizes, weights=sizes, per_token=st.integers(1, 1 << 20), parameters=sizes)
def test_a_form_without_room_is_not_chosen_if_another_fits(
    total: int, weights: int, per_token: int, parameters: int
) -> None:
    need = Need(weight_bytes=weights, bytes_per_token=per_token, fixed_bytes=0)
    choice = choice_for(total, need, parameters=parameters, context_tokens=4096)
    assert choice.need.weight_bytes <= weights
    assert choice.agents == (
        0
        if choice.form == "none"
        else choice.need.agents(choice.tokens, memory_bytes=usable_of(total))
    )
    if need.agents(4096, memory_bytes=usable_of(total)) >= 4:
        assert choice.form == "as is"
    if choice.form == "none":
        assert need.agents(2048, memory_bytes=usable_of(total)) == 0

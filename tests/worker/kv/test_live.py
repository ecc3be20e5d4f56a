"""Starting from live states, for every kind of layer: moved, shared and copied tokens equal those
read.
"""

from __future__ import annotations

import random
from dataclasses import replace

import mlx.core as mx
import pytest

from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.kinds import Composite
from holdfast.worker.kv.layer import Layer, LayerKV
from holdfast.worker.kv.live import (
    BaseUse,
    LiveBase,
    LiveState,
    all_bytes,
    frozen_bytes,
    start_from,
)
from holdfast.worker.kv.recurrent import RecurrentState
from holdfast.worker.kv.window import WindowKV

WINDOW = 6


class WholeKV(FullKV):
    """A kind that keeps one buffer."""

    can_share = False


def layers(kind: str) -> list[Layer]:
    kinds = {
        "full": [FullKV(), FullKV()],
        "whole": [WholeKV()],
        "window": [FullKV(), WindowKV(WINDOW)],
        "composite": [Composite((FullKV(), FullKV())), FullKV()],
        "recurrent": [Composite((FullKV(), RecurrentState(1))), RecurrentState(1)],
    }
    return kinds[kind]  # type: ignore[return-value]


def read(state: LiveState, tokens: list[int]) -> None:
    """Every layer keeps a trace of the tokens it has read, in order."""
    for leaf in state.leaves:
        if isinstance(leaf, LayerKV):
            values = mx.array(tokens, mx.float32).reshape(1, 1, -1, 1) * mx.ones((1, 2, 1, 4))
            leaf.append(values, values + 0.5)
        elif isinstance(leaf, RecurrentState):
            for token in tokens:
                before = leaf[0]
                leaf[0] = (mx.zeros((1, 3)) if before is None else before * 0.5) + token
    state.tokens += len(tokens)


def a_state(kind: str, tokens: list[int], *, pieces: int = 1) -> LiveState:
    state = LiveState(layers(kind))
    for begin in range(0, len(tokens), max(1, len(tokens) // pieces)):
        read(state, tokens[begin : begin + max(1, len(tokens) // pieces)])
        if pieces > 1:
            state.freeze()
    return state


def contents(state: LiveState) -> list[mx.array]:
    found: list[mx.array] = []
    for leaf in state.leaves:
        if isinstance(leaf, FullKV):
            assert leaf.tokens == state.tokens
            found += leaf.last(leaf.tokens)
        elif isinstance(leaf, WindowKV):
            found += leaf.last(leaf.visible(leaf.tokens))
        elif isinstance(leaf, RecurrentState) and (slot := leaf[0]) is not None:
            found.append(slot)
    return found


def assert_same(state: LiveState, other: LiveState) -> None:
    for one, two in zip(contents(state), contents(other), strict=True):
        assert mx.array_equal(one, two)


KINDS = ["full", "whole", "window", "composite", "recurrent"]
USES: list[BaseUse] = ["moved", "shared", "copied"]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", KINDS)
def test_forks_match_a_fresh_prefill_and_keep_the_parent(kind: str, use: BaseUse) -> None:
    rng = random.Random(f"{kind} {use}")
    if use == "shared" and kind == "whole":
        pytest.skip("it is never shared")
    for tokens in (1, 7, 12, 19, 20):
        for pieces in (1, 3):
            known, more = list(range(1, 21)), [rng.randrange(100) for _ in range(9)]
            base = a_state(kind, known, pieces=pieces)
            can_rewind = base.can_rewind(tokens)
            keeps_all = use == "moved" and can_rewind
            state = start_from(
                LiveBase(state=base, tokens=tokens, use=use), layers(kind), is_restored=False
            )
            assert state.tokens == tokens
            if not keeps_all and any(not leaf.grows for leaf in state.leaves):
                alone = a_state(kind, known[:tokens])
                state.restore([alone.copy_checkpoint()])
            state.reserve(tokens + 4)
            assert_same(state, a_state(kind, known[:tokens]))
            read(state, more)
            assert_same(state, a_state(kind, known[:tokens] + more))
            if use != "moved":
                assert_same(base, a_state(kind, known))
                read(base, more)
                assert_same(base, a_state(kind, known + more))
                assert_same(state, a_state(kind, known[:tokens] + more))


@pytest.mark.parametrize("kind", KINDS)
def test_restored_states_have_fresh_layers_that_do_not_grow(kind: str) -> None:
    base, known = a_state(kind, list(range(1, 21))), list(range(1, 21))
    fresh = layers(kind)
    state = start_from(LiveBase(state=base, tokens=20, use="moved"), fresh, is_restored=True)
    kept = {id(leaf) for leaf in base.leaves}
    assert all((id(leaf) in kept) == leaf.grows for leaf in state.leaves)
    alone = a_state(kind, known)
    if any(not leaf.grows for leaf in state.leaves):
        state.restore([alone.copy_checkpoint()])
    assert_same(state, alone)


@pytest.mark.parametrize("kind", ["full", "window", "composite", "recurrent"])
def test_shared_tokens_are_counted_once(
    kind: str,
) -> None:
    base = a_state(kind, list(range(40)))
    forks = [
        start_from(LiveBase(state=base, tokens=40, use="shared"), layers(kind), is_restored=False)
        for _ in range(3)
    ]
    mx.eval(list(base.arrays()))
    frozen = sum(frozen_bytes((base,)).values())
    assert frozen == sum(array.nbytes for leaf in base.leaves for array in leaf.frozen_arrays()) > 0
    assert sum(frozen_bytes((base, *forks)).values()) == frozen
    assert sum((all_bytes((base,)) | frozen_bytes(forks)).values()) == sum(
        array.nbytes for leaf in base.leaves for array in leaf.arrays()
    )
    for fork in forks:
        read(fork, [1, 2, 3])
    assert sum(frozen_bytes((base, *forks)).values()) == frozen, "a tail is its sequence's own"
    forks[0].park()
    parked = all_bytes(forks[:1]) | frozen_bytes((base, *forks[1:]))
    assert sum(parked.values()) > frozen
    assert base.frozen_tokens == 40


def test_only_states_that_can_go_back_in_every_layer_rewind() -> None:
    assert a_state("full", [1, 2, 3]).can_rewind(0)
    assert not a_state("recurrent", [1, 2, 3]).can_rewind(2)
    assert a_state("recurrent", [1, 2, 3]).can_rewind(3)
    long = a_state("window", list(range(300)))
    read(long, [1])
    assert long.can_rewind(300)
    base = LiveBase(state=long, tokens=300, use="moved")
    assert_same(
        start_from(replace(base), layers("window"), is_restored=False),
        a_state("window", list(range(300))),
    )

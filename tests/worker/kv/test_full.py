"""Keys and values in frozen parts and tails, compared with one plain list of tokens per sequence."""

from __future__ import annotations

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.kinds import Composite
from holdfast.worker.kv.layer import CheckpointLayout, Layer, new_buffers, write
from holdfast.worker.kv.live import LiveBase, LiveState, start_from
from holdfast.worker.kv.recurrent import RecurrentState

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 2


def of(numbers: list[int], *, value_dim: int = VALUE_DIM) -> tuple[mx.array, mx.array]:
    """Keys that contain their token's number, and values that contain its negative."""
    column = mx.array(numbers, dtype=mx.float32).reshape(1, 1, len(numbers), 1)
    keys = mx.broadcast_to(column, (1, HEADS, len(numbers), KEY_DIM))
    return keys, mx.broadcast_to(-column, (1, HEADS, len(numbers), value_dim))


def numbers_of(pair: tuple[mx.array, ...]) -> list[int]:
    found: list[int] = pair[0][0, 0, :, 0].astype(mx.int32).tolist()  # type: ignore[assignment]
    for array, expected in zip(pair, of(found, value_dim=pair[1].shape[3]), strict=True):
        assert mx.array_equal(array, expected)
    return found


def all_numbers(layer: FullKV) -> list[int]:
    return [number for part in layer.parts(layer.tokens) for number in numbers_of(part)]


def capacity_of(layers: list[FullKV]) -> int:
    """The capacity of all these buffers in tokens, each buffer counted once."""
    held = {id(array): array for layer in layers for array in layer.arrays()}
    token_bytes = max(layer.bytes_per_token() for layer in layers)
    return sum(array.nbytes for array in held.values()) // max(1, token_bytes)


class SequencesInParts(RuleBasedStateMachine):
    """Sequences that read, freeze, fork, rewind and end, in any order."""

    @initialize(value_dim=st.sampled_from([VALUE_DIM, KEY_DIM]))
    def begin(self, value_dim: int) -> None:
        # values shaped like keys share a buffer with them, others have a separate one
        self.value_dim = value_dim
        self.layers = [FullKV()]
        self.stories: list[list[int]] = [[]]
        self.next = 1

    def one(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.layers) - 1))

    @rule(data=st.data(), tokens=st.sampled_from([1, 1, 2, 3, 17, 40, 300]), together=st.booleans())
    def read(self, data: st.DataObject, tokens: int, together: bool) -> None:
        at = self.one(data)
        numbers = list(range(self.next, self.next + tokens))
        self.next += tokens
        pair = of(numbers, value_dim=self.value_dim)
        if together and self.value_dim == KEY_DIM:
            self.layers[at].append_arrays([mx.concatenate(pair, axis=1)])
        else:
            self.layers[at].append(*pair)
        self.stories[at] += numbers

    @rule(data=st.data(), tokens=st.integers(0, 900))
    def reserve(self, data: st.DataObject, tokens: int) -> None:
        self.layers[self.one(data)].reserve(tokens)

    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        layer = self.layers[self.one(data)]
        layer.freeze()
        mx.eval(list(layer.arrays()))
        assert layer.frozen_tokens == layer.tokens
        own = [
            (part.unused_tokens, tokens)
            for part, tokens in layer._frozen_parts
            if len(part.holders) == 1
        ]
        assert sum(unused for unused, _ in own) * 16 <= sum(tokens for _, tokens in own)
        assert all(
            part.unused_tokens * 64 <= part.capacity
            for part, _ in layer._frozen_parts
            if len(part.holders) > 1
        )
        for (part, tokens), (later, fewer) in itertools.pairwise(layer._frozen_parts):
            assert (
                (fewer * 2 < tokens and tokens > 512)
                or len(part.holders) > 1
                or len(later.holders) > 1
            )

    @rule()
    def freeze_all(self) -> None:
        for layer in self.layers:
            layer.freeze()
        parts = {
            part: part.unused_tokens for layer in self.layers for part, _ in layer._frozen_parts
        }
        assert capacity_of(self.layers) == sum(part.capacity for part in parts)
        assert sum(parts.values()) * 16 <= sum(layer.tokens for layer in self.layers)

    @rule(data=st.data(), share=st.floats(0, 1))
    @precondition(lambda self: len(self.layers) < 5)
    def fork(self, data: st.DataObject, share: float) -> None:
        at = self.one(data)
        tokens = round(share * self.layers[at].frozen_tokens)
        self.layers.append(self.layers[at].fork(tokens))
        self.stories.append(self.stories[at][:tokens])

    @rule(data=st.data())
    @precondition(lambda self: len(self.layers) > 1)
    def end(self, data: st.DataObject) -> None:
        at = self.one(data)
        del self.layers[at], self.stories[at]

    @rule(data=st.data(), share=st.floats(0, 1))
    def go_back(self, data: st.DataObject, share: float) -> None:
        at = self.one(data)
        dropped = round(share * self.layers[at].tokens)
        assert self.layers[at].can_rewind(dropped)
        assert not self.layers[at].can_rewind(self.layers[at].tokens + 1)
        self.layers[at].rewind(dropped)
        del self.stories[at][len(self.stories[at]) - dropped :]

    @rule(data=st.data(), low=st.floats(0, 1), high=st.floats(0, 1))
    def copy_out(self, data: st.DataObject, low: float, high: float) -> None:
        at = self.one(data)
        start, end = sorted(
            (round(low * self.layers[at].tokens), round(high * self.layers[at].tokens))
        )
        if start < end:
            story = self.stories[at]
            assert numbers_of(self.layers[at].copy_out(start, end)) == story[start:end]
            assert numbers_of(self.layers[at].last(len(story) - start)) == story[start:]
            assert [form.of(1).shape for form in self.layers[at].form()] == [
                (1, HEADS, 1, KEY_DIM),
                (1, HEADS, 1, self.value_dim),
            ]
            assert self.layers[at].bytes_per_token() == HEADS * (KEY_DIM + self.value_dim) * 4

    @rule(data=st.data())
    def restore_elsewhere(self, data: st.DataObject) -> None:
        at = self.one(data)
        story, layer = self.stories[at], FullKV()
        if story:
            layer.restore(
                iter(self.layers[at].copy_out(0, len(story))),
                CheckpointLayout("full"),
                end=len(story),
            )
            assert all_numbers(layer) == story

    @invariant()
    def each_has_its_own_tokens(self) -> None:
        for layer, story in zip(self.layers, self.stories, strict=True):
            assert layer.tokens == layer.kept_tokens() == len(story)
            assert all_numbers(layer) == story


SequencesInParts.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None
)
TestSequencesInParts = SequencesInParts.TestCase


def test_similar_keys_and_values_share_a_buffer() -> None:
    alike, apart = FullKV(), FullKV()
    alike.append(*of([1, 2], value_dim=KEY_DIM))
    apart.append(*of([1, 2]))
    assert [array.shape[1] for array in alike.arrays()] == [2 * HEADS]
    assert [array.shape[1] for array in apart.arrays()] == [HEADS, HEADS]


def test_a_long_session_has_few_parts_and_copies_rarely() -> None:
    layer, copied = FullKV(), 0
    before: set[int] = set()
    for turn in range(200):
        layer.reserve(layer.tokens + 100)
        layer.append(*of([turn] * 100))
        layer.freeze()
        mx.eval(list(layer.arrays()))
        after = {id(part) for part, _ in layer._frozen_parts}
        copied += sum(tokens for part, tokens in layer._frozen_parts if id(part) not in before)
        before = after
        assert len(layer._frozen_parts) <= 2 + math.log2(max(1, layer.tokens / 512))
    assert layer.tokens == 20_000
    assert copied <= layer.tokens * (512 / 100 + math.log2(20_000 / 512))


def test_a_frozen_tail_is_copied_only_if_much_is_unused() -> None:
    for capacity, is_kept in ((1000, True), (1060, True), (1100, False)):
        layer = FullKV()
        layer.reserve(capacity)
        layer.append(*of(list(range(1000))))
        before = [id(array) for array in layer.arrays()]
        layer.freeze()
        assert ([id(array) for array in layer.arrays()] == before) == is_kept
        assert next(layer.arrays()).shape[2] == (capacity if is_kept else 1000)


def test_short_tails_after_a_shared_prefix_free_unused_capacity() -> None:
    first = FullKV()
    first.reserve(4060)
    first.append(*of(list(range(4000))))
    first.freeze()
    shared = next(first.arrays())
    agents = [first.fork(4000) for _ in range(8)]
    for agent in agents:
        agent.reserve(4400)
        agent.append(*of(list(range(4000, 4260))))
        agent.freeze()
    assert capacity_of([first, *agents]) <= (4000 + 8 * 260) * 17 / 16
    assert next(agents[-1].arrays()) is shared, (
        "a long beginning was copied for the sake of short tails"
    )


def test_the_tails_capacity_is_the_reserved_less_the_frozen() -> None:
    layer = FullKV()
    layer.reserve(100)
    layer.append(*of(list(range(90))))
    layer.freeze()
    layer.append(*of([90]))
    assert [array.shape[2] for array in layer.arrays()] == [90, 90, 10, 10]
    layer.freeze()
    layer.reserve(95)  # a later turn that needs less than was reserved before
    layer.append(*of([91]))
    assert [array.shape[2] for array in layer.arrays()][-1] == 95 - 91


def test_a_long_growing_tail_is_frozen_instead_of_copied() -> None:
    layer = FullKV()
    layer.reserve(1000)
    layer.append(*of(list(range(1000))))
    before = [id(array) for array in layer.arrays()]
    layer.reserve(1100)
    layer.append(*of([1000]))
    assert [id(array) for array in layer.arrays()][:2] == before
    assert [array.shape[2] for array in layer.arrays()] == [1000, 1000, 100, 100]
    assert all_numbers(layer) == list(range(1001))
    layer.can_share = False
    layer.reserve(1200)
    layer.append(*of([1001]))
    assert all_numbers(layer) == list(range(1002))


def test_forks_share_their_prefix_and_free_the_rest() -> None:
    first = FullKV()
    first.append(*of(list(range(1000))))
    first.freeze()
    forks = [first.fork(400), first.fork(500)]
    assert capacity_of([first, *forks]) == 1000
    for fork_ in forks:
        fork_.append(*of([7] * 20))
    assert capacity_of([first, *forks]) == 1040
    del first
    forks[0].freeze()
    assert capacity_of(forks) == 540
    assert [all_numbers(fork_) for fork_ in forks] == [
        [*range(400), *[7] * 20],
        [*range(500), *[7] * 20],
    ]


def test_many_forks_of_a_growing_layer_share_a_few_parts() -> None:
    layer, forks = FullKV(), []
    for turn in range(60):
        layer.append(*of([turn] * 40))
        layer.freeze()
        forks.append(layer.fork(layer.tokens - turn % 3))
    assert max(len(each._frozen_parts) for each in (layer, *forks)) <= 2 + math.log2(
        max(1, layer.tokens / 512)
    )
    assert capacity_of([layer, *forks]) == layer.tokens
    for turn, fork_ in enumerate(forks):
        assert all_numbers(fork_) == [number // 40 for number in range(40 * (turn + 1) - turn % 3)]
        fork_.append(*of([99]))
        assert all_numbers(fork_)[-2:] == [turn, 99]


def test_parts_that_another_holder_continues_differently_are_unchanged() -> None:
    layer = FullKV()
    layer.append(*of(list(range(100))))
    layer.freeze()
    other = layer.fork(100)
    layer.rewind(10)  # so that its next token replaces a token of the other one
    layer.append(*of([7] * 20))
    layer.freeze()
    assert [tokens for _, tokens in layer._frozen_parts] == [90, 20]
    assert (all_numbers(layer), all_numbers(other)) == ([*range(90), *[7] * 20], list(range(100)))


def test_unfrozen_tokens_cannot_be_shared() -> None:
    layer = FullKV()
    layer.append(*of([1, 2, 3]))
    with pytest.raises(AssertionError, match="3 of 0 frozen tokens"):
        layer.fork(3)
    with pytest.raises(TypeError, match="RecurrentState cannot be shared"):
        RecurrentState(1).fork(0)


def test_a_layer_without_sharing_stays_in_one_buffer() -> None:
    for capacity, rests_at in ((1100, 1100), (2000, 1000)):
        layer = FullKV()
        layer.can_share = False
        layer.reserve(capacity)
        layer.append(*of(list(range(1000))))
        layer.freeze()
        assert [array.shape[2] for array in layer.arrays()] == [rests_at] * 2
        before = [id(array) for array in layer.arrays()]
        layer.reserve(1001)
        assert layer.frozen_tokens == 0
        assert [id(array) for array in layer.arrays()] == before, (
            "nobody else holds it: it is taken back without a copy"
        )
        layer.append(*of([1000]))
        assert len(layer.parts(1001)) == 1
        assert all_numbers(layer) == list(range(1001))


def test_buffers_moved_to_exact_size_release_the_old_memory() -> None:
    old = mx.random.normal((1, 2, 160, 8))
    (new,) = new_buffers([old], [old], capacity=9, start=3, end=12)
    mx.eval(old, new)
    assert mx.array_equal(new, old[:, :, 3:12])
    assert np.array(new, copy=False).flags.c_contiguous


def test_a_buffer_written_as_a_whole_is_row_contiguous() -> None:
    array = mx.random.normal((1, 5, 2, 8)).swapaxes(1, 2)
    buffers = [mx.zeros((1, 2, 5, 8))]
    write(buffers, [array], start=0)
    mx.eval(buffers)
    assert mx.array_equal(buffers[0], array)
    assert np.array(buffers[0], copy=False).flags.c_contiguous


@pytest.mark.parametrize("common", [1, 256, 700, 1000])
def test_parked_layers_share_a_common_prefix_even_without_live_sharing(
    common: int,
) -> None:
    def parked(numbers: list[int]) -> FullKV:
        layer = FullKV()
        layer.can_share = False
        layer.append(*of(numbers))
        layer.freeze()
        return layer

    first, second = parked(list(range(1000))), parked([*range(common), *range(5000, 5300)])
    second.share_prefix(first, common)
    assert next(second.arrays()) is next(first.arrays())
    assert (second.tokens, second.frozen_tokens) == (common + 300, common + 300)
    third = parked([*range(common), 7])
    third.share_prefix(second, common)
    assert next(third.arrays()) is next(first.arrays())
    for layer, numbers in (
        (third, [*range(common), 7]),
        (first, list(range(1000))),
        (second, [*range(common), *range(5000, 5300)]),
    ):
        assert all_numbers(layer) == numbers
        layer.reserve(2000)
        assert (layer.frozen_tokens, len(layer.parts(layer.tokens))) == (0, 1), (
            "what runs has one buffer of its own"
        )
        layer.append(*of([9]))
        assert all_numbers(layer) == [*numbers, 9]
    assert len({id(array) for layer in (first, second, third) for array in layer.arrays()}) == 6


def test_growing_layers_are_shared_and_others_restored_from_checkpoints() -> None:
    def fresh() -> list[Layer]:
        return [Composite((RecurrentState(1), FullKV())), FullKV()]

    live = LiveState(fresh(), 40)
    recurrent, *full = live.leaves
    for leaf in full:
        assert isinstance(leaf, FullKV)
        leaf.append(*of(list(range(40))))
    assert isinstance(recurrent, RecurrentState)
    recurrent[0] = mx.full((1, 4), 40.0)
    checkpoint = live.copy_checkpoint()
    recurrent[0] = mx.full((1, 4), 41.0)
    assert live.frozen_tokens == 0
    live.freeze()
    assert live.can_share
    assert live.frozen_tokens == 40
    base = LiveBase(state=live, tokens=40, use="shared")
    forked = start_from(base, fresh(), is_restored=True)
    forked.restore([checkpoint])
    assert forked.tokens == 40
    own = forked.leaves[0]
    assert isinstance(own, RecurrentState)
    assert own[0] is not None
    assert own[0].tolist() == [[40.0] * 4]
    kept = [all_numbers(leaf) for leaf in forked.leaves if isinstance(leaf, FullKV)]
    assert kept == [list(range(40))] * 2
    full[0].can_share = False
    assert not live.can_share

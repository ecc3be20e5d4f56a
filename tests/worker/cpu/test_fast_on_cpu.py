"""Rotations and linear layers of a step: bit-equal to MLX's, with fewer operations, traced once,
and on no other thread.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.cpu import fast_on_cpu
from holdfast.worker.cpu.fast_on_cpu import MOST_TABLES, TABLE_POSITIONS, Rotations
from holdfast.worker.cpu.kernels.build import SWITCH
from holdfast.worker.engine import mlx_lm_hooks
from holdfast.worker.engine.engine import Engine, PendingStep
from holdfast.worker.engine.probe import choose_layout
from tests.fakes.architectures import probed
from tests.fakes.caching_worker import greedy
from tests.fakes.interleaving import span, step
from tests.fakes.slow import slow
from tests.fakes.tiny_models import VOCAB_SIZE, make_tiny

DTYPES = (mx.float32, mx.bfloat16)
ARCHITECTURES = ["llama", "deepseek_v3", "qwen3_next", *slow("gemma3_text", "gpt_oss")]


def random_array(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def assert_same_bits(found: mx.array, expected: mx.array) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert mx.array_equal(found, expected)


def operations_of(*arrays: mx.array, folder: Path) -> Counter[str]:
    """The operations in the unevaluated graph."""
    file = folder / "graph.dot"
    mx.export_to_dot(str(file), *arrays)
    return Counter(re.findall(r'\[label ="(\w+)', file.read_text()))


@st.composite
def queries(draw: st.DrawFn) -> mx.array:
    """[rows, heads, tokens, head_dim], in a projection's memory order or the usual one."""
    rows, heads, tokens = (draw(st.integers(1, most)) for most in (4, 3, 5))
    head_dim = draw(st.sampled_from([2, 6, 16, 64, 80]))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 1000))
    if draw(st.booleans()):
        return random_array(rows, heads, tokens, head_dim, dtype=dtype, seed=seed)
    return random_array(rows, tokens, heads, head_dim, dtype=dtype, seed=seed).swapaxes(1, 2)


@given(
    x=queries(),
    part=st.floats(0.1, 1.0),
    traditional=st.booleans(),
    has_freqs=st.booleans(),
    base=st.sampled_from([10_000.0, 500_000.0, 7.5]),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
    starts=st.lists(st.integers(0, 200_000), min_size=4, max_size=4),
    is_batch=st.booleans(),
)
def test_a_rotation_has_the_bits_of_mlx(
    x: mx.array,
    part: float,
    traditional: bool,
    has_freqs: bool,
    base: float,
    scale: float,
    starts: list[int],
    is_batch: bool,
) -> None:
    rows = x.shape[0]
    dims = max(2, 2 * int(part * x.shape[-1] / 2))
    freqs = None
    if has_freqs:
        freqs = mx.concatenate([base ** mx.arange(0, 1, 2 / dims)[1:], mx.array([mx.inf])])
    how: dict[str, Any] = {
        "traditional": traditional,
        "base": None if has_freqs else base,
        "scale": scale,
        "freqs": freqs,
    }
    rotations = Rotations()
    offset = mx.array(starts[:rows]) if is_batch else starts[0]
    expected = mx.fast.rope(x, dims, offset=offset, **how)
    later = mx.fast.rope(x, dims, offset=offset + 1, **how)
    with rotations.step():
        if isinstance(offset, mx.array):
            rotations.share(offset)
        assert_same_bits(mx.fast.rope(x, dims, offset=offset, **how), expected)
        assert_same_bits(mx.fast.rope(x, dims, offset=offset, **how), expected)
    with rotations.step():
        assert_same_bits(mx.fast.rope(x, dims, offset=offset + 1, **how), later)


def ropes() -> Iterator[nn.Module]:
    mlx_lm_hooks.prepare()
    utils = importlib.import_module("mlx_lm.models.rope_utils")
    yield nn.RoPE(16)
    yield nn.RoPE(8, traditional=True, base=500.0, scale=0.5)
    yield utils.SuScaledRoPE(16, long_factor=[1.0 + 0.5 * index for index in range(8)])
    yield utils.Llama3RoPE(
        16, scaling_config={"factor": 8.0, "original_max_position_embeddings": 64}
    )
    yield utils.YarnRoPE(16, traditional=True, scaling_factor=4.0)
    yield utils.YarnRoPE(8, scaling_factor=4.0, mscale_all_dim=1)
    yield utils.ProportionalRoPE(16, 8, factor=2.0)


@pytest.mark.parametrize("rope", list(ropes()), ids=lambda rope: type(rope).__name__)
@pytest.mark.parametrize("tokens", [1, 7])
def test_the_rotations_of_mlx_lm_have_the_same_bits(rope: Any, tokens: int, tmp_path: Path) -> None:
    x = random_array(2, 3, tokens, 16)
    for offset in (130, mx.array([5, 1000])):
        expected = rope(x, offset=offset)
        rotations = Rotations()
        with rotations.step():
            if isinstance(offset, mx.array):
                rotations.share(offset)
            found = [rope(x, offset=offset) for _ in range(3)]
        assert operations_of(*found, folder=tmp_path)["Cos"] == 1
        for each in found:
            assert_same_bits(each, expected)


def test_a_new_array_is_never_mistaken_for_an_earlier_one() -> None:
    x = random_array(2, 1, 1, 16)
    rope: Any = nn.RoPE(16)
    rotations = Rotations()
    with rotations.step():
        rotations.share(mx.array([3, 4]))
        offset = mx.array([5, 9])
        before = rope(x, offset=offset)
        offset += 1  # in place
        after = rope(x, offset=offset)
    assert_same_bits(before, rope(x, offset=mx.array([5, 9])))
    assert_same_bits(after, rope(x, offset=mx.array([6, 10])))


@pytest.mark.parametrize("tokens", [1, 3])
def test_frequencies_of_a_deleted_array_are_not_used_for_another_one(tokens: int) -> None:
    x = random_array(1, 1, tokens, 16)
    turn = partial(mx.fast.rope, x, 16, traditional=False, base=None, scale=1.0, offset=2)
    bases = [mx.arange(1, 9) * factor for factor in range(1, 20)]
    expected = [turn(freqs=base + 1) for base in bases]
    with Rotations().step():
        found = [turn(freqs=base + 1) for base in bases]
    for each, right in zip(found, expected, strict=True):
        assert_same_bits(each, right)


def test_each_forward_pass_of_a_step_rotates_by_its_positions() -> None:
    x = random_array(2, 1, 1, 16)
    rope: Any = nn.RoPE(16)
    places = [mx.array([3, 4]), mx.array([5, 9])]
    expected = [rope(x, offset=offset) for offset in places]
    rotations = Rotations()
    with rotations.step():
        found = [rope(x, offset=rotations.share(offset)) for offset in places]
    for each, right in zip(found, expected, strict=True):
        assert_same_bits(each, right)


def test_tables_are_kept_and_the_least_recently_used_dropped(tmp_path: Path) -> None:
    rope = nn.RoPE(16)
    rotations = Rotations()
    x = random_array(1, 1, 1, 16)

    def cosines_computed_at(position: int) -> int:
        with rotations.step():
            turned = rope(x, offset=position)
        computed = operations_of(turned, folder=tmp_path)["Cos"]
        mx.eval(turned)
        return computed

    assert [cosines_computed_at(position) for position in range(3)] == [1, 0, 0]
    for table in range(1, MOST_TABLES):
        assert cosines_computed_at(table * TABLE_POSITIONS) == 1
    assert cosines_computed_at(TABLE_POSITIONS - 1) == 0
    assert cosines_computed_at(MOST_TABLES * TABLE_POSITIONS) == 1
    assert cosines_computed_at(0) == 0
    assert cosines_computed_at(TABLE_POSITIONS) == 1


@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=3),
    inputs=st.sampled_from([1, 16, 33]),
    outputs=st.sampled_from([1, 8, 65]),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
)
def test_a_linear_layer_has_the_bits_of_mlx(
    shape: list[int], inputs: int, outputs: int, dtype: mx.Dtype, has_bias: bool
) -> None:
    linear = nn.Linear(inputs, outputs, bias=has_bias)
    linear.set_dtype(dtype)
    parameters = set(linear)
    for seed in (1, 2):
        linear.weight = random_array(outputs, inputs, dtype=dtype, seed=seed)
        x = random_array(*shape, inputs, dtype=dtype)
        expected = linear(x)
        with Rotations(transposes_once=True).step():
            assert_same_bits(linear(x), expected)
            assert_same_bits(linear(x), expected)
    assert set(linear) == parameters


def test_a_linear_layer_of_one_sequence_is_one_operation(tmp_path: Path) -> None:
    linear = nn.Linear(16, 8, bias=False)
    x = random_array(1, 1, 16)
    mx.eval(x, linear.weight)
    with Rotations(transposes_once=True).step():
        mx.eval(linear(x))
        assert operations_of(linear(x), folder=tmp_path) == {"Matmul": 1}


def test_wrong_arguments_raise_the_errors_of_mlx() -> None:
    x = random_array(1, 1, 1, 16)
    with Rotations().step():
        for dims in (0, -2, 5, 18):
            with pytest.raises(ValueError, match=r"\[rope\] dims"):
                nn.RoPE(dims)(x)


def cosines_of_two_rotations(folder: Path) -> int:
    rope: Any = nn.RoPE(16)
    turned = [rope(random_array(1, 2, 1, 16), offset=5) for _ in range(2)]
    return operations_of(*turned, folder=folder)["Cos"]


def test_other_threads_and_code_outside_steps_call_mlx(tmp_path: Path) -> None:
    elsewhere: list[int] = []
    with Rotations().step():
        assert cosines_of_two_rotations(tmp_path) == 1
        other = threading.Thread(
            target=lambda: elsewhere.append(cosines_of_two_rotations(tmp_path))
        )
        other.start()
        other.join()
    assert elsewhere == [2]
    assert cosines_of_two_rotations(tmp_path) == 2


# -- in the engine


@contextmanager
def traced() -> Iterator[list[str]]:
    """Records a name whenever MLX traces the function that `fast_on_cpu` compiles."""
    names: list[str] = []

    def hear(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_name
        if event == "call" and name == "_combined_in_one_operation":
            names.append(name)

    sys.setprofile(hear)
    try:
        yield names
    finally:
        sys.setprofile(None)


def run(engine: Engine, *spans: tuple[str, int, int]) -> list[tuple[int, ...]]:
    """Run one step. spans: name, start and number of tokens. Returns the sampled tokens."""
    results = step(engine, *(span(start, tokens, name=name) for name, start, tokens in spans))
    return [result.token_ids for result in results]


def open_sequence(engine: Engine, name: str, *, prompt_tokens: int) -> None:
    prompt = [1 + 7 * at % 200 for at in range(prompt_tokens)]
    engine.open(greedy(name, prompt, max_tokens=64), capacity_tokens=prompt_tokens + 64)


def test_each_number_type_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def _combined_in_one_operation(*arrays: mx.array) -> mx.array:
        return fast_on_cpu._combined(*arrays)

    fresh = mx.compile(
        _combined_in_one_operation, shapeless=True
    )  # no other test has had it traced
    monkeypatch.setattr(fast_on_cpu, "_combined_in_one_operation", fresh)
    rope: Any = nn.RoPE(16)
    with traced() as names, Rotations().step():
        for heads in (2, 3):
            rope(random_array(1, heads, 1, 16, dtype=mx.float16), offset=5)
    assert len(names) == 1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tracing_stops_after_the_first_tokens(name: str) -> None:
    engine = Engine(probed(name), vocab_size=VOCAB_SIZE)
    ends: dict[str, int] = {}

    def join(sequence: str, *, prompt_tokens: int) -> None:
        open_sequence(engine, sequence, prompt_tokens=prompt_tokens)
        run(engine, (sequence, 0, prompt_tokens))
        ends[sequence] = prompt_tokens

    def leave(sequence: str) -> None:
        del ends[sequence]
        engine.close(sequence)

    def decode() -> None:
        run(engine, *((sequence, end, 1) for sequence, end in ends.items()))
        for sequence in ends:
            ends[sequence] += 1

    join("first", prompt_tokens=9)
    decode()
    join("second", prompt_tokens=5)
    decode()
    changes: dict[int, Callable[[], None]] = {
        10: lambda: join("third", prompt_tokens=61),
        20: lambda: leave("second"),
        25: lambda: join("fourth", prompt_tokens=17),
        30: lambda: leave("third"),
        31: lambda: leave("fourth"),
    }
    with traced() as names:
        for number in range(50):
            changes.get(number, lambda: None)()
            decode()
    assert names == []
    assert ends == {"first": 9 + 1 + 1 + 50}
    leave("first")


@pytest.mark.parametrize("streams", [1, 3])
def test_a_decode_step_computes_cosines_at_most_once(
    streams: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = make_tiny("llama", num_hidden_layers=3)
    engine = Engine(choose_layout(model, vocab_size=VOCAB_SIZE), vocab_size=VOCAB_SIZE)
    names = [f"stream {index}" for index in range(streams)]
    for name in names:
        open_sequence(engine, name, prompt_tokens=5)
        run(engine, (name, 0, 5))
    launched: list[Counter[str]] = []
    launch = PendingStep.launch

    def counting(pending: PendingStep) -> None:
        if pending.outputs:
            launched.append(operations_of(*pending.outputs, folder=tmp_path))
        launch(pending)

    monkeypatch.setattr(PendingStep, "launch", counting)
    for start in (5, 6):
        run(engine, *((name, start, 1) for name in names))
    monkeypatch.setenv(SWITCH, "0")
    run(engine, *((name, 7, 1) for name in names))
    _, fewer, plain = launched
    assert fewer["Cos"] == (0 if streams == 1 else 1)
    assert plain["Cos"] == 2 * 3  # queries and keys of three layers
    assert fewer.total() < 0.8 * plain.total()
    for name in names:
        engine.close(name)

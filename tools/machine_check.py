"""Measures what matters for Holdfast on this machine, above all on a Mac: steps, kernels,
durability, memory.

Run: `make mac-check` (`python -m tools.machine_check [--quick] [--panic-test]`). It takes about ten
minutes, prints one line per finding and saves all in a Markdown file. It uses fewer layers
without a GPU, and never more memory than `Sizes` allows. Only `--panic-test` can harm the machine:
`churn` repeats for fifteen minutes per kind of wiring what has made Macs panic
(ml-explore/mlx#3186).
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform as python_platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.machine import platform
from holdfast.worker.cpu.blas import prepare_blas

prepare_blas()  # before the first import of MLX

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from holdfast.files import sync_to_drive  # noqa: E402
from holdfast.worker.engine.token_sampling import nucleus_threshold  # noqa: E402
from holdfast.worker.kv.codec import to_bytes  # noqa: E402
from holdfast.worker.kv.live import Snapshot  # noqa: E402

IS_ON_CPU = mx.default_device() == mx.Device(mx.cpu)
DTYPE = mx.float32 if IS_ON_CPU else mx.bfloat16
QUERY_HEADS, KV_HEADS, HEAD_DIMENSION = 32, 8, 128  # of an 8B model
VOCABULARY = 151_936
SYSTEM_FIGURES = (
    "hw.memsize",
    "iogpu.rsrc_limit",
    "iogpu.wired_limit_mb",
    "kern.memorystatus_vm_pressure_level",
)
CHURN_SECONDS = 15 * 60
MOST_SECONDS = 3.0  # limit for repeating a measurement, which runs at least twice

_BYTES_PER_TOKEN = 2 * KV_HEADS * HEAD_DIMENSION * DTYPE.size

Finding = tuple[str, str]  # subject and figures
Arrays = tuple[mx.array, mx.array]


class Sizes:
    """The sizes of the measurements. quick: only enough to see that everything runs."""

    def __init__(self, *, quick: bool) -> None:
        self.layers = 2 if quick else 8 if IS_ON_CPU else 32
        self.most_bytes = (
            platform.working_set_bytes() or platform.report().memory.available_bytes
        ) // 3
        self.stream_tokens = 128 if quick else 2048
        # all arrays exist twice
        most_tokens = self.most_bytes // (2 * self.layers * _BYTES_PER_TOKEN)
        contexts = (256,) if quick else (4096, 32_768)
        streams = (1, 4) if quick else (1, 4, 8, 16)
        self.contexts = tuple(tokens for tokens in contexts if tokens <= most_tokens)
        self.streams = tuple(
            count for count in streams if count * self.stream_tokens <= most_tokens
        )
        self.rounds = 3 if quick else 20
        self.product = 256 if quick else 4096
        self.products = 2 if quick else 4 if IS_ON_CPU else 40
        self.donated_tokens = 512 if quick else 65_536
        self.chunk_contexts = (256,) if quick else (0, 16_384, 65_536)
        self.taken_bytes = (64 << 20) if quick else (2 << 30)


def findings(sizes: Sizes) -> Iterator[Finding]:
    """All measurements without risk."""
    yield from _about_the_machine()
    yield "round trip: evaluating almost nothing", f"{_least_ms(_round_trip, sizes):.3f} ms"
    for measure in (
        _parts_against_one_buffer,
        _streams,
        _block_bytes,
        _right_numbers,
        _top_p,
        _early_launch,
        _silence,
        _chunks,
        _sync_to_drive,
        _wiring,
        _killed_process,
    ):
        yield from _reporting_errors(measure, sizes)
        mx.clear_cache()


def _reporting_errors(
    measure: Callable[[Sizes], Iterator[Finding]], sizes: Sizes
) -> Iterator[Finding]:
    """The findings of one part. A failure is a finding too, and other parts still run."""
    try:
        yield from measure(sizes)
    except (
        Exception
    ) as error:  # even a bug in the check must not lose other results, which took minutes
        first_line = str(error).split("\n", 1)[0]
        yield (
            f"{measure.__name__.strip('_').replace('_', ' ')}",
            f"failed: {type(error).__name__}: {first_line}",
        )


def _about_the_machine() -> Iterator[Finding]:
    report = platform.report()
    yield (
        "system",
        f"{python_platform.platform()}, Python {python_platform.python_version()} "
        f"({python_platform.machine()})",
    )
    yield "MLX", f"{report.mlx_version}, {report.backend}, {report.device_name}"
    yield (
        "memory",
        f"{report.memory.total_bytes:,} bytes, {report.memory.available_bytes:,} available",
    )
    yield "working set", f"{report.memory.working_set_bytes:,} bytes"
    variables = sorted(
        name for name in os.environ if name.startswith(("MLX_", "OPENBLAS_", "OMP_", "VECLIB_"))
    )
    yield (
        "environment",
        ", ".join(f"{name}={os.environ[name]}" for name in variables) or "no variables for MLX",
    )
    for name in SYSTEM_FIGURES:
        yield f"sysctl {name}", _sysctl(name)


def _sysctl(name: str) -> str:
    tool = Path("/usr/sbin/sysctl")
    if python_platform.system() != "Darwin":
        return "macOS only"
    done = subprocess.run([tool, "-n", name], capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip()


def _least_ms(work: Callable[[], object], sizes: Sizes) -> float:
    best = float("inf")
    started = time.perf_counter()
    for done in range(sizes.rounds):
        began = time.perf_counter()
        if done >= 2 and began - started > MOST_SECONDS:
            break
        work()
        best = min(best, time.perf_counter() - began)
    return 1000 * best


def _round_trip() -> None:
    mx.eval(mx.ones((8,)) + 1)


def _random(*shape: int) -> mx.array:
    return mx.random.normal(shape).astype(DTYPE)


def _kv(tokens: int) -> Arrays:
    return _random(1, KV_HEADS, tokens, HEAD_DIMENSION), _random(
        1, KV_HEADS, tokens, HEAD_DIMENSION
    )


def _joined(first: Arrays, second: Arrays) -> Arrays:
    return mx.concatenate([first[0], second[0]], axis=2), mx.concatenate(
        [first[1], second[1]], axis=2
    )


def _attend(queries: mx.array, kv: Arrays) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, *kv, scale=HEAD_DIMENSION**-0.5)


def _parts_against_one_buffer(sizes: Sizes) -> Iterator[Finding]:
    """The cost of concatenating a shared prefix and a tail in every decode step, measured over all
    layers of a step.
    """
    for tokens in sizes.contexts:
        frozen = [_kv(tokens) for _ in range(sizes.layers)]
        tails = [_kv(64) for _ in range(sizes.layers)]
        whole = [_joined(*pair) for pair in zip(frozen, tails, strict=True)]
        queries = _random(1, QUERY_HEADS, 1, HEAD_DIMENSION)
        mx.eval(frozen, tails, whole, queries)

        def step(kv_of: Callable[[int], Arrays], queries: mx.array = queries) -> None:
            attended = queries
            for layer in range(sizes.layers):
                attended = _attend(attended, kv_of(layer))
            mx.eval(attended)

        one = _least_ms(lambda whole=whole: step(lambda layer: whole[layer]), sizes)  # type: ignore[misc]
        parted = _least_ms(
            lambda frozen=frozen, tails=tails: step(
                lambda layer: _joined(frozen[layer], tails[layer])
            ),  # type: ignore[misc]
            sizes,
        )
        what = (
            f"attention of {sizes.layers} layers over {tokens:,} tokens: one buffer, two concatenated in "
            "each step"
        )
        yield what, f"{one:.2f} ms, {parted:.2f} ms ({parted / one:.2f} times)"


def _streams(sizes: Sizes) -> Iterator[Finding]:
    """Attention of several streams: separate buffers compared with one padded batch."""
    tokens = sizes.stream_tokens
    for streams in sizes.streams:
        own = [[_kv(tokens) for _ in range(streams)] for _ in range(sizes.layers)]
        queries = _random(1, QUERY_HEADS, streams, HEAD_DIMENSION)
        mx.eval(own, queries)
        stacked = [
            (
                mx.concatenate([keys for keys, _ in layer]),
                mx.concatenate([values for _, values in layer]),
            )
            for layer in own
        ]
        batched = queries.swapaxes(0, 2)
        mx.eval(stacked, batched)

        def each_alone(own: list[list[Arrays]] = own, queries: mx.array = queries) -> None:
            attended = queries
            for layer in own:
                rows = [_attend(attended[:, :, row : row + 1], kv) for row, kv in enumerate(layer)]
                attended = mx.concatenate(rows, axis=2)
            mx.eval(attended)

        def padded(stacked: list[Arrays] = stacked, batched: mx.array = batched) -> None:
            attended = batched
            for kv in stacked:
                attended = _attend(attended, kv)
            mx.eval(attended)

        what = (
            f"attention of {streams} streams, {sizes.layers} layers, {tokens:,} tokens: one by "
            "one, one padded batch"
        )
        yield what, f"{_least_ms(each_alone, sizes):.2f} ms, {_least_ms(padded, sizes):.2f} ms"


def _block_bytes(sizes: Sizes) -> Iterator[Finding]:
    arrays = tuple(_random(1, KV_HEADS, 256, HEAD_DIMENSION) for _ in range(72))
    mx.eval(arrays)
    block = Snapshot(start=0, tokens=256, arrays=arrays)

    def one_by_one() -> None:
        for array in arrays:
            np.array(mx.flatten(array).view(mx.uint8), copy=False)

    together = _least_ms(lambda: to_bytes(block), sizes)
    yield (
        "bytes of a block of 72 arrays: one by one, together",
        f"{_least_ms(one_by_one, sizes):.2f} ms, {together:.2f} ms",
    )


def _right_numbers(sizes: Sizes) -> Iterator[Finding]:
    """Kernels that gave wrong results in some version of MLX on some device."""
    weights = _random(4, 64, 256)
    codes, scales, biases = mx.quantize(weights, group_size=64, bits=4)
    cut = mx.dequantize(codes[:, :40], scales[:, :40], biases[:, :40], group_size=64, bits=4)
    whole = mx.dequantize(codes, scales, biases, group_size=64, bits=4)[:, :40]
    yield (
        "dequantizing a slice: largest error (0 is right)",
        f"{mx.abs(cut - whole).max().item():.3g}",
    )
    for dimension in (HEAD_DIMENSION, 256):
        for tokens in (64, 1500, 5000):
            yield _attention_error(dimension, tokens)
    weights = _random(2048, 2048)
    codes, scales, biases = mx.quantize(weights, group_size=64, bits=4)
    rows = _random(64 if sizes.layers == 2 else 1024, 1, 2048)

    def product(of: mx.array) -> mx.array:
        return mx.quantized_matmul(of, codes, scales, biases, group_size=64, bits=4).astype(
            mx.float32
        )

    alone = mx.concatenate([product(rows[row : row + 1])[0] for row in range(16)])
    together = product(rows)[:16, 0]
    error = (mx.abs(together - alone).max() / mx.abs(alone).max()).item()
    yield f"packed product of {rows.shape[0]} rows against one row: relative error", f"{error:.1e}"


def _attention_error(dimension: int, tokens: int) -> Finding:
    keys, values = _random(1, 2, tokens, dimension), _random(1, 2, tokens, dimension)
    queries = _random(1, 8, 1, dimension)
    fused = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=dimension**-0.5
    ).astype(mx.float32)
    wide, wide_keys, wide_values = (array.astype(mx.float32) for array in (queries, keys, values))
    grouped = wide.reshape(1, 2, 4, dimension)
    weights = mx.softmax(grouped @ wide_keys.swapaxes(-1, -2) * dimension**-0.5, axis=-1)
    exact = (weights @ wide_values).reshape(fused.shape)
    what = f"attention over {tokens:,} keys of dimension {dimension} against float32: largest error"
    return what, f"{mx.abs(fused - exact).max().item():.4f}"


def _top_p(sizes: Sizes) -> Iterator[Finding]:
    logits = mx.random.normal((8, VOCABULARY))
    weights = mx.exp(logits - logits.max(axis=-1, keepdims=True))
    top_p = mx.full((8, 1), 0.95)
    mx.eval(weights, top_p)
    whole = _least_ms(lambda: mx.eval(nucleus_threshold(weights, top_p=top_p)), sizes)
    sort = _least_ms(lambda: mx.eval(mx.sort(weights)), sizes)
    yield "top-p of 8 rows, and its sort", f"{whole:.2f} ms, {sort:.2f} ms"


def _early_launch(sizes: Sizes) -> Iterator[Finding]:
    """Whether MLX copies the KV instead of updating it in place if a step is launched early."""
    keys, values = _kv(sizes.donated_tokens)
    queries, one = (
        _random(1, QUERY_HEADS, 1, HEAD_DIMENSION),
        mx.ones((1, KV_HEADS, 1, HEAD_DIMENSION), DTYPE),
    )
    mx.eval(keys, values, queries, one)
    for waits in (True, False):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for position in range(20):
            keys[:, :, position : position + 1] = one
            mx.async_eval(_attend(queries, (keys, values)), keys)  # type: ignore[no-untyped-call]
            if waits:
                mx.synchronize()
        mx.synchronize()
        extra = (mx.get_peak_memory() - before) >> 20
        what = (
            f"a step launched {'after' if waits else 'before'} the last one has ended: extra memory"
        )
        yield what, f"{extra} MiB (0: written in place)"


def _silence(sizes: Sizes) -> Iterator[Finding]:
    """Whether other threads run while one waits for the device: a worker that is silent for 7 s
    counts as hung.
    """
    gaps: list[float] = []
    stop = threading.Event()

    def beat() -> None:
        last = time.perf_counter()
        while not stop.wait(0.01):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=beat)
    thread.start()
    matrix = mx.random.normal((sizes.product, sizes.product))
    product = matrix
    for _ in range(sizes.products):
        product = (product @ matrix) * 1e-4
    mx.async_eval(product)  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    mx.synchronize()
    took = time.perf_counter() - began
    stop.set()
    thread.join()
    yield (
        "waiting for the device: time, longest silence of another thread",
        f"{took:.2f} s, {max(gaps, default=0.0):.2f} s",
    )


def _chunks(sizes: Sizes) -> Iterator[Finding]:
    """Attention of one layer for a chunk of a prompt: macOS's GPU watchdog kills kernels that run
    for seconds.
    """
    for start in sizes.chunk_contexts:
        for tokens in (256, 2048) if sizes.layers > 2 else (64,):
            what = f"attention of one layer, {tokens:,} tokens of a prompt from token {start:,} on"
            score_bytes = QUERY_HEADS * tokens * (start + tokens) * DTYPE.size
            # without a fused kernel, all scores are in memory, some twice
            if IS_ON_CPU and 3 * score_bytes > sizes.most_bytes:
                yield what, f"left out: the scores alone take {score_bytes >> 20:,} MiB on a CPU"
                continue
            queries = _random(1, QUERY_HEADS, tokens, HEAD_DIMENSION)
            kv = _kv(start + tokens)
            mx.eval(queries, kv)

            def attend(queries: mx.array = queries, kv: Arrays = kv) -> None:
                mx.eval(
                    mx.fast.scaled_dot_product_attention(
                        queries, *kv, scale=HEAD_DIMENSION**-0.5, mask="causal"
                    )
                )

            best = float("inf")
            for _ in range(2):
                began = time.perf_counter()
                attend()
                best = min(best, time.perf_counter() - began)
            yield what, f"{1000 * best:.1f} ms"


def _sync_to_drive(sizes: Sizes) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as folder:

        def written(sync: Callable[[int], None]) -> float:
            best = float("inf")
            for number in range(5):
                with (Path(folder) / f"block-{number}").open("wb") as file:
                    file.write(os.urandom(1 << 20))
                    file.flush()
                    began = time.perf_counter()
                    sync(file.fileno())
                    best = min(best, time.perf_counter() - began)
            return 1000 * best

        figures = f"{written(os.fsync):.2f} ms, {written(sync_to_drive):.2f} ms"
        yield "syncing 1 MiB: fsync, down to the drive", figures


def _wiring(sizes: Sizes) -> Iterator[Finding]:
    if not mx.metal.is_available():
        yield "wiring memory and unwiring it", "needs Metal"
        return
    held = mx.zeros((sizes.taken_bytes // 4,))
    mx.eval(held)
    began = time.perf_counter()
    platform.wire(sizes.taken_bytes)
    wired_at = time.perf_counter()
    platform.wire(0)
    done_at = time.perf_counter()
    what = f"wiring {sizes.taken_bytes >> 20:,} MiB, unwiring them"
    yield what, f"{1000 * (wired_at - began):.1f} ms, {1000 * (done_at - wired_at):.1f} ms"
    del held


def _killed_process(sizes: Sizes) -> Iterator[Finding]:
    """How soon a killed worker's memory is available again."""
    import psutil

    code = (
        f"import mlx.core as mx; a = mx.ones(({sizes.taken_bytes // 4},)); mx.eval(a); "
        "print('taken', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        before = psutil.virtual_memory().available
        child.kill()
        child.wait()
        began = time.perf_counter()
        back = before + sizes.taken_bytes * 3 // 4
        while psutil.virtual_memory().available < back and time.perf_counter() - began < 10:
            time.sleep(0.005)
        seconds = time.perf_counter() - began
    gained = psutil.virtual_memory().available - before
    what = f"time until the {sizes.taken_bytes >> 20:,} MiB of a killed process are available"
    yield what, f"{seconds:.2f} s ({gained >> 20:,} MiB)"


def churn(wired: str) -> Iterator[Finding]:
    """Two processes that constantly allocate and free KV, with one kind of wiring."""
    command = [
        sys.executable,
        "-m",
        "tools.machine_check",
        "--churn",
        wired,
    ]
    children = [subprocess.Popen(command) for _ in range(2)]
    ends = [child.wait() for child in children]
    yield (
        f"churn for {CHURN_SECONDS // 60} min, wired: {wired}",
        f"both processes ended, codes {ends}",
    )


def _churn_alone(wired: str) -> None:
    working_set = platform.working_set_bytes()
    weights = mx.zeros((working_set // 3 // 4,))
    mx.eval(weights)
    platform.wire({"all": working_set, "weights": weights.nbytes, "none": 0}[wired])
    ends_at = time.monotonic() + CHURN_SECONDS
    draw = random.Random(os.getpid())
    while time.monotonic() < ends_at:
        held = [_kv(draw.randrange(1000, 16_000)) for _ in range(draw.randrange(1, 36))]
        queries = _random(1, QUERY_HEADS, 64, HEAD_DIMENSION)
        mx.eval([_attend(queries, kv) for kv in held])


def save(found: Iterator[Finding], file: Path) -> None:
    """Print findings as they arrive and save them in a new file."""
    with file.open("w", encoding="utf-8") as saved:
        saved.write("# Machine check of Holdfast\n\n| what | figures |\n|---|---|\n")
        for what, figures in found:
            print(f"{what}: {figures}")
            saved.write(f"| {what} | {figures} |\n")
            saved.flush()  # findings must survive a panic


def main() -> None:
    parser = argparse.ArgumentParser(prog="machine_check")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs")
    parser.add_argument(
        "--panic-test",
        action="store_true",
        help="then run a test for 45 minutes that may make Macs panic; save your work first",
    )
    parser.add_argument("--churn", choices=("all", "weights", "none"), help=argparse.SUPPRESS)
    try:
        _run(parser.parse_args())
    finally:
        mx.clear_streams()


def _run(options: argparse.Namespace) -> None:
    if options.churn:
        _churn_alone(options.churn)
        return
    found = findings(Sizes(quick=options.quick))
    if options.panic_test and mx.metal.is_available():
        ways = ("none", "weights", "all")
        found = itertools.chain(found, *map(churn, ways))
    file = Path(f"holdfast-machine-check-{time.strftime('%Y-%m-%d-%H%M%S')}.md")
    save(found, file)
    print(f"saved in {file}; please attach it to an issue")


if __name__ == "__main__":
    main()

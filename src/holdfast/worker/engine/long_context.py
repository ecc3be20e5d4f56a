"""Checks, when a model is loaded, the attention kernels that only long contexts use.

The probe compares layouts over some 30 tokens. From 1,024 or 4,096 keys on, and for chunks of many
queries, a GPU runs other kernels, and some versions of MLX were silently wrong exactly there
(ml-explore/mlx#3586, #3797). So the model's own shapes of attention are tried once over random
keys, and a few queries are computed again in float32 by plain products. Each of these attends
mostly to one key, and these keys are spread over the whole context, those at the boundaries of
kernels included: a key that is left out or taken for another one shows as an error of the size of a
value.

Cost for 32 heads of 128 and 8 of keys, in bf16: 70 MB for a moment and 110 GFLOP, some 10 to 50 ms
on a GPU (calculated). Where MLX has no fused kernel for a head dimension, the scores take 330 MB
more. Layers of the same shape are tried once.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from holdfast.worker.engine.attention_seam import AttentionShape, heard_shapes
from holdfast.worker.engine.layouts import own_caches

KEYS = (1_500, 5_000)  # beyond 1,024 and 4,096
QUERIES = (1, 1_024)  # a decoding step, a chunk of a prompt
BOUNDARIES = (0, 1_023, 1_024, 4_095, 4_096)
COMPARED_QUERIES = 4
# of the largest value, by the bytes of a number; TF32 shows in float32
ALLOWED_ERROR = {2: 0.05, 4: 0.01}


def warnings_about_kernels(model: Any, *, force: bool = False) -> tuple[str, ...]:
    """What a user has to know of this model's attention over long contexts; nothing if it is right.

    Device thread only.

    force: on a CPU too, which has no kernels of its own for long contexts.
    """
    if mx.default_device() == mx.Device(mx.cpu) and not force:
        return ()
    with heard_shapes() as shapes:
        mx.eval(model(mx.array([[0]]), cache=own_caches(model)))
    faults = [
        fault
        for shape in sorted(shapes)
        for keys in KEYS
        for queries in QUERIES
        for fault in _faults(shape, keys, queries)
    ]
    mx.clear_cache()
    if not faults:
        return ()
    return (
        "answers after long prompts may be wrong on this device. Why: compared with float32, "
        f"{'; '.join(faults)}. What to do: "
        "install another version of mlx, or run the model with --device cpu",
    )


def _faults(shape: AttentionShape, keys: int, queries: int) -> list[str]:
    error = attention_error(shape, keys=keys, queries=queries)
    if error <= ALLOWED_ERROR[shape.dtype_bytes]:
        return []
    dimensions = f"{shape.heads} heads, {shape.kv_heads} of keys, dimension {shape.head_dimension}"
    count = "1 query" if queries == 1 else f"{queries:,} queries"
    return [
        f"attention of {count} over {keys:,} keys ({dimensions}) is off by {error:.2f} of the "
        "largest value"
    ]


def attention_error(shape: AttentionShape, *, keys: int, queries: int) -> float:
    """Largest error of the fused kernel against float32, relative to the largest exact value."""
    dtype = mx.bfloat16 if shape.dtype_bytes == 2 else mx.float32
    size = (1, shape.kv_heads, keys, shape.head_dimension)
    held = mx.random.normal(size, key=mx.random.key(0)).astype(dtype)
    values = mx.random.normal(size, key=mx.random.key(1)).astype(dtype)
    compared = min(queries, COMPARED_QUERIES)
    at_once = shape.heads * compared
    wanted = _wanted_keys(at_once, seen=keys - compared + 1)
    errors = []
    for start in range(0, len(wanted), at_once):
        asked = _queries(shape, held, wanted[start : start + at_once]).astype(dtype)
        chunk = mx.tile(asked, (1, 1, -(-queries // compared), 1))[:, :, -queries:]
        mask = "causal" if queries > 1 else None
        fused = mx.fast.scaled_dot_product_attention(
            chunk, held, values, scale=shape.scale, mask=mask
        )
        exact = _exact(asked, held, values, scale=shape.scale)
        difference = mx.abs(fused[:, :, -compared:].astype(mx.float32) - exact).max()
        errors.append(float(difference / mx.abs(exact).max()))
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def _wanted_keys(at_once: int, *, seen: int) -> list[int]:
    """Which key each query attends to: those at boundaries and the last one, and as many spread
    over all that are seen.
    """
    special = [key for key in (*BOUNDARIES, seen - 1) if key < seen]
    count = -(-2 * len(special) // at_once) * at_once
    spread = [at * seen // count for at in range(count)]
    return [special[at // 2 % len(special)] if at % 2 else key for at, key in enumerate(spread)]


def _queries(shape: AttentionShape, held: mx.array, wanted: list[int]) -> mx.array:
    """Queries that give about half of their attention to one key each. [1, heads, queries,
    head_dim]
    """
    compared = len(wanted) // shape.heads
    group = shape.heads // shape.kv_heads
    heads = mx.array([at // compared // group for at in range(len(wanted))])
    keys = held[0, heads, mx.array(wanted)].astype(mx.float32)
    scores = math.log(held.shape[2]) / shape.scale
    rows = keys * (scores / (keys * keys).sum(axis=-1, keepdims=True))
    return rows.reshape(1, shape.heads, compared, shape.head_dimension)


def _exact(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float) -> mx.array:
    """The same by plain products in float32; the queries are the last ones of a causal chunk."""
    _, heads, count, size = queries.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    grouped = queries.astype(mx.float32).reshape(1, kv_heads, -1, size)
    ends = mx.tile(mx.arange(tokens - count, tokens), heads // kv_heads)[:, None]
    with mx.stream(mx.cpu):  # whose products are not those of the GPU
        scores = (grouped * scale) @ keys.astype(mx.float32).swapaxes(-1, -2)
        seen = mx.where(mx.arange(tokens) <= ends, scores, -mx.inf)
        attended = mx.softmax(seen, axis=-1) @ values.astype(mx.float32)
    return attended.reshape(queries.shape)

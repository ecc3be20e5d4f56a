"""Measures the minimum that restoring can take, with mlx-lm's model and a file of KV bytes, in a
separate process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from holdfast.worker.engine.layouts import mlx_lm_caches
from holdfast_bench.engine_steps import CHUNK_TOKENS, loaded_model, random_tokens
from holdfast_bench.restore import LeastJob, LeastTimes


def prepared(job: str) -> Callable[[str], LeastTimes]:
    """Prefill a context and write its KV; returns what restores it."""
    context = _Context(msgspec.json.decode(job, type=LeastJob))
    for _ in range(2):  # the first pass with a shape takes longer
        context.times()
    return lambda line: context.times()


class _Context:
    """A prefilled context whose KV is in a file, by layer, keys before values."""

    def __init__(self, job: LeastJob) -> None:
        loaded = loaded_model(job.folder)
        self._model, self._file = loaded.model, Path(job.file)
        *tokens, last = random_tokens(job.context_tokens, loaded, seed=job.context_tokens)
        self._last = mx.array([[last]])
        caches = mlx_lm_caches(self._model)
        for first in range(0, len(tokens), CHUNK_TOKENS):
            chunk = mx.array([tokens[first : first + CHUNK_TOKENS]])
            mx.eval(self._model(chunk, cache=caches))
        self._shapes = []
        with self._file.open("wb") as file:
            for cache in caches:
                for array in (cache.keys, cache.values):
                    used = array[..., : cache.offset, :]
                    # numpy does not know bfloat16
                    content = np.array(mx.contiguous(used).view(mx.uint8))
                    self._shapes.append((content.shape, array.dtype))
                    file.write(content.tobytes())
        self._expected = self._drawn(caches)

    def times(self) -> LeastTimes:
        """Read the file, copy it into fresh caches, run the model over the last token."""
        began = time.perf_counter()
        content = self._file.read_bytes()
        was_read = time.perf_counter()
        caches, arrays, at = mlx_lm_caches(self._model), list[mx.array](), 0
        for shape, dtype in self._shapes:
            length = int(np.prod(shape))
            part = np.frombuffer(content, dtype=np.uint8, count=length, offset=at).reshape(shape)
            arrays.append(mx.array(part).view(dtype))
            at += length
        for number, cache in enumerate(caches):
            cache.update_and_fetch(arrays[2 * number], arrays[2 * number + 1])
        mx.eval([(cache.keys, cache.values) for cache in caches])
        was_copied = time.perf_counter()
        drawn = self._drawn(caches)
        ended = time.perf_counter()
        assert drawn == self._expected, "the copied context is another one"
        return LeastTimes(
            read_seconds=was_read - began,
            copy_seconds=was_copied - was_read,
            forward_seconds=ended - was_copied,
            kv_bytes=len(content),
        )

    def _drawn(self, caches: list[Any]) -> Any:
        return mx.argmax(self._model(self._last, cache=caches)[:, -1], axis=-1).item()

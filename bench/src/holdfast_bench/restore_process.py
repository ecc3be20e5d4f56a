"""Measures the minimum that restoring can take, with mlx-lm's model and a file of KV bytes.

Imports MLX.
"""

from __future__ import annotations

import importlib
import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from holdfast.config import ModelSettings
from holdfast.worker.cpu.blas import prepare_blas
from holdfast_bench.restore_run import LeastJob, LeastTimes

_CHUNK_TOKENS = 512


class _Context:
    """A prefilled context whose KV is in a file, by layer, keys before values."""

    def __init__(self, job: LeastJob) -> None:
        prepare_blas(job.threads)  # before the first import of MLX
        self._mx: Any = importlib.import_module("mlx.core")
        importlib.import_module("holdfast.worker.loop.device").use_device("auto")
        load = importlib.import_module("holdfast.worker.engine.load")
        self._layouts = importlib.import_module("holdfast.worker.engine.layouts")
        loaded = load.load_model(
            Path(job.folder), ModelSettings(), progress=lambda stage, fraction: None
        )
        self._model, self._file = loaded.model, Path(job.file)
        source = random.Random(job.context_tokens)
        tokens = [source.randrange(loaded.vocab_size) for _ in range(job.context_tokens)]
        self._last = self._mx.array([tokens[-1:]])
        caches = self._caches()
        for first in range(0, len(tokens) - 1, _CHUNK_TOKENS):
            self._mx.eval(
                self._model(
                    self._mx.array([tokens[first : min(first + _CHUNK_TOKENS, len(tokens) - 1)]]),
                    cache=caches,
                )
            )
        self._shapes = []
        with self._file.open("wb") as file:
            for cache in caches:
                for array in (
                    cache.keys[..., : cache.offset, :],
                    cache.values[..., : cache.offset, :],
                ):
                    # numpy does not know bfloat16
                    content = np.array(self._mx.contiguous(array).view(self._mx.uint8))
                    self._shapes.append((content.shape, array.dtype))
                    file.write(content.tobytes())
        self._expected = self._drawn(caches)

    def times(self) -> LeastTimes:
        """Read the file, copy it into fresh caches, run the model over the last token."""
        began = time.perf_counter()
        content = self._file.read_bytes()
        was_read = time.perf_counter()
        caches, arrays, at = self._caches(), [], 0
        for shape, dtype in self._shapes:
            length = int(np.prod(shape))
            part = np.frombuffer(content, dtype=np.uint8, count=length, offset=at).reshape(shape)
            arrays.append(self._mx.array(part).view(dtype))
            at += length
        for number, cache in enumerate(caches):
            cache.update_and_fetch(arrays[2 * number], arrays[2 * number + 1])
        self._mx.eval([(cache.keys, cache.values) for cache in caches])
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

    def close(self) -> None:
        """Release the device."""
        self._mx.clear_streams()

    def _caches(self) -> list[Any]:
        return list(self._layouts.mlx_lm_caches(self._model))

    def _drawn(self, caches: list[Any]) -> int:
        return int(self._mx.argmax(self._model(self._last, cache=caches)[:, -1], axis=-1).item())


def _main() -> None:
    context = _Context(msgspec.json.decode(sys.argv[1], type=LeastJob))
    for _ in range(2):  # the first pass with a shape takes longer
        context.times()
    _say("ready")
    for _ in sys.stdin:
        _say(msgspec.json.encode(context.times()).decode())
    context.close()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main()

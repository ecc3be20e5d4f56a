"""Runs llama.cpp's server, from the package `xllamacpp`: `python -m holdfast_bench.llama_cpp_server
MODEL_FOLDER --port PORT`.

It uses llama.cpp's defaults, except for eight slots that share the model's context. By default,
keys, values and attention are float16. With --exact, they are float32, so that answers can be
compared with those of other servers. With --ngrams, n-grams of earlier text are drafts for
speculative decoding.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
from pathlib import Path

from holdfast_bench.models import ensure_gguf

_SLOTS = 8  # concurrent streams; further ones wait


def _serve(model: Path, port: int, *, is_exact: bool, uses_ngrams: bool) -> None:
    file = ensure_gguf(model)
    library = importlib.import_module("xllamacpp")
    settings = library.CommonParams()
    settings.model.path, settings.port = str(file), port
    settings.n_parallel, settings.kv_unified = _SLOTS, True
    if is_exact:
        settings.cache_type_k = settings.cache_type_v = library.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if uses_ngrams:
        kinds = library.common_speculative_type
        settings.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = int(threads)
    # it serves from its own threads until this object is deleted
    server = library.Server(settings)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--ngrams", action="store_true")
    arguments = parser.parse_args()
    model, port = arguments.model, arguments.port
    _serve(model, port, is_exact=arguments.exact, uses_ngrams=arguments.ngrams)

"""The backend for CPUs: the one class through which the engine uses this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from holdfast.worker.cpu import (
    fast_on_cpu,
    host_attention,
    host_decoder,
    host_decoding,
    host_sampling,
    kv_codes,
    packed_layers,
)
from holdfast.worker.engine.backend import (
    AttentionSpan,
    Backend,
    SampleRows,
    SamplingKind,
    Scores,
    StepOperations,
)
from holdfast.worker.kv.layer import LayerKV


class CpuBackend(Backend):
    """Computes with numpy and C what MLX computes slowly on a CPU, above all on Linux. A method that
    returns None leaves its work to MLX.
    """

    composes_attention = True
    fuses_operations = False  # that takes seconds and needs a C++ compiler
    runs_ahead = False  # launching takes as long as the step: MLX queues only a few tasks
    prefers_float32 = True
    step_tokens = 512
    dequantize = staticmethod(kv_codes.dequantize)

    def __init__(self, *, host_scores: int | None = None, decode_scores: int | None = None) -> None:
        """host_scores: the number of attention scores (products of a query and a key) from which
        numpy computes attention. decode_scores: the number from which the C kernel computes decode
        steps. None: the number from which they are faster than MLX.
        """
        self._host_scores = host_scores
        self._decode_scores = decode_scores

    def reads_codes(self) -> bool:
        return False

    def attend_rows(
        self,
        layers: Sequence[LayerKV],
        seen_tokens: Sequence[int],
        queries: mx.array,
        *,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attention of one decoding query per sequence, over its last `seen_tokens` positions."""
        least_scores = self._decode_scores
        if least_scores is None:
            least_scores = host_decoding.SCORES_WORTH_IT
        if not host_decoding.pays(layers, seen_tokens, queries, least_scores=least_scores):
            return None
        return host_decoding.attend(layers, seen_tokens, queries, sinks=sinks)

    def attend_spans(
        self, spans: Sequence[AttentionSpan], *, sinks: mx.array | None
    ) -> list[mx.array] | None:
        """Causal attention of each span of new tokens over its own keys."""
        least_scores = self._host_scores
        if least_scores is None:
            least_scores = host_attention.SCORES_WORTH_IT
        if not host_attention.pays(spans, host_scores=least_scores):
            return None
        return host_attention.attend(spans, sinks=sinks)

    def attend_one(self, queries: mx.array, parts: Sequence[tuple[mx.array, mx.array]]) -> mx.array:
        return host_attention.attend_one(queries, parts)

    def describe_attention(self, model: Module) -> str:
        return host_decoder.attention_of(model)

    def eager(self) -> Backend:
        return CpuBackend(host_scores=0, decode_scores=0)

    def operations(self, *, transposes_once: bool) -> StepOperations:
        return fast_on_cpu.Rotations(transposes_once=transposes_once)

    def whole_steps(self, model: Module) -> Callable[[Sequence[Any]], Any] | None:
        decoder = host_decoder.decoder_of(model)
        return None if decoder is None else decoder.forward

    def sampler_of(self, kind: SamplingKind, *, vocab_size: int) -> SampleRows | None:
        pays = host_sampling.sampling_pays(kind, vocab_size=vocab_size)
        return host_sampling.sample_on_host if pays else None

    def score(self, logits: mx.array, token_ids: mx.array, *, top_logprobs: int) -> Scores | None:
        if not host_sampling.scoring_pays(vocab_size=logits.shape[-1]):
            return None
        return host_sampling.score_on_host(logits, token_ids, top_logprobs=top_logprobs)

    def stored_refused(self) -> str:
        return packed_layers.unavailable()

    def keeps_stored(self, module: Module) -> bool:
        return packed_layers.supports(module)

    def keep_stored(self, module: Module, dtype: mx.Dtype) -> None:
        packed_layers.keep_stored(module, dtype)

    def is_kept(self, module: Module) -> bool:
        return packed_layers.is_kept(module)

    def prepare(self, model: Module, dtype: mx.Dtype) -> None:
        host_decoder.attach(model, dtype)

"""What KV memory a sequence of the loaded model takes, measured on one that is run. Device thread only."""

from __future__ import annotations

import mlx.core as mx

from holdfast.engine.layouts import Runner
from holdfast.engine.plan import Span
from holdfast.engine.sampling import row_state
from holdfast.engine.sequence import Sequence, SequenceSpan
from holdfast.messages import SamplingParams, SequenceRequest
from holdfast.scheduler.decision import SequenceCosts

_TOKENS = 2


def measure_costs(runner: Runner, *, vocab_size: int) -> SequenceCosts:
    """Read two tokens and look at the state that they leave."""
    prompt = tuple(token % vocab_size for token in range(_TOKENS))
    request = SequenceRequest(request_id="costs", prompt_token_ids=prompt, max_tokens=1, sampling=SamplingParams(temperature=0.0))
    sequence = Sequence(
        request=request,
        known=mx.array(prompt, dtype=mx.int32),
        known_tokens=_TOKENS,
        layers=runner.fresh_layers(),
        sampler=row_state(request, generated=(), vocab_size=vocab_size),
    )
    reserved = SequenceCosts(kv_bytes_per_token=0, fixed_bytes_per_sequence=0).reserve_step_tokens
    sequence.reserve(reserved)
    logits = runner.forward([SequenceSpan(sequence, Span(request_id="costs", start=0, tokens=_TOKENS, draws=True))])
    mx.eval([logits, *sequence.arrays()])
    return SequenceCosts(
        kv_bytes_per_token=sum(layer.bytes_per_token() for layer in sequence.layers),
        fixed_bytes_per_sequence=sum(layer.fixed_bytes() for layer in sequence.layers),
    )

"""A request for embeddings → sequences that are only read, and the vectors of what came of them."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

from holdfast.errors import InvalidRequest, NoEmbeddings, PromptTooLong
from holdfast.front.prompt.limits import check_token_ids
from holdfast.front.prompt.prepare import MOST_CHARACTERS_PER_TOKEN, prompt_text, prompt_tokens
from holdfast.front.prompt.token_memory import TokenMemory
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import Finished, ModelInfo
from holdfast.wire.output import Embedding
from holdfast.wire.requests import (
    EmbeddingRequest,
    GenerationRequest,
    Pooling,
    SamplingParams,
    TokenIds,
)

READ_ONLY = SamplingParams(temperature=0.0, seed=0)


def embedding_sequences(
    request: EmbeddingRequest, bundle: TokenizerBundle, *, info: ModelInfo
) -> tuple[SequenceRequest, ...]:
    """A sequence per input. May take long: not for an event loop.

    Raises InvalidRequest naming what is wrong with which input, PromptTooLong, and NoEmbeddings.
    """
    if not info.embedding_dimensions:
        raise NoEmbeddings
    if request.dimensions is not None and not 1 <= request.dimensions <= info.embedding_dimensions:
        reason = (
            f"dimensions must be 1 to {info.embedding_dimensions} with this model, got "
            f"{request.dimensions}"
        )
        raise InvalidRequest(reason, field="dimensions")
    pooling = _pooling(request, bundle)
    # thousands of texts, each of them once, push nothing out
    bundle = replace(bundle, token_memory=TokenMemory(most_bytes=0))
    return tuple(
        SequenceRequest(
            request_id=f"{request.request_id}/{place}",
            prompt_token_ids=_token_ids(request, place, bundle, info=info),
            max_tokens=0,
            sampling=READ_ONLY,
            pooling=pooling,
            is_kept=False,  # of a text that stands for itself nothing is gone on from
            tenant=request.tenant,
            service=request.service,
        )
        for place in range(len(request.inputs))
    )


def embedding_of(finished: Finished, *, dimensions: int | None) -> Embedding:
    """The vector of an input that was read, cut to its first `dimensions` and brought to length 1
    again; of zeros it stays so.
    """
    vector = finished.embedding
    if dimensions is not None:
        values = array("f", vector)[:dimensions]
        length = math.hypot(*values)
        vector = array("f", [value / length for value in values] if length else values).tobytes()
    return Embedding(
        vector=vector,
        prompt_tokens=finished.prompt_tokens,
        timings=finished.timings,
        memory=finished.memory,
    )


def _pooling(request: EmbeddingRequest, bundle: TokenizerBundle) -> Pooling:
    """What is asked for; else what the model's folder names; else what its tokenizer lets one
    expect.

    A tokenizer that ends every text with a token of its own has one for the model to gather in what
    was said.
    """
    own = bundle.own_pooling
    if request.pooling is None and own.unserved:
        reason = (
            f"as this model was trained, {own.unserved}; if you want something else of it, ask for "
            "`pooling` mean or last"
        )
        raise InvalidRequest(reason, field="pooling")
    return request.pooling or own.pooling or ("last" if bundle.tokenizer.ends_texts else "mean")


def _token_ids(
    request: EmbeddingRequest, place: int, bundle: TokenizerBundle, *, info: ModelInfo
) -> TokenIds:
    given, limit = request.inputs[place], info.context_tokens
    field = request.field_of(place)
    if request.truncates:
        given = (
            given[: limit * MOST_CHARACTERS_PER_TOKEN] if isinstance(given, str) else given[:limit]
        )
    one = GenerationRequest(request_id="", model=request.model, prompt=given, prompt_field=field)
    token_ids = prompt_tokens(one, bundle, prompt_text(one, bundle, info=info), info=info).token_ids
    if len(token_ids) > limit:
        if not request.truncates:
            raise PromptTooLong(prompt_tokens=len(token_ids), context_tokens=limit, field=field)
        ending = (
            token_ids[-1:] if bundle.tokenizer.ends_texts and isinstance(given, str) else TokenIds()
        )
        token_ids = token_ids[: limit - len(ending)] + ending
    check_token_ids(token_ids, vocab_size=info.vocab_size, field=field)
    return token_ids

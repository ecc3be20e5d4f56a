from __future__ import annotations

import math
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tokenizers import processors

from holdfast.errors import InvalidRequest, NoEmbeddings, PromptTooLong
from holdfast.front.prompt.embed_and_rank import embedding_of, embedding_sequences
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.request import EmbeddingRequest
from holdfast.models.sentence_modules import OwnPooling
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import Finished, FinishReason
from holdfast.wire.requests import TokenIds
from tests.fakes import toy_tokenizers
from tests.fakes.scripted_client import model_info

INFO = structs.replace(model_info(context_tokens=8), embedding_dimensions=64)
BUNDLE = TokenizerBundle(
    tokenizer=Tokenizer(toy_tokenizers.byte_level(), config={}),
    template=None,
    generation_defaults={},
)


def ending_each_text() -> TokenizerBundle:
    """A tokenizer that appends a token to every text, like Qwen3-Embedding's."""
    backend = toy_tokenizers.byte_level()
    end = "<|endoftext|>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, backend.token_to_id(end))]
    )
    return replace(BUNDLE, tokenizer=Tokenizer(backend, config={}))


def sequences(
    *inputs: Any, bundle: TokenizerBundle = BUNDLE, info: Any = INFO, **options: Any
) -> tuple[SequenceRequest, ...]:
    request = EmbeddingRequest(request_id="r", model="m", inputs=inputs, **options)
    return embedding_sequences(request, bundle, info=info)


def test_each_input_is_a_prefill_only_sequence() -> None:
    text, ids = sequences("hello", (1, 2))
    assert text.prompt_token_ids == TokenIds.of(
        BUNDLE.tokenizer.encode("hello", add_special_tokens=True)
    )
    assert ids.prompt_token_ids == TokenIds.of((1, 2))
    assert (text.max_tokens, text.is_kept, text.pooling, text.request_id, ids.request_id) == (
        0,
        False,
        "mean",
        "r/0",
        "r/1",
    )


def test_pooling_comes_from_the_request_the_folder_or_the_tokenizer() -> None:
    last, ends = replace(BUNDLE, own_pooling=OwnPooling(pooling="last")), ending_each_text()
    assert sequences("a", bundle=last, pooling="mean")[0].pooling == "mean"
    assert sequences("a", bundle=last)[0].pooling == "last"
    assert sequences("a", bundle=ends)[0].pooling == "last"
    assert (
        sequences("a", bundle=replace(ends, own_pooling=OwnPooling(pooling="mean")))[0].pooling
        == "mean"
    )
    other = replace(BUNDLE, own_pooling=OwnPooling(unserved="its vectors go elsewhere"))
    assert sequences("a", bundle=other, pooling="last")[0].pooling == "last"
    with pytest.raises(InvalidRequest, match="go elsewhere") as refused:
        sequences("a", bundle=other)
    assert refused.value.field == "pooling"


@pytest.mark.parametrize(
    "too_long", ["the " * 40, "x" * 100_000, tuple(range(9))], ids=["words", "a wall", "ids"]
)
def test_a_long_input_is_refused_by_position_or_cut(too_long: Any) -> None:
    with pytest.raises(PromptTooLong) as refused:
        sequences("a", too_long)
    assert refused.value.field == "input.1"
    with pytest.raises(PromptTooLong) as alone:
        sequences(too_long, is_list=False)
    assert alone.value.field == "input"
    _, cut = sequences("a", too_long, truncates=True)
    assert len(cut.prompt_token_ids) == INFO.context_tokens
    ends = ending_each_text()
    _, cut = sequences("a", too_long, truncates=True, bundle=ends)
    end = ends.tokenizer.backend.token_to_id("<|endoftext|>")
    assert (cut.prompt_token_ids.view[-1] == end) == isinstance(too_long, str)


@pytest.mark.parametrize(
    ("inputs", "options", "field"),
    [
        (("a", (1, 5000)), {}, "input.1"),
        (("a",), {"dimensions": 65}, "dimensions"),
        (("a",), {"dimensions": 0}, "dimensions"),
        (("a", ""), {}, "input.1"),
    ],
    ids=str,
)
def test_impossible_requests_are_refused_before_any_work(
    inputs: Any, options: Any, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sequences(*inputs, **options)
    assert refused.value.field == field


def test_a_model_without_accessible_hidden_states_is_refused() -> None:
    with pytest.raises(NoEmbeddings, match="gives no embeddings"):
        sequences("a", info=model_info())


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20),
    st.integers(1, 20) | st.none(),
)
def test_vectors_are_normalized_hidden_states(values: list[float], dimensions: int | None) -> None:
    length = math.hypot(*values)
    # as the worker sends them
    values = [value / length for value in values] if length > 1e-30 else [0.0] * len(values)
    embedding = array("f", values).tobytes()
    finished = Finished(
        request_id="r",
        reason=FinishReason.LENGTH,
        prompt_tokens=3,
        completion_tokens=0,
        embedding=embedding,
    )
    found = array("f", embedding_of(finished, dimensions=dimensions).vector).tolist()
    kept = values[:dimensions]
    assert len(found) == len(kept)
    length = math.hypot(*kept)
    if length > 1e-20:
        assert math.hypot(*found) == pytest.approx(1, abs=1e-5)
        assert found == pytest.approx([value / length for value in kept], abs=1e-5)
    elif length == 0:
        assert not any(found)

"""A document's score equals that of mlx-lm's own logits: alone, in a batch, in chunks and from the
cache.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec import structs

from holdfast.front.output import Relevance
from holdfast.front.prompt.embed_and_rank import PromptReader, Ranking, ReadPrompt, ranking
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle, load_tokenizer_bundle
from holdfast.front.request import RankRequest
from holdfast.models.sentence_modules import AnswerTokens
from holdfast.wire.commands import Command
from tests.fakes.caching_worker import CachingWorker
from tests.fakes.reference_sampler import log_probabilities
from tests.fakes.scripted_client import model_info
from tests.fakes.slow import slow
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny, write_tokenizer

QUERY = "which sheep are black?"
DOCUMENTS = (
    "Sheep are white. " * 6,
    "Black sheep: two of three.",
    "",
    "Grüße, 😀",
    "Sheep are white. " * 9,
)
JUDGING = (
    "{% for m in messages if m['role'] == 'query' %}<|user|>Is it about this: {{ m['content'] }}? "
    "It has to be about it, wholly. "
    "{% endfor %}{% for m in messages if m['role'] == 'document' %}{{ m['content'] }}<|end|>{% "
    "endfor %}<|assistant|>"
)
YES, NO = ord("y"), ord("n")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TokenizerBundle:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer_bundle(folder)


def asked(
    bundle: TokenizerBundle, *, name: str = "llama", request_id: str = "r", query: str = QUERY
) -> Ranking:
    fixed = 1 if name != "llama" else 0
    info = structs.replace(
        model_info(context_tokens=2000, vocab_size=VOCAB_SIZE), fixed_bytes_per_sequence=fixed
    )
    return ranking(
        RankRequest(request_id=request_id, model="m", query=query, documents=DOCUMENTS),
        bundle,
        info=info,
    )


def served(subject: CachingWorker, *rankings: Ranking) -> list[list[Relevance]]:
    """The scores of each, in turn, as prefilled by the gateway."""
    script: list[list[Command]] = []
    for each in rankings:
        script += [[each.shared_prefix]] if each.shared_prefix is not None else []
        script.append(list(each.sequences))
    inbox = subject.serve(script, in_turn=True)

    def read(request_id: str) -> ReadPrompt:
        reader = PromptReader()
        return next(
            found
            for event in inbox.of(request_id)
            if (found := reader.read_event(event)) is not None
        )  # type: ignore[arg-type]

    return [
        [each.relevance(read(sequence.request_id)) for sequence in each.sequences]
        for each in rankings
    ]


@cache
def own_logits(name: str, token_ids: tuple[int, ...]) -> np.ndarray[Any, Any]:
    model: Any = kept_tiny(name)
    return np.array(model(mx.array([token_ids]))[0].astype(mx.float32), dtype=np.float64)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", *slow("gemma2")])
def test_likelihood_is_the_querys_mean_log_probability_after_the_document(
    name: str, bundle: TokenizerBundle
) -> None:
    """Twice with this query, then with another: cached tokens of the documents are not prefilled
    again.
    """
    other = "what is grey?"
    rankings = [
        asked(bundle, name=name),
        asked(bundle, name=name, request_id="s"),
        asked(bundle, name=name, request_id="t", query=other),
    ]
    scores = served(CachingWorker(name), *rankings)
    for query, of_query in zip((QUERY, QUERY, other), scores, strict=True):
        for document, found in zip(DOCUMENTS, of_query, strict=True):
            before = tuple(
                bundle.tokenizer.encode(f"Document: {document}\nQuery:", add_special_tokens=False)
            )
            token_ids = before + tuple(
                bundle.tokenizer.encode(f" {query}", add_special_tokens=False)
            )
            logits = own_logits(name, token_ids)
            wanted = [
                log_probabilities(logits[at - 1])[token_ids[at]]
                for at in range(len(before), len(token_ids))
            ]
            assert found.prompt_tokens == len(token_ids)
            assert found.logprob == pytest.approx(np.mean(wanted), abs=1e-4)
            assert found.score == pytest.approx(math.exp(np.mean(wanted)), abs=1e-4)
    read_before = [of_query[-1].cache_report.cached_tokens for of_query in scores]
    document_tokens = len(f"Document: {DOCUMENTS[-1]}\nQuery:") - 1
    # at first only the prefix shared with another document
    assert read_before[0] < document_tokens <= min(read_before[1:])


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_yes_is_weighed_against_no_in_the_templates_form(
    name: str, bundle: TokenizerBundle
) -> None:
    template = ChatTemplate({"default": JUDGING}, special_tokens={})
    trained = replace(bundle, template=template, answer_tokens=AnswerTokens(yes=YES, no=NO))
    (scores,) = served(CachingWorker(name), asked(trained, name=name))
    frame = f"<|user|>Is it about this: {QUERY}? It has to be about it, wholly. "
    for document, found in zip(DOCUMENTS, scores, strict=True):
        token_ids = tuple(
            trained.tokenizer.encode(
                f"{frame}{document}<|end|><|assistant|>", add_special_tokens=False
            )
        )
        yes, no = (float(own_logits(name, token_ids)[-1][token]) for token in (YES, NO))
        assert found.score == pytest.approx(1 / (1 + math.exp(no - yes)), abs=1e-4)
        assert found.logprob == pytest.approx(math.log(found.score), abs=1e-4)
        assert found.method == "yes_no"
    shared = len(trained.tokenizer.encode(frame, add_special_tokens=False))
    assert [found.cache_report.cached_tokens for found in scores] == [shared] * len(DOCUMENTS)

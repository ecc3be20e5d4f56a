from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.errors import GenerationFailed, InvalidRequest, PromptTooLong
from holdfast.front.prompt.embed_and_rank import Ranking, ReadPrompt, ranking
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.request import RankRequest
from holdfast.models.sentence_modules import AnswerTokens
from holdfast.wire.events import Finished, FinishReason, TokenLogprob
from tests.fakes import toy_tokenizers
from tests.fakes.scripted_client import model_info

INFO = model_info(context_tokens=400)
BUNDLE = TokenizerBundle(
    tokenizer=Tokenizer(toy_tokenizers.byte_level(shown=("yes", "no")), config={}),
    template=ChatTemplate({"default": toy_tokenizers.CHATML}, special_tokens={}),
    generation_defaults={},
)
YES, NO = (BUNDLE.tokenizer.backend.token_to_id(word) for word in ("yes", "no"))


def ranked(
    *documents: str, bundle: TokenizerBundle = BUNDLE, query: str = "what?", **options: Any
) -> Ranking:
    request = RankRequest(request_id="r", model="m", query=query, documents=documents, **options)
    return ranking(request, bundle, info=INFO)


def text_of(asked: Ranking, place: int = 0) -> str:
    return BUNDLE.tokenizer.decode(
        asked.sequences[place].prompt_token_ids, skip_special_tokens=False
    )


def test_an_unknown_model_ranks_by_likelihood() -> None:
    asked = ranked("a text")
    assert text_of(asked) == "Document: a text\nQuery: what?"
    (sequence,) = asked.sequences
    scored = BUNDLE.tokenizer.decode(
        sequence.prompt_token_ids[sequence.scored_from :], skip_special_tokens=False
    )
    assert (scored, sequence.max_tokens, sequence.is_kept) == (" what?", 0, True)
    assert (
        text_of(ranked("a text", instruction="be strict"))
        == "Document: a text\nInstruction: be strict\nQuery: what?"
    )


def test_equal_documents_are_prefilled_once_with_equal_scores() -> None:
    asked = ranked("one", "two", "one", "x" * 3, "two")
    assert [sequence.request_id for sequence in asked.sequences] == ["r/0", "r/1", "r/3"]
    ends = [
        Finished(
            request_id=each.request_id,
            reason=FinishReason.LENGTH,
            prompt_tokens=9,
            completion_tokens=0,
        )
        for each in asked.sequences
    ]
    read = [
        ReadPrompt(finished=end, logprobs=(TokenLogprob(token_id=0, logprob=-place),))
        for place, end in enumerate(ends, start=1)
    ]
    found = asked.relevances(read)
    assert [each.logprob for each in found] == [-1, -2, -1, -3, -2]
    assert [(each.prompt_tokens, each.cache_report.cached_tokens) for each in found] == [
        (9, 0),
        (9, 0),
        (9, 9),
        (9, 0),
        (9, 9),
    ]
    with pytest.raises(PromptTooLong) as refused:
        ranked("one", "one", "a" * 500)
    assert refused.value.field == "documents.2"


def test_a_trained_reranker_is_asked_in_qwens_form() -> None:
    asked = ranked(
        "a text", "another", bundle=replace(BUNDLE, answer_tokens=AnswerTokens(yes=YES, no=NO))
    )
    assert "<Query>: what?\n<Document>: another<|im_end|>\n<|im_start|>assistant\n" in text_of(
        asked, 1
    )
    assert 'answer can only be "yes" or "no"' in text_of(asked)
    sequence = asked.sequences[0]
    assert (sequence.max_tokens, sequence.is_kept, set(sequence.sampling.logit_bias)) == (
        1,
        False,
        {YES, NO},
    )
    assert asked.shared_prefix is not None
    shared = asked.shared_prefix.prompt_token_ids
    assert all(each.prompt_token_ids[: len(shared)] == shared for each in asked.sequences)
    assert (asked.shared_prefix.is_kept, asked.shared_prefix.max_tokens) == (True, 0)
    assert ranked("alone", method="yes_no").shared_prefix is None


def test_control_texts_in_a_document_are_plain_text() -> None:
    whole = tuple(ranked("x <|im_end|> y", method="yes_no").sequences[0].prompt_token_ids)
    end = BUNDLE.tokenizer.backend.token_to_id("<|im_end|>")
    assert whole.count(end) == 2


@pytest.mark.parametrize(
    ("options", "bundle", "field"),
    [
        (
            {"method": "yes_no"},
            replace(BUNDLE, tokenizer=Tokenizer(toy_tokenizers.byte_level(), config={})),
            "method",
        ),
        ({}, replace(BUNDLE, answer_tokens=AnswerTokens(yes=YES, no=None)), "method"),
    ],
    ids=["no tokens", "one token"],
)
def test_an_unsuitable_model_is_refused_with_the_reason(
    options: Any, bundle: TokenizerBundle, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ranked("a", bundle=bundle, **options)
    assert refused.value.field == field
    assert ranked("a", bundle=bundle, method="likelihood").answers is None


@pytest.mark.parametrize("document", ["the " * 500, "x" * 100_000], ids=["words", "a wall"])
@pytest.mark.parametrize("method", ["yes_no", "likelihood"])
def test_a_document_that_is_too_long_is_named(document: str, method: Any) -> None:
    with pytest.raises(PromptTooLong) as refused:
        ranked("short", document, method=method)
    assert refused.value.field == "documents.1"


def read(*logprobs: TokenLogprob) -> ReadPrompt:
    finished = Finished(
        request_id="r/0", reason=FinishReason.LENGTH, prompt_tokens=3, completion_tokens=0
    )
    return ReadPrompt(finished=finished, logprobs=logprobs)


@pytest.mark.parametrize(
    ("method", "logprobs"),
    [
        ("likelihood", ()),
        ("likelihood", (TokenLogprob(5, float("nan")),)),
        ("yes_no", ()),
        ("yes_no", (TokenLogprob(YES, -0.1, ((YES, -0.1), (7, -3.0))),)),
    ],
    ids=str,
)
def test_a_score_that_is_not_a_number_is_a_failure(
    method: Any, logprobs: tuple[TokenLogprob, ...]
) -> None:
    with pytest.raises(GenerationFailed):
        ranked("a", method=method).relevance(read(*logprobs))


def test_yes_is_weighed_only_against_no() -> None:
    told = TokenLogprob(YES, -1.0, ((YES, -1.0), (NO, -1.0)))
    assert ranked("a", method="yes_no").relevance(read(told)).score == pytest.approx(0.5)
    sure = TokenLogprob(YES, 0.0, ((YES, 0.0), (NO, -5000.0)))
    assert ranked("a", method="yes_no").relevance(read(sure)).score == pytest.approx(1.0)

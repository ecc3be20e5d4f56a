"""A request to rank documents → sequences that are only read, and the scores of what came of them.

`yes_no`: the model is asked whether a document is relevant, and its yes is weighed against its no.
`likelihood`: behind the document, how likely the query is, token for token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from holdfast.errors import GenerationFailed, InvalidRequest, PromptTooLong
from holdfast.front.prompt.embed import READ_ONLY
from holdfast.front.prompt.prepare import refuse_by_beginning
from holdfast.front.prompt.read_prompts import ReadPrompt
from holdfast.front.prompt.tokenize import well_formed
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.models.sentence_modules import AnswerTokens
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import ModelInfo, Timings
from holdfast.wire.output import Relevance
from holdfast.wire.requests import RankMethod, RankRequest, SamplingParams, TokenIds

LEAST_SHARED_TOKENS = 64  # of all documents' prompts: fewer are read faster than waited for
# of yes and no alike, so that they are the likeliest two and are told; their difference stays
_BIAS = 100.0
_CHATML = ("<|im_start|>", "<|im_end|>")
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The form in which Qwen3-Reranker was trained.
_JUDGED = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    "the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How the documents of one request are scored. first: what they share is read once before, if
    that pays.
    """

    sequences: tuple[SequenceRequest, ...]  # of the documents that differ
    places: tuple[int, ...]  # of each sequence: where its document first stands
    sequence_of: tuple[int, ...]  # of each document
    answers: AnswerTokens | None  # None: by likelihood
    first: SequenceRequest | None = None

    def relevances(self, read: Sequence[ReadPrompt]) -> tuple[Relevance, ...]:
        """The scores of all documents, given what came of each sequence; equal documents have equal
        ones. Raises as below.
        """
        found = [self.relevance(each) for each in read]
        return tuple(
            found[index] if place == self.places[index] else _read_before(found[index])
            for place, index in enumerate(self.sequence_of)
        )

    def relevance(self, read: ReadPrompt) -> Relevance:
        """The score of a document that was read.

        Raises GenerationFailed where the model gave no number.
        """
        method: RankMethod = "likelihood" if self.answers is None else "yes_no"
        logprob = _mean_logprob(read) if self.answers is None else _yes_logprob(read, self.answers)
        if not math.isfinite(logprob):
            raise GenerationFailed("the model gave no number for a document")
        finished = read.finished
        return Relevance(
            method=method,
            score=math.exp(logprob),
            logprob=logprob,
            prompt_tokens=finished.prompt_tokens,
            timings=finished.timings,
            memory=finished.memory,
        )


def ranking(request: RankRequest, bundle: TokenizerBundle, *, info: ModelInfo) -> Ranking:
    """A sequence per document.

    May take long: not for an event loop. Raises InvalidRequest naming the field, PromptTooLong.
    """
    answers = _answers(request, bundle)
    texts = {"query": request.query, "instruction": request.instruction}
    texts |= {f"documents.{place}": document for place, document in enumerate(request.documents)}
    for field, text in texts.items():
        refuse_by_beginning(bundle.tokenizer, text, context_tokens=info.context_tokens, field=field)
    first_place: dict[str, int] = {}
    for place, document in enumerate(request.documents):
        first_place.setdefault(document, place)
    places = tuple(first_place.values())
    sequences = tuple(
        _likelihood(request, place, bundle, info)
        if answers is None
        else _yes_no(request, place, bundle, answers)
        for place in places
    )
    for place, sequence in zip(places, sequences, strict=True):
        if len(sequence.prompt_token_ids) > info.context_tokens - sequence.max_tokens:
            tokens = len(sequence.prompt_token_ids)
            raise PromptTooLong(
                prompt_tokens=tokens, context_tokens=info.context_tokens, field=f"documents.{place}"
            )
    number = {document: index for index, document in enumerate(first_place)}
    return Ranking(
        sequences=sequences,
        places=places,
        sequence_of=tuple(number[document] for document in request.documents),
        answers=answers,
        first=_first(request, sequences),
    )


def _answers(request: RankRequest, bundle: TokenizerBundle) -> AnswerTokens | None:
    """The tokens to weigh; None: the method is likelihood."""
    own, token_id = bundle.answer_tokens, bundle.tokenizer.backend.token_to_id
    if request.method == "likelihood" or (request.method is None and own is None):
        return None
    if own is None:
        yes, no = token_id("yes"), token_id("no")
        if yes is None or no is None or any(token_id(mark) is None for mark in _CHATML):
            reason = (
                "this model cannot be asked for yes or no: its tokenizer has not the tokens of the "
                "form for that"
            )
            raise InvalidRequest(reason, field="method")
        own = AnswerTokens(yes=yes, no=no)
    if own.no is None:
        reason = (
            "this model was trained to judge by the logit of one token alone, which is not served; "
            "ask for likelihood"
        )
        raise InvalidRequest(reason, field="method")
    return own


def _yes_no(
    request: RankRequest, place: int, bundle: TokenizerBundle, answers: AnswerTokens
) -> SequenceRequest:
    guard = bundle.tokenizer.guard
    parts = {
        "instruction": request.instruction,
        "query": request.query,
        "document": request.documents[place],
    }
    parts = {name: guard(well_formed(text)) for name, text in parts.items()}
    text = "" if bundle.template is None else bundle.template.judging(**parts)
    text = text or _JUDGED.format(**{**parts, "instruction": parts["instruction"] or _INSTRUCTION})
    assert answers.no is not None
    return SequenceRequest(
        request_id=f"{request.request_id}/{place}",
        prompt_token_ids=TokenIds.of(bundle.tokenizer.encode(text, add_special_tokens=False)),
        max_tokens=1,
        sampling=SamplingParams(
            temperature=0.0, seed=0, logit_bias={answers.yes: _BIAS, answers.no: _BIAS}
        ),
        want_logprobs=True,
        top_logprobs=2,
        is_kept=False,  # the next one has another document in its place
        tenant=request.tenant,
        service=request.service,
    )


def _likelihood(
    request: RankRequest, place: int, bundle: TokenizerBundle, info: ModelInfo
) -> SequenceRequest:
    """What is read of the document is kept: another query may follow it."""
    guard, bos = bundle.tokenizer.guard, bundle.tokenizer.bos_token_id
    instruction = (
        f"\nInstruction: {guard(well_formed(request.instruction))}" if request.instruction else ""
    )
    before = f"Document: {guard(well_formed(request.documents[place]))}{instruction}\nQuery:"
    (encoded,) = bundle.tokenizer.encode_in_place([f"{before} {guard(well_formed(request.query))}"])
    opening = (
        (bos,)
        if bos is not None and bundle.tokenizer.encode("a", add_special_tokens=True)[0] == bos
        else ()
    )
    # nothing tells how likely the first token of all is
    scored_from = max(1, len(opening) + encoded.tokens_before(len(before)))
    token_ids = TokenIds.of(opening) + encoded.token_ids
    if scored_from >= len(token_ids):
        raise InvalidRequest("`query`: it has no tokens", field="query")
    return SequenceRequest(
        request_id=f"{request.request_id}/{place}",
        prompt_token_ids=token_ids,
        max_tokens=0,
        sampling=READ_ONLY,
        want_prompt_logprobs=True,
        scored_from=scored_from,
        branch_points=(scored_from - 1,)
        if info.fixed_bytes_per_sequence and scored_from > 1
        else (),
        tenant=request.tenant,
        service=request.service,
    )


def _first(request: RankRequest, sequences: Sequence[SequenceRequest]) -> SequenceRequest | None:
    """What reads the beginning that all prompts share, so that it is there for all; None where it
    would not pay.
    """
    places = zip(*(sequence.prompt_token_ids for sequence in sequences), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda place: len(set(place)) == 1, places))
    if len(sequences) < 2 or shared < LEAST_SHARED_TOKENS:
        return None
    return SequenceRequest(
        request_id=f"{request.request_id}/shared",
        prompt_token_ids=sequences[0].prompt_token_ids[:shared],
        max_tokens=0,
        sampling=READ_ONLY,
        tenant=request.tenant,
        service=request.service,
    )


def _read_before(found: Relevance) -> Relevance:
    """The score of a document once more, for which nothing had to be read."""
    memory = msgspec.structs.replace(
        found.memory,
        ram_tokens=found.prompt_tokens,
        disk_tokens=0,
        unused_tokens=0,
        moved_tokens=0,
        shared_tokens=0,
    )
    return msgspec.structs.replace(found, memory=memory, timings=Timings())


def _mean_logprob(read: ReadPrompt) -> float:
    """Of the query's tokens behind the document."""
    return (
        math.fsum(entry.logprob for entry in read.logprobs) / len(read.logprobs)
        if read.logprobs
        else math.nan
    )


def _yes_logprob(read: ReadPrompt, answers: AnswerTokens) -> float:
    """Of yes, where there is only yes or no."""
    told = dict(read.logprobs[0].top) if read.logprobs else {}
    yes, no = (
        told.get(answers.yes, math.nan),
        told.get(answers.no if answers.no is not None else -1, math.nan),
    )
    top = max(yes, no)
    return yes - top - math.log(math.exp(yes - top) + math.exp(no - top))

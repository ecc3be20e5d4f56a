"""Prepares and runs the prompts of embedding and reranking requests, whose results are numbers.

A document is ranked in one of two ways. `yes_no`: the model is asked whether the document is
relevant, and the score is the probability of "yes" relative to "no". `likelihood`: the score is the
mean likelihood of the query's tokens when they follow the document.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from holdfast.errors import (
    GenerationFailed,
    InvalidRequest,
    NoEmbeddings,
    PromptTooLong,
    QueueFull,
    TooLargeForMemory,
    WorkerUnavailable,
)
from holdfast.front.link.event_stream import RequestEvent, WorkerClient, refusal
from holdfast.front.output import Embedding, Relevance
from holdfast.front.prompt.limits import check_token_ids
from holdfast.front.prompt.prepare import (
    MAX_CHARACTERS_PER_TOKEN,
    prompt_text,
    prompt_tokens,
    refuse_by_beginning,
)
from holdfast.front.prompt.token_memory import TokenMemory
from holdfast.front.prompt.tokenize import well_formed
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.request import EmbeddingRequest, GenerationRequest, RankRequest
from holdfast.models.sentence_modules import AnswerTokens
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import (
    Finished,
    FinishReason,
    ModelInfo,
    PrefillFinished,
    Rejected,
    Timings,
    TokenLogprob,
    TokensGenerated,
)
from holdfast.wire.requests import Pooling, SamplingParams, TokenIds

READ_ONLY = SamplingParams(temperature=0.0, seed=0)
MAX_CONCURRENT = 16  # prompts per request that are queued or running; enough for a step
MIN_SHARED_TOKENS = 64  # a shorter common prefix is not worth waiting for
_MAX_WAIT_SECONDS = 1.0
# a bias added to both "yes" and "no", so that they become the two most likely tokens, whose
# probabilities are reported
_BIAS = 100.0
_CHATML = ("<|im_start|>", "<|im_end|>")
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# the prompt format with which Qwen3-Reranker was trained
_JUDGED = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    "the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompt:
    """What the worker returned for one prompt.

    logprobs: those of the prompt's own tokens or of the one generated token, as requested.
    """

    finished: Finished
    logprobs: tuple[TokenLogprob, ...] = ()


class PromptReader:
    """Collects the events of one sequence.

    Raises the error for the client if the sequence is refused or fails.
    """

    def __init__(self) -> None:
        self._logprobs: tuple[TokenLogprob, ...] = ()
        self.is_accepted = False

    def read_event(self, event: RequestEvent) -> ReadPrompt | None:
        """Take the next event. Returns the result after the last event, None before."""
        if isinstance(event, Rejected):
            raise refusal(event)
        self.is_accepted = True
        if isinstance(event, PrefillFinished | TokensGenerated):
            self._logprobs += event.logprobs
        if not isinstance(event, Finished):
            return None
        match event.reason:
            case FinishReason.FAILED:
                message = event.error or "the request failed; the server's log has the details"
                raise GenerationFailed(message, is_deadly=event.is_deadly)
            case FinishReason.REFUSED:
                raise InvalidRequest(event.error)
            case FinishReason.CANCELLED:
                raise WorkerUnavailable(
                    "the server cancelled the request before it was complete; please try again"
                )
            case _:
                return ReadPrompt(finished=event, logprobs=self._logprobs)


async def read_prompts(
    client: WorkerClient, sequences: Sequence[SequenceRequest], *, field_of: Callable[[int], str]
) -> list[ReadPrompt]:
    """Run all sequences, a few at a time. Returns their results in order.

    If a sequence is refused or fails, raises its error and cancels the others. If the worker's
    queue is full, waits and tries again, but raises QueueFull as long as the worker has accepted
    none of the sequences.

    field_of: returns the name of the request field to blame if the prompt with this index is too
        large for the memory.
    """
    waiting = deque(enumerate(sequences))
    found: dict[int, ReadPrompt] = {}
    accepted = 0

    async def read(sequence: SequenceRequest) -> ReadPrompt:
        nonlocal accepted
        reader = PromptReader()
        async with aclosing(client.submit(sequence)) as events:
            async for event in events:
                result = reader.read_event(event)
                accepted += reader.is_accepted
                if result is not None:
                    return result
        raise GenerationFailed("the worker's stream ended without a result")

    async def lane() -> None:
        while waiting:
            place, sequence = waiting.popleft()
            while place not in found:
                try:
                    found[place] = await read(sequence)
                except TooLargeForMemory as error:
                    error.field = field_of(place)
                    raise
                except QueueFull as full:
                    if not accepted:
                        raise
                    await asyncio.sleep(min(full.retry_after_seconds, _MAX_WAIT_SECONDS))

    lanes = [asyncio.create_task(lane()) for _ in range(min(MAX_CONCURRENT, len(sequences)))]
    try:
        for each in asyncio.as_completed(lanes):
            await each
    finally:
        for task in lanes:
            task.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
    return [found[place] for place in range(len(sequences))]


def _prefill_request(
    request: EmbeddingRequest | RankRequest, name: int | str, token_ids: TokenIds
) -> SequenceRequest:
    return SequenceRequest(
        request_id=f"{request.request_id}/{name}",
        prompt_token_ids=token_ids,
        max_tokens=0,
        sampling=READ_ONLY,
        tenant=request.tenant,
        service=request.service,
    )


def embedding_sequences(
    request: EmbeddingRequest, bundle: TokenizerBundle, *, info: ModelInfo
) -> tuple[SequenceRequest, ...]:
    """Prepare one sequence per input. It tokenizes, so do not call it on an event loop.

    Raises NoEmbeddings if the model has none, PromptTooLong, and InvalidRequest, which names the
    input.
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
    # thousands of texts that are sent only once must not evict other texts from the token memory
    bundle = replace(bundle, token_memory=TokenMemory(max_bytes=0))
    return tuple(
        msgspec.structs.replace(
            _prefill_request(request, place, _input_tokens(request, place, bundle, info=info)),
            pooling=pooling,
            is_kept=False,  # nothing continues from it
        )
        for place in range(len(request.inputs))
    )


def embedding_of(finished: Finished, *, dimensions: int | None) -> Embedding:
    """The vector of an input.

    If `dimensions` is given, the vector is truncated and normalized again.
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
    """The pooling to use: the one that the request asks for, or else the one of the model's files.

    If neither names one, it is "last" if the tokenizer appends a token to every text (at which the
    model can gather the meaning of the text), and "mean" otherwise.
    """
    own = bundle.own_pooling
    if request.pooling is None and own.unserved:
        reason = (
            f"this model's own embedding is not available: {own.unserved}; to get a different "
            "embedding, set `pooling` to mean or last"
        )
        raise InvalidRequest(reason, field="pooling")
    return request.pooling or own.pooling or ("last" if bundle.tokenizer.ends_texts else "mean")


def _input_tokens(
    request: EmbeddingRequest, place: int, bundle: TokenizerBundle, *, info: ModelInfo
) -> TokenIds:
    """The tokens of one input, cut at the end if the request allows that. Raises PromptTooLong."""
    given = request.inputs[place]
    limit = info.context_tokens
    field = request.field_of(place)
    if request.truncates:
        is_text = isinstance(given, str)
        given = given[: limit * MAX_CHARACTERS_PER_TOKEN] if is_text else given[:limit]
    one = GenerationRequest(request_id="", model=request.model, prompt=given, prompt_field=field)
    token_ids = prompt_tokens(
        one, bundle, prompt_text(one, bundle, given, info=info), info=info
    ).token_ids
    if len(token_ids) > limit:
        if not request.truncates:
            raise PromptTooLong(prompt_tokens=len(token_ids), context_tokens=limit, field=field)
        has_ending = bundle.tokenizer.ends_texts and isinstance(given, str)
        ending = token_ids[-1:] if has_ending else TokenIds()
        token_ids = token_ids[: limit - len(ending)] + ending
    check_token_ids(token_ids, vocab_size=info.vocab_size, field=field)
    return token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How the documents of one request are scored."""

    sequences: tuple[SequenceRequest, ...]  # one per distinct document
    places: tuple[int, ...]  # for each sequence: the index of the first document with its text
    sequence_of: tuple[int, ...]  # for each document: the index of its sequence
    answers: AnswerTokens | None  # None: documents are ranked by likelihood
    # to be run before the others, to prefill their common prefix; None if that is not worth it
    first: SequenceRequest | None = None

    def relevances(self, read: Sequence[ReadPrompt]) -> tuple[Relevance, ...]:
        """The scores of all documents, given the results of the sequences.

        Raises GenerationFailed if a score is not a finite number.
        """
        found = [self.relevance(each) for each in read]
        return tuple(
            found[index] if place == self.places[index] else _repeated(found[index])
            for place, index in enumerate(self.sequence_of)
        )

    def relevance(self, read: ReadPrompt) -> Relevance:
        """The score of a document. Raises GenerationFailed if the score is not a finite number."""
        logprob = _mean_logprob(read) if self.answers is None else _yes_logprob(read, self.answers)
        if not math.isfinite(logprob):
            raise GenerationFailed("the model gave a document a score that is not a finite number")
        return Relevance(
            method="likelihood" if self.answers is None else "yes_no",
            score=math.exp(logprob),
            logprob=logprob,
            prompt_tokens=read.finished.prompt_tokens,
            timings=read.finished.timings,
            memory=read.finished.memory,
        )


def ranking(request: RankRequest, bundle: TokenizerBundle, *, info: ModelInfo) -> Ranking:
    """Prepare one sequence per distinct document. It tokenizes, so do not call it on an event loop.

    Raises InvalidRequest, which names the field, and PromptTooLong.
    """
    answers = _answers(request, bundle)
    texts = {"query": request.query, "instruction": request.instruction}
    texts |= {f"documents.{place}": document for place, document in enumerate(request.documents)}
    for field, text in texts.items():
        refuse_by_beginning(bundle.tokenizer, text, context_tokens=info.context_tokens, field=field)
    index_of: dict[str, int] = {}
    places: list[int] = []
    sequences: list[SequenceRequest] = []
    for place, document in enumerate(request.documents):
        if document in index_of:
            continue
        index_of[document] = len(places)
        places.append(place)
        sequence = (
            _likelihood(request, place, bundle, info)
            if answers is None
            else _yes_no(request, place, bundle, answers)
        )
        tokens = len(sequence.prompt_token_ids)
        if tokens > info.context_tokens - sequence.max_tokens:
            raise PromptTooLong(
                prompt_tokens=tokens, context_tokens=info.context_tokens, field=f"documents.{place}"
            )
        sequences.append(sequence)
    return Ranking(
        sequences=tuple(sequences),
        places=tuple(places),
        sequence_of=tuple(index_of[document] for document in request.documents),
        answers=answers,
        first=_first(request, sequences),
    )


def _answers(request: RankRequest, bundle: TokenizerBundle) -> AnswerTokens | None:
    """The tokens for yes and no; None if documents are ranked by likelihood."""
    own = bundle.answer_tokens
    token_id = bundle.tokenizer.backend.token_to_id
    if request.method == "likelihood" or (request.method is None and own is None):
        return None
    if own is None:
        yes = token_id("yes")
        no = token_id("no")
        if yes is None or no is None or any(token_id(mark) is None for mark in _CHATML):
            reason = (
                "this model cannot be asked for yes or no, because its tokenizer lacks tokens of "
                "the prompt format; set `method` to likelihood"
            )
            raise InvalidRequest(reason, field="method")
        return AnswerTokens(yes=yes, no=no)
    if own.no is None:
        reason = (
            "this model was trained to judge by the logit of one token, which is not supported; "
            "set `method` to likelihood"
        )
        raise InvalidRequest(reason, field="method")
    return own


def _yes_no(
    request: RankRequest, place: int, bundle: TokenizerBundle, answers: AnswerTokens
) -> SequenceRequest:
    """A request for the probabilities of yes and no, as a judgement of one document."""
    parts = {
        "instruction": request.instruction,
        "query": request.query,
        "document": request.documents[place],
    }
    parts = {name: bundle.tokenizer.guard(well_formed(text)) for name, text in parts.items()}
    text = "" if bundle.template is None else bundle.template.judging(**parts)
    if not text:
        parts["instruction"] = parts["instruction"] or _INSTRUCTION
        text = _JUDGED.format(**parts)
    assert answers.no is not None
    token_ids = TokenIds.of(bundle.tokenizer.encode(text, add_special_tokens=False))
    return msgspec.structs.replace(
        _prefill_request(request, place, token_ids),
        max_tokens=1,
        sampling=msgspec.structs.replace(
            READ_ONLY, logit_bias={answers.yes: _BIAS, answers.no: _BIAS}
        ),
        want_logprobs=True,
        top_logprobs=2,
        is_kept=False,  # the next prompt has another document
    )


def _likelihood(
    request: RankRequest, place: int, bundle: TokenizerBundle, info: ModelInfo
) -> SequenceRequest:
    """A request for the probabilities of the query's tokens after one document."""
    # The document comes first, so that it stays cached and another query can follow it.
    tokenizer = bundle.tokenizer
    before = f"Document: {tokenizer.guard(well_formed(request.documents[place]))}"
    if request.instruction:
        before += f"\nInstruction: {tokenizer.guard(well_formed(request.instruction))}"
    before += "\nQuery:"
    query = tokenizer.guard(well_formed(request.query))
    (encoded,) = tokenizer.encode_in_place([f"{before} {query}"])
    bos = tokenizer.bos_token_id
    has_bos = bos is not None and tokenizer.encode("a", add_special_tokens=True)[0] == bos
    opening = TokenIds.of((bos,) if bos is not None and has_bos else ())
    # the first token of the prompt has no probability
    scored_from = max(1, len(opening) + encoded.tokens_before(len(before)))
    token_ids = opening + encoded.token_ids
    if scored_from >= len(token_ids):
        raise InvalidRequest("`query` must have at least one token", field="query")
    has_branch = info.fixed_bytes_per_sequence and scored_from > 1
    return msgspec.structs.replace(
        _prefill_request(request, place, token_ids),
        want_prompt_logprobs=True,
        scored_from=scored_from,
        branch_points=(scored_from - 1,) if has_branch else (),
    )


def _first(request: RankRequest, sequences: Sequence[SequenceRequest]) -> SequenceRequest | None:
    """A sequence that prefills the prefix of all prompts; None if that is not worth it."""
    places = zip(*(sequence.prompt_token_ids for sequence in sequences), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda place: len(set(place)) == 1, places))
    if len(sequences) < 2 or shared < MIN_SHARED_TOKENS:
        return None
    return _prefill_request(request, "shared", sequences[0].prompt_token_ids[:shared])


def _repeated(relevance: Relevance) -> Relevance:
    """The score of a document that occurs again, with usage figures that say that nothing was
    prefilled for it.
    """
    memory = msgspec.structs.replace(
        relevance.memory,
        ram_tokens=relevance.prompt_tokens,
        disk_tokens=0,
        unused_tokens=0,
        moved_tokens=0,
        shared_tokens=0,
    )
    return msgspec.structs.replace(relevance, memory=memory, timings=Timings())


def _mean_logprob(read: ReadPrompt) -> float:
    if not read.logprobs:
        return math.nan
    return math.fsum(entry.logprob for entry in read.logprobs) / len(read.logprobs)


def _yes_logprob(read: ReadPrompt, answers: AnswerTokens) -> float:
    """The log-probability of "yes", given that the answer is "yes" or "no"."""
    assert answers.no is not None
    top = dict(read.logprobs[0].top) if read.logprobs else {}
    yes = top.get(answers.yes, math.nan)
    no = top.get(answers.no, math.nan)
    highest = max(yes, no)
    return yes - highest - math.log(math.exp(yes - highest) + math.exp(no - highest))

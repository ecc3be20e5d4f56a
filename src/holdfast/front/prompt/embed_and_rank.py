"""Prompts that are prefilled and not answered: embeddings and reranking."""

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
    HoldfastError,
    InvalidRequest,
    NoEmbeddings,
    PromptTooLong,
    QueueFull,
    TooLargeForMemory,
    WorkerUnavailable,
)
from holdfast.front.link.client import EngineClient
from holdfast.front.link.event_stream import RequestEvent
from holdfast.front.prompt.limits import check_token_ids
from holdfast.front.prompt.prepare import (
    MOST_CHARACTERS_PER_TOKEN,
    prompt_text,
    prompt_tokens,
    refuse_by_beginning,
)
from holdfast.front.prompt.stream import refusal
from holdfast.front.prompt.tokenize import TokenMemory, well_formed
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.models.sentence_modules import AnswerTokens
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import (
    Finished,
    FinishReason,
    ModelInfo,
    Rejected,
    Started,
    Timings,
    TokenLogprob,
    TokensGenerated,
)
from holdfast.wire.output import Embedding, Relevance
from holdfast.wire.requests import (
    EmbeddingRequest,
    GenerationRequest,
    Pooling,
    RankMethod,
    RankRequest,
    SamplingParams,
    TokenIds,
)

READ_ONLY = SamplingParams(temperature=0.0, seed=0)
AT_ONCE = 16  # prompts of one request that wait or are read: about what fills a step
_LONGEST_WAIT_SECONDS = 1.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompt:
    """What came of a prompt that was read. logprobs: what was asked for, of its own tokens or of
    one that was drawn.
    """

    finished: Finished
    logprobs: tuple[TokenLogprob, ...] = ()


class PromptReader:
    """Takes the events of one sequence. Raises what its refusal or failure means to the client."""

    def __init__(self) -> None:
        self._logprobs: tuple[TokenLogprob, ...] = ()
        self.is_accepted = False

    def take(self, event: RequestEvent) -> ReadPrompt | None:
        """The next event; returns what the prompt came to with the last one."""
        self.is_accepted = self.is_accepted or not isinstance(event, Rejected)
        if isinstance(event, Rejected):
            raise refusal(event)
        if isinstance(event, Started | TokensGenerated):
            self._logprobs += event.logprobs
        if not isinstance(event, Finished):
            return None
        if failure := _failure(event):
            raise failure
        return ReadPrompt(finished=event, logprobs=self._logprobs)


def _failure(event: Finished) -> HoldfastError | None:
    match event.reason:
        case FinishReason.FAILED:
            message = event.error or "the request failed; the server's log has the details"
            return GenerationFailed(message, is_deadly=event.is_deadly)
        case FinishReason.REFUSED:
            return InvalidRequest(event.error)
        case FinishReason.CANCELLED:
            return WorkerUnavailable(
                "the server cancelled the request before it was done; please try again"
            )
        case _:
            return None


async def read_prompts(
    client: EngineClient, sequences: Sequence[SequenceRequest], *, field_of: Callable[[int], str]
) -> list[ReadPrompt]:
    """Read all, in any order; what came of each, in theirs.

    Whatever ends it early, what still runs is cancelled.

    field_of: the field of the request to name where the prompt in that place is more than memory
    can take.

    Raises the first refusal or failure. A queue that is full refuses only who has nothing in it
    yet; else a place is waited for.
    """
    reading = _Reading(client, sequences, field_of)
    lanes = [asyncio.create_task(reading.lane()) for _ in range(min(AT_ONCE, len(sequences)))]
    try:
        for lane in asyncio.as_completed(lanes):
            await lane
    finally:
        for task in lanes:
            task.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
    return [reading.found[place] for place in range(len(sequences))]


class _Reading:
    def __init__(
        self,
        client: EngineClient,
        sequences: Sequence[SequenceRequest],
        field_of: Callable[[int], str],
    ) -> None:
        self._client, self._field_of = client, field_of
        self._waiting = deque(enumerate(sequences))
        self._accepted = 0
        self.found: dict[int, ReadPrompt] = {}

    async def lane(self) -> None:
        """Read one prompt after the other."""
        while self._waiting:
            place, sequence = self._waiting.popleft()
            while place not in self.found:
                try:
                    self.found[place] = await self._read(sequence)
                except TooLargeForMemory as error:
                    error.field = self._field_of(place)
                    raise
                except QueueFull as full:
                    if not self._accepted:
                        raise
                    await asyncio.sleep(min(full.retry_after_seconds, _LONGEST_WAIT_SECONDS))

    async def _read(self, sequence: SequenceRequest) -> ReadPrompt:
        reader = PromptReader()
        async with aclosing(self._client.submit(sequence)) as events:
            async for event in events:
                found = reader.take(event)
                self._accepted += reader.is_accepted
                if found is not None:
                    return found
        raise GenerationFailed("the worker's stream ended without a word")


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

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
_ANSWER_BIAS = 100.0
_CHATML = ("<|im_start|>", "<|im_end|>")
_DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# the prompt format with which Qwen3-Reranker was trained
_JUDGE_PROMPT = (
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
    not_started = deque(enumerate(sequences))
    results: dict[int, ReadPrompt] = {}
    accepted_events = 0

    async def read(sequence: SequenceRequest) -> ReadPrompt:
        """Run a sequence until its result."""
        nonlocal accepted_events
        reader = PromptReader()
        async with aclosing(client.submit(sequence)) as events:
            async for event in events:
                result = reader.read_event(event)
                accepted_events += reader.is_accepted
                if result is not None:
                    return result
        raise GenerationFailed("the worker's stream ended without a result")

    async def run_sequences() -> None:
        """Run one sequence after another until none is left. Several of these tasks run at once."""
        while not_started:
            index, sequence = not_started.popleft()
            while index not in results:
                try:
                    results[index] = await read(sequence)
                except TooLargeForMemory as error:
                    error.field = field_of(index)
                    raise
                except QueueFull as full:
                    if not accepted_events:
                        raise
                    await asyncio.sleep(min(full.retry_after_seconds, _MAX_WAIT_SECONDS))

    tasks = [
        asyncio.create_task(run_sequences()) for _ in range(min(MAX_CONCURRENT, len(sequences)))
    ]
    try:
        for completed in asyncio.as_completed(tasks):
            await completed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [results[index] for index in range(len(sequences))]


def _prefill_request(
    request: EmbeddingRequest | RankRequest, name: int | str, token_ids: TokenIds
) -> SequenceRequest:
    """A request that only prefills these tokens and generates nothing. name: distinguishes the
    sequences of one request.
    """
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
            _prefill_request(request, index, _input_tokens(request, index, bundle, info=info)),
            pooling=pooling,
            is_kept=False,  # nothing continues from it
        )
        for index in range(len(request.inputs))
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
        cache_report=finished.cache_report,
    )


def _pooling(request: EmbeddingRequest, bundle: TokenizerBundle) -> Pooling:
    """The pooling to use: the one that the request asks for, or else the one of the model's files.

    If neither names one, it is "last" if the tokenizer appends a token to every text (at which the
    model can gather the meaning of the text), and "mean" otherwise.
    """
    model_pooling = bundle.own_pooling
    if request.pooling is None and model_pooling.unserved:
        reason = (
            f"this model's own embedding is not available: {model_pooling.unserved}; to get a different "
            "embedding, set `pooling` to mean or last"
        )
        raise InvalidRequest(reason, field="pooling")
    return (
        request.pooling
        or model_pooling.pooling
        or ("last" if bundle.tokenizer.ends_texts else "mean")
    )


def _input_tokens(
    request: EmbeddingRequest, index: int, bundle: TokenizerBundle, *, info: ModelInfo
) -> TokenIds:
    """The tokens of one input, cut at the end if the request allows that. Raises PromptTooLong."""
    prompt = request.inputs[index]
    limit_tokens = info.context_tokens
    field = request.field_of(index)
    if request.truncates:
        is_text = isinstance(prompt, str)
        prompt = (
            prompt[: limit_tokens * MAX_CHARACTERS_PER_TOKEN] if is_text else prompt[:limit_tokens]
        )
    prompt_request = GenerationRequest(
        request_id="", model=request.model, prompt=prompt, prompt_field=field
    )
    token_ids = prompt_tokens(
        prompt_request, bundle, prompt_text(prompt_request, bundle, prompt, info=info), info=info
    ).token_ids
    if len(token_ids) > limit_tokens:
        if not request.truncates:
            raise PromptTooLong(
                prompt_tokens=len(token_ids), context_tokens=limit_tokens, field=field
            )
        has_ending = bundle.tokenizer.ends_texts and isinstance(prompt, str)
        ending = token_ids[-1:] if has_ending else TokenIds()
        token_ids = token_ids[: limit_tokens - len(ending)] + ending
    check_token_ids(token_ids, vocab_size=info.vocab_size, field=field)
    return token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How the documents of one request are scored."""

    sequences: tuple[SequenceRequest, ...]  # one per distinct document
    # for each sequence: the index of the first document with its text
    document_indices: tuple[int, ...]
    sequence_indices: tuple[int, ...]  # for each document: the index of its sequence
    answers: AnswerTokens | None  # None: documents are ranked by likelihood
    # to be run before the others, to prefill their common prefix; None if that is not worth it
    shared_prefix: SequenceRequest | None = None

    def relevances(self, results: Sequence[ReadPrompt]) -> tuple[Relevance, ...]:
        """The scores of all documents, given the results of the sequences.

        Raises GenerationFailed if a score is not a finite number.
        """
        distinct = [self.relevance(each) for each in results]
        return tuple(
            distinct[sequence_index]
            if document_index == self.document_indices[sequence_index]
            else _without_prefill(distinct[sequence_index])
            for document_index, sequence_index in enumerate(self.sequence_indices)
        )

    def relevance(self, result: ReadPrompt) -> Relevance:
        """The score of a document. Raises GenerationFailed if the score is not a finite number."""
        logprob = (
            _mean_logprob(result) if self.answers is None else _yes_logprob(result, self.answers)
        )
        if not math.isfinite(logprob):
            raise GenerationFailed("the model gave a document a score that is not a finite number")
        return Relevance(
            method="likelihood" if self.answers is None else "yes_no",
            score=math.exp(logprob),
            logprob=logprob,
            prompt_tokens=result.finished.prompt_tokens,
            timings=result.finished.timings,
            cache_report=result.finished.cache_report,
        )


def ranking(request: RankRequest, bundle: TokenizerBundle, *, info: ModelInfo) -> Ranking:
    """Prepare one sequence per distinct document. It tokenizes, so do not call it on an event loop.

    Raises InvalidRequest, which names the field, and PromptTooLong.
    """
    answers = _answer_tokens(request, bundle)
    texts = {"query": request.query, "instruction": request.instruction}
    texts |= {
        f"documents.{document_index}": document
        for document_index, document in enumerate(request.documents)
    }
    for field, text in texts.items():
        refuse_by_beginning(bundle.tokenizer, text, context_tokens=info.context_tokens, field=field)
    sequence_of_text: dict[str, int] = {}
    document_indices: list[int] = []
    sequences: list[SequenceRequest] = []
    for document_index, document in enumerate(request.documents):
        if document in sequence_of_text:
            continue
        sequence_of_text[document] = len(document_indices)
        document_indices.append(document_index)
        sequence = (
            _likelihood_request(request, document_index, bundle, info)
            if answers is None
            else _yes_no_request(request, document_index, bundle, answers)
        )
        tokens = len(sequence.prompt_token_ids)
        if tokens > info.context_tokens - sequence.max_tokens:
            raise PromptTooLong(
                prompt_tokens=tokens,
                context_tokens=info.context_tokens,
                field=f"documents.{document_index}",
            )
        sequences.append(sequence)
    return Ranking(
        sequences=tuple(sequences),
        document_indices=tuple(document_indices),
        sequence_indices=tuple(sequence_of_text[document] for document in request.documents),
        answers=answers,
        shared_prefix=_shared_prefix_request(request, sequences),
    )


def _answer_tokens(request: RankRequest, bundle: TokenizerBundle) -> AnswerTokens | None:
    """The tokens for yes and no; None if documents are ranked by likelihood."""
    model_answers = bundle.answer_tokens
    id_of_token = bundle.tokenizer.backend.token_to_id
    if request.method == "likelihood" or (request.method is None and model_answers is None):
        return None
    if model_answers is None:
        yes = id_of_token("yes")
        no = id_of_token("no")
        if yes is None or no is None or any(id_of_token(mark) is None for mark in _CHATML):
            reason = (
                "this model cannot be asked for yes or no, because its tokenizer lacks tokens of "
                "the prompt format; set `method` to likelihood"
            )
            raise InvalidRequest(reason, field="method")
        return AnswerTokens(yes=yes, no=no)
    if model_answers.no is None:
        reason = (
            "this model was trained to judge by the logit of one token, which is not supported; "
            "set `method` to likelihood"
        )
        raise InvalidRequest(reason, field="method")
    return model_answers


def _yes_no_request(
    request: RankRequest, document_index: int, bundle: TokenizerBundle, answers: AnswerTokens
) -> SequenceRequest:
    """A request for the probabilities of yes and no, as a judgement of one document."""
    prompt_parts = {
        "instruction": request.instruction,
        "query": request.query,
        "document": request.documents[document_index],
    }
    prompt_parts = {
        name: bundle.tokenizer.guard(well_formed(text)) for name, text in prompt_parts.items()
    }
    text = "" if bundle.template is None else bundle.template.judging(**prompt_parts)
    if not text:
        prompt_parts["instruction"] = prompt_parts["instruction"] or _DEFAULT_INSTRUCTION
        text = _JUDGE_PROMPT.format(**prompt_parts)
    assert answers.no is not None
    token_ids = TokenIds.of(bundle.tokenizer.encode(text, add_special_tokens=False))
    return msgspec.structs.replace(
        _prefill_request(request, document_index, token_ids),
        max_tokens=1,
        sampling=msgspec.structs.replace(
            READ_ONLY, logit_bias={answers.yes: _ANSWER_BIAS, answers.no: _ANSWER_BIAS}
        ),
        want_logprobs=True,
        top_logprobs=2,
        is_kept=False,  # the next prompt has another document
    )


def _likelihood_request(
    request: RankRequest, document_index: int, bundle: TokenizerBundle, info: ModelInfo
) -> SequenceRequest:
    """A request for the probabilities of the query's tokens after one document."""
    # The document comes first, so that it stays cached and another query can follow it.
    tokenizer = bundle.tokenizer
    beginning = f"Document: {tokenizer.guard(well_formed(request.documents[document_index]))}"
    if request.instruction:
        beginning += f"\nInstruction: {tokenizer.guard(well_formed(request.instruction))}"
    beginning += "\nQuery:"
    query = tokenizer.guard(well_formed(request.query))
    (encoded,) = tokenizer.encode_in_place([f"{beginning} {query}"])
    bos = tokenizer.bos_token_id
    has_bos = bos is not None and tokenizer.encode("a", add_special_tokens=True)[0] == bos
    bos_tokens = TokenIds.of((bos,) if bos is not None and has_bos else ())
    # the first token of the prompt has no probability
    scored_from = max(1, len(bos_tokens) + encoded.tokens_before(len(beginning)))
    token_ids = bos_tokens + encoded.token_ids
    if scored_from >= len(token_ids):
        raise InvalidRequest("`query` must have at least one token", field="query")
    # where another query may follow the document, for models that cannot resume at any token
    needs_branch_point = info.fixed_bytes_per_sequence and scored_from > 1
    return msgspec.structs.replace(
        _prefill_request(request, document_index, token_ids),
        want_prompt_logprobs=True,
        scored_from=scored_from,
        branch_points=(scored_from - 1,) if needs_branch_point else (),
    )


def _shared_prefix_request(
    request: RankRequest, sequences: Sequence[SequenceRequest]
) -> SequenceRequest | None:
    """A sequence that prefills the prefix of all prompts; None if that is not worth it."""
    tokens_by_position = zip(*(sequence.prompt_token_ids for sequence in sequences), strict=False)
    shared_tokens = sum(
        1 for _ in itertools.takewhile(lambda place: len(set(place)) == 1, tokens_by_position)
    )
    if len(sequences) < 2 or shared_tokens < MIN_SHARED_TOKENS:
        return None
    return _prefill_request(request, "shared", sequences[0].prompt_token_ids[:shared_tokens])


def _without_prefill(relevance: Relevance) -> Relevance:
    """The score of a document that occurs again, with usage figures that say that nothing was
    prefilled for it.
    """
    report = msgspec.structs.replace(
        relevance.cache_report,
        ram_tokens=relevance.prompt_tokens,
        disk_tokens=0,
        unused_tokens=0,
        moved_tokens=0,
        shared_tokens=0,
    )
    return msgspec.structs.replace(relevance, cache_report=report, timings=Timings())


def _mean_logprob(result: ReadPrompt) -> float:
    """The mean log-probability of the query's tokens; NaN if there are none."""
    if not result.logprobs:
        return math.nan
    return math.fsum(entry.logprob for entry in result.logprobs) / len(result.logprobs)


def _yes_logprob(result: ReadPrompt, answers: AnswerTokens) -> float:
    """The log-probability of "yes", given that the answer is "yes" or "no"."""
    assert answers.no is not None
    top_logprobs = dict(result.logprobs[0].top) if result.logprobs else {}
    yes = top_logprobs.get(answers.yes, math.nan)
    no = top_logprobs.get(answers.no, math.nan)
    highest = max(yes, no)
    return yes - highest - math.log(math.exp(yes - highest) + math.exp(no - highest))

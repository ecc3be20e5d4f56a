"""Uses an answer to prepare the next turn of its conversation.

`observer` records the answer as the client sees it, so that the prompt of the next turn contains
the tokens that were generated.

`WarmAhead` prefills the next turn while the worker is idle. When an answer has ended, it renders
the next turn with two different messages; the tokens that both renderings share are certain. This
is done only for chat templates that rewrite past answers; with other templates, all of these tokens
are cached already.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from holdfast.errors import HoldfastError
from holdfast.front.link.event_stream import WorkerClient
from holdfast.front.output import (
    ChoiceFinished,
    OutputDelta,
    OutputEvent,
    PromptProgress,
    ToolCallStarted,
    text_of,
    tool_calls_of,
)
from holdfast.front.prompt.conversation import REASONING_FIELDS, answer_message
from holdfast.front.prompt.images import image_spans
from holdfast.front.prompt.known_answers import AnswerMeaning, meaning_of_deltas, meaning_of_text
from holdfast.front.prompt.prepare import Prepared, conversation_tokens
from holdfast.front.prompt.template_probes import next_messages
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.request import ChatPrompt, GenerationRequest
from holdfast.wire.commands import ReadAhead, SequenceRequest
from holdfast.wire.events import FinishReason
from holdfast.wire.requests import SamplingParams, TokenIds, common_tokens

Observe: TypeAlias = Callable[[OutputEvent], None]
"""A function that is called with every event of an answer."""

logger = logging.getLogger("holdfast.front.prompt")
MIN_TOKENS = 64  # fewer tokens are prefilled fast enough when the turn arrives
# two possible beginnings of a message: a word, or white space that merges with the line before
_PROBE_MESSAGES = ("Next", "\n\n1. next")
# finish reasons of answers that the client received completely
_COMPLETE_REASONS = frozenset({FinishReason.STOP, FinishReason.LENGTH})
_MAX_TOKENS_PER_CHARACTER = 4  # one for each of its bytes


def observer(request: GenerationRequest, bundle: TokenizerBundle, prepared: Prepared) -> Observe:
    """Return a function that records the answers to a request from their events.

    It must be called with all of these events.

    A continued message is not recorded, because the client sends back more text than this request
    generates.
    """
    if not isinstance(prepared.prompt, ChatPrompt) or prepared.answer_opening is None:
        return lambda event: None
    opening_token_ids = tuple(
        bundle.tokenizer.encode(prepared.answer_opening, add_special_tokens=False)
    )
    prompt_token_ids = prepared.rules.prompt_token_ids
    if prompt_token_ids[len(prompt_token_ids) - len(opening_token_ids) :] != TokenIds.of(
        opening_token_ids
    ):
        # the opening shares a token with the text before it
        return lambda event: None
    recorder = _Recorder(
        bundle=bundle,
        tools=prepared.prompt.tools,
        answer_opening=prepared.answer_opening,
        opening_token_ids=opening_token_ids,
        reads_calls=prepared.rules.reads_calls,
        one_call=prepared.rules.one_call,
        tenant=request.tenant,
    )
    deltas: defaultdict[int, list[OutputDelta]] = defaultdict(list)

    def observe(event: OutputEvent) -> None:
        if isinstance(event, ChoiceFinished):
            recorder.record(deltas.pop(event.index, []), event)
        elif not isinstance(event, PromptProgress):
            deltas[event.index].append(event)

    return observe


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorder:
    """Records the answers to one request in the bundle, so that later prompts contain their tokens."""

    bundle: TokenizerBundle
    tools: tuple[dict[str, Any], ...]  # definitions, as the prompt has them
    answer_opening: str  # of the prompt, after the header of the answer, such as `<think>`
    opening_token_ids: tuple[int, ...]  # the tokens of `answer_opening`
    reads_calls: bool  # calls were parsed for the client, as they will be in the next turn
    one_call: bool  # the answer ends after its first call
    tenant: str

    def record(self, deltas: Sequence[OutputDelta], end: ChoiceFinished) -> None:
        """Record an answer, unless its meaning and its tokens may not belong together: when the
        next turn is tokenized, the tokens replace a text with this meaning.
        """
        for call in tool_calls_of(deltas):
            self.bundle.first_forms.remember_arguments(
                call.arguments, call_id=call.id, tenant=self.tenant
            )
        meaning = meaning_of_deltas(deltas)
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        if (
            meaning is None
            or not token_ids
            or end.reason not in _COMPLETE_REASONS
            or self._has_hidden_tokens(token_ids)
        ):
            return
        tokenizer = self.bundle.tokenizer
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        if end.unseen_characters:
            text = text[: -end.unseen_characters]
            token_ids = self._tokens_up_to(text, token_ids)
            if tokenizer.decode(token_ids, skip_special_tokens=False) != text:
                return
        opening = self.bundle.without_hidden(self.answer_opening)
        # The events that the client saw have the whole meaning of the tokens, except in three
        # cases: the text may contain calls that were not parsed, the answer may have been ended
        # within its text or after its first call, or the opening has a special meaning.
        events_have_whole_meaning = (
            (self.reads_calls or not self._may_contain_calls(text))
            and end.stop_string is None
            and not (self.one_call and end.calls)
            and self._meaning(opening, end) == AnswerMeaning()
        )
        if not events_have_whole_meaning and self._meaning(opening + text, end) != meaning:
            return
        # The template renders a call or a thought in its own way, so the resulting tokens are
        # unknown.
        is_plain_text = text == meaning.content and not opening.strip()
        self.bundle.known_answers.add(
            meaning,
            (*self.opening_token_ids, *token_ids),
            content=text_of(deltas),
            call_ids=[delta.id for delta in deltas if isinstance(delta, ToolCallStarted)],
            is_as_tokenized=is_plain_text and token_ids == tokenizer.encode_text(text),
            tenant=self.tenant,
        )

    def _tokens_up_to(self, text: str, token_ids: list[int]) -> list[int]:
        """The tokens of a prefix of an answer's text, which may end inside a token.

        The tokenizer re-encodes the rest of that token, and of a character that it completes. Returns
        no tokens if the text is not found to be such a prefix.
        """
        tokenizer = self.bundle.tokenizer
        for kept_tokens in range(
            len(token_ids) - 1, max(-1, len(token_ids) - 1 - _MAX_TOKENS_PER_CHARACTER), -1
        ):
            kept_text = tokenizer.decode(token_ids[:kept_tokens], skip_special_tokens=False)
            if text.startswith(kept_text):
                rest_token_ids = tokenizer.encode_text(text[len(kept_text) :])
                return [*token_ids[:kept_tokens], *rest_token_ids]
        return []

    def _may_contain_calls(self, text: str) -> bool:
        """Whether the text contains a marker that begins tool calls."""
        dialect = self.bundle.dialect
        encoded = dialect.markers.encode(text)
        return any(opener in encoded for opener in dialect.encoded.call_starts)

    def _has_hidden_tokens(self, token_ids: Sequence[int]) -> bool:
        """Whether some tokens are special tokens, which the client did not see."""
        markers = self.bundle.dialect.markers.characters
        pieces = self.bundle.tokenizer.pieces
        return any(
            token_id not in markers and pieces.is_special(token_id) for token_id in {*token_ids}
        )

    def _meaning(self, text: str, end: ChoiceFinished) -> AnswerMeaning:
        """The meaning of a text, with all of its calls parsed. The reader expects encoded markers: one
        character in place of each marker.
        """
        return meaning_of_text(
            self.bundle.dialect.markers.encode(text),
            self.bundle.answer_reader(self.tools),
            was_cut_off=end.reason is not FinishReason.STOP,
        )


class WarmAhead:
    """Prefills the next turns of conversations. Call it only from the event loop's thread."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def observer(
        self,
        request: GenerationRequest,
        bundle: TokenizerBundle,
        prepared: Prepared,
        client: WorkerClient,
        *,
        threads: Executor,
        observe: Observe,
    ) -> Observe:
        """Return a function that starts the prefill when the answer has ended.

        Call it with every event of the answer. It passes each event on to `observe`.
        If the request has several choices, it prefills no turn, because it is unknown which
        choice the conversation will continue.

        threads: the pool that renders the next turn.
        """
        prompt = prepared.prompt
        if (
            not bundle.read_ahead
            or not isinstance(prompt, ChatPrompt)
            or prompt.continue_last
            or request.choices != 1
        ):
            return observe
        loop = asyncio.get_running_loop()
        deltas: list[OutputDelta] = []

        def make_request() -> SequenceRequest | None:
            return read_ahead_request(
                request,
                prompt,
                bundle,
                prepared=prepared,
                deltas=deltas,
                context_tokens=client.info.context_tokens,
            )

        def observe_and_prefill(event: OutputEvent) -> None:
            observe(event)
            if isinstance(event, PromptProgress):
                return
            if not isinstance(event, ChoiceFinished):
                deltas.append(event)
                return
            has_calls = any(isinstance(delta, ToolCallStarted) for delta in deltas)
            next_turn = "results" if has_calls else "user"
            if event.reason is FinishReason.STOP and next_turn in bundle.read_ahead:
                # the end of a long answer is observed in another thread than the event loop's
                loop.call_soon_threadsafe(self._start_prefill, make_request, client, threads)

        return observe_and_prefill

    def _start_prefill(
        self,
        make_request: Callable[[], SequenceRequest | None],
        client: WorkerClient,
        threads: Executor,
    ) -> None:
        """Prefill in a separate task, which nobody awaits."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(_prefill(make_request, client, threads), name="warm-ahead")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _prefill(
    make_request: Callable[[], SequenceRequest | None], client: WorkerClient, threads: Executor
) -> None:
    """Create a request that only prefills, and submit it.

    Failures are only logged, because nothing depends on this request.
    """
    try:
        sequence = await asyncio.get_running_loop().run_in_executor(threads, make_request)
        if sequence is None:
            return
        async with aclosing(client.submit(sequence)) as events:
            async for _ in events:
                continue
    except HoldfastError as error:
        logger.debug("the next turn is not prefilled: %s", error)


def read_ahead_request(
    request: GenerationRequest,
    prompt: ChatPrompt,
    bundle: TokenizerBundle,
    *,
    prepared: Prepared,
    deltas: Sequence[OutputDelta],
    context_tokens: int,
) -> SequenceRequest | None:
    """A request that prefills the next turn after an answer.

    Returns None if too few tokens are new, or if the next turn does not fit the context window.
    Raises InvalidRequest if the template refuses the next turn.

    deltas: the events of the whole answer.
    """
    calls = tool_calls_of(deltas)
    sends_thoughts = any(map(_has_thought, prompt.messages))
    reasoning = text_of(deltas, "reasoning") if sends_thoughts else ""
    answer = answer_message(text_of(deltas), reasoning=reasoning, calls=calls)
    # Only the tokens that two possible next turns share are certain.
    layouts = prepared.layouts
    first_prompt, second_prompt = (
        conversation_tokens(
            request,
            msgspec.structs.replace(
                prompt, messages=(*prompt.messages, answer, *next_messages(calls, probe))
            ),
            bundle,
            layouts=layouts,
        )
        for probe in _PROBE_MESSAGES
    )
    shared_tokens = common_tokens(first_prompt.token_ids.packed, second_prompt.token_ids.packed)
    images = image_spans(first_prompt.images, layouts)
    # an image is prefilled as a whole
    shared_tokens = min(
        (span.start for span in images if span.start < shared_tokens < span.end),
        default=shared_tokens,
    )
    certain_ids = first_prompt.token_ids[:shared_tokens]
    generated = TokenIds.of(token_id for delta in deltas for token_id in delta.token_ids)
    known_tokens = common_tokens(
        certain_ids.packed, (prepared.rules.prompt_token_ids + generated).packed
    )
    if len(certain_ids) - known_tokens < MIN_TOKENS or len(certain_ids) >= context_tokens:
        return None
    return SequenceRequest(
        request_id=f"{request.request_id}/ahead",
        prompt_token_ids=certain_ids,
        images=tuple(span for span in images if span.end <= shared_tokens),
        max_tokens=0,
        sampling=SamplingParams(seed=0),
        **request.cache_use,
        read_ahead=ReadAhead(known_tokens=known_tokens),
    )


def _has_thought(message: object) -> bool:
    """Whether a message is an answer that the client sent back with its thought."""
    return (
        isinstance(message, dict)
        and message.get("role") == "assistant"
        and any(map(message.get, REASONING_FIELDS))
    )

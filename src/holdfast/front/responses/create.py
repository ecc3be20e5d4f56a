"""OpenAI's Responses API, which Codex and newer SDKs use: POST /v1/responses, compaction, token
counts, and the list of models in Codex' format.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.errors import PromptTooLong, ResponsesUnavailable
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.openai.answer import ErrorBody, openai_error
from holdfast.front.openai.endpoints import ModelCard, model_card
from holdfast.front.records.responses import Item, RecordKey, RecordMissing, ResponseFile
from holdfast.front.request import GenerationRequest
from holdfast.front.responses.answer import (
    CompactedResponse,
    CompactionAnswer,
    ResponseAnswer,
    ResponseEvent,
    ResponseObject,
    sampling_fields,
)
from holdfast.front.responses.fields import OfferedTools, ResponseRequest
from holdfast.front.responses.items import (
    TRIGGER,
    asks_for_compaction,
    continued,
    items_of,
    shown_item,
    summary_seal,
)
from holdfast.front.responses.stored import OPERATIONS, ResponseRun
from holdfast.front.server.access import Seal
from holdfast.front.server.context import RequestContext, context_of
from holdfast.front.server.dialect import Dialect, ModelShapes, operation
from holdfast.front.server.generation import (
    FollowingResponse,
    GenerationResponse,
    rejoin,
    run_in_background,
)
from holdfast.front.server.openapi import accepts, returns
from holdfast.front.server.problem import (
    RequestRefused,
    invalid_field,
    missing_field,
    problem_of,
    record_problem,
)
from holdfast.front.server.request import json_response, parse, read_body, read_json
from holdfast.front.server.resumable_answers import identity_of
from holdfast.front.server.services import Services, needs_load
from holdfast.front.telemetry.request_log import RECORD, AnswerRecord

# fields of a function that the response shows even if the request left them out
_FUNCTION: Mapping[str, Any] = dict.fromkeys(("description", "parameters", "strict"))
_REPEATED = {
    "previous_response_id",
    "background",
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_tool_calls",
    "max_output_tokens",
    "top_logprobs",
    "reasoning",
    "text",
    "truncation",
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "user",
}
_INSTRUCTIONS = (  # for models that Codex does not know; it has its own for others
    "You are Codex, a coding agent in the user's terminal. Do what the user asks in the current "
    "folder: look at files before you change them, change no more than is asked, run what you have "
    "changed, and go on until the task is done. Use the tools for all of that, and tell the user "
    "in a few words what you have done."
)


class InputTokens(Struct, frozen=True, kw_only=True):
    """The number of tokens in an input."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@operation(
    "POST",
    "/v1/responses",
    accepts(ResponseRequest),
    returns(ResponseObject, chunk=ResponseEvent),
    summary="responses (OpenAI)",
)
async def create_response(request: Request, services: Services) -> Response:
    """Generate a response to an input: a text, or the items of a conversation."""
    return await _generated(request, services)


@operation("POST", "/v1/responses/compact", accepts(ResponseRequest), returns(CompactedResponse))
async def compact_response(request: Request, services: Services) -> Response:
    """Have the model summarize a conversation.

    The client sends the result in place of the conversation. Neither is stored.
    """
    return await _generated(request, services, only_compacts=True)


@operation("POST", "/v1/responses/input_tokens", accepts(ResponseRequest), returns(InputTokens))
async def count_input_tokens(request: Request, services: Services) -> Response:
    """Count the tokens of an input, including tools."""
    asked = await read_json(request, ResponseRequest, services.limits)
    context = context_of(request, services, cache_salt=asked.cache_salt)
    resolved = await _resolved(asked, context)
    offered = resolved.asked.offered(resolved.before, limits=services.limits)
    counted = resolved.asked.request(
        context, offered=offered, before=resolved.before, only_counts=True
    )
    encoded = await services.gateway.encode(counted)
    return json_response(InputTokens(input_tokens=len(encoded.token_ids)))


async def _generated(
    request: Request, services: Services, *, only_compacts: bool = False
) -> Response:
    """Generate the response. only_compacts: summarize the input, and store nothing."""
    answer = AnswerRecord(services.telemetry.metrics)
    body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    identity = await identity_of(request, body, services.server)
    if (earlier := rejoin(identity, request, services)) is not None:
        return earlier
    asked = parse(ResponseRequest, body)
    if only_compacts:
        asked = _compaction(asked)
    context = context_of(request, services, cache_salt=asked.cache_salt)
    resolved = await _resolved(asked, context)
    asked = resolved.asked
    offered = asked.offered(resolved.before, limits=services.limits)
    generated = asked.request(context, offered=offered, before=resolved.before)
    form = _form(asked, generated, offered, seal=context.seal)
    if only_compacts:
        assert isinstance(form, CompactionAnswer), "the input ends with a trigger"
        form.replaces = [*resolved.before, *items_of(asked.input)]
    run = None
    if not only_compacts and (asked.stores or asked.conversation_id is not None):
        run = ResponseRun(form, asked, context.tenant, resolved.items, services)
        if asked.background:
            generation = GenerationResponse(context, [generated], form, answer)
            return await _in_background(request, services, generation, run)
    attended = _AttendedResponse(context, [generated], form, answer, identity=identity)
    attended.run = run
    attended.streams_overflow = generated.streams and is_codex(request.headers)
    return attended


def is_codex(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from Codex."""
    names = [headers.get(name, "").lower() for name in ("originator", "user-agent")]
    return any(name.startswith("codex") for name in names)


def _compaction(asked: ResponseRequest) -> ResponseRequest:
    """Add a `compaction_trigger` to the end of the request's input.

    Raises RequestRefused for requests that cannot be compacted.
    """
    if asked.model is None:  # a summary can be decrypted only for the model that wrote it
        raise missing_field("model")
    for field in ("stream", "background"):
        if getattr(asked, field):
            raise invalid_field(field, "a compaction cannot be streamed or run in the background")
    items = [*items_of(asked.input), {"type": TRIGGER}]
    return asked.model_copy(update={"input": items, "store": False})


def _form(
    asked: ResponseRequest, generated: GenerationRequest, offered: OfferedTools, *, seal: Seal
) -> ResponseAnswer:
    response = _response(asked, generated)
    if asks_for_compaction(items_of(asked.input)):
        seal = summary_seal(seal, response.model)
        return CompactionAnswer(response, tools=offered, shows=asked.shows(), seal=seal.encrypt)
    return ResponseAnswer(response, tools=offered, shows=asked.shows(), seal=seal.encrypt)


def _response(asked: ResponseRequest, generated: GenerationRequest) -> ResponseObject:
    """Create the response object, before anything is generated."""
    said = asked.model_dump(mode="json", include=_REPEATED, by_alias=True, exclude_unset=True)
    given = {name: value for name, value in said.items() if value is not None}
    if "tools" in given:
        given["tools"] = [
            {**_FUNCTION, **tool} if tool["type"] == "function" else tool for tool in given["tools"]
        ]
    text = {"format": {"type": "text"}, **given.pop("text", {})}
    return ResponseObject(
        id=generated.request_id,
        status="queued" if asked.background else "in_progress",
        store=asked.stores,
        conversation={"id": asked.conversation_id} if asked.conversation_id else None,
        created_at=int(time.time()),
        model=generated.model,
        text=text,
        **sampling_fields(generated.sampling),
        **given,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resolved:
    """A request and the stored items that it refers to."""

    asked: ResponseRequest  # with references in the input replaced by the items
    items: Sequence[Item]  # items of the input, in stored form
    before: Sequence[Any]  # stored items that the request continues


async def _resolved(asked: ResponseRequest, context: RequestContext) -> _Resolved:
    """Look up the stored items, response or conversation that a request refers to.

    Raises RequestRefused if one of them does not exist.
    """
    services = context.services
    tenant = context.tenant
    asked.refuse_what_cannot_be_served(services.limits)
    items: list[Item] = [shown_item(item) for item in items_of(asked.input)]
    references = [place for place, item in enumerate(items) if _is_reference(item)]
    if references:
        names = [items[place].get("id") or "" for place in references]
        found = await services.answers.responses.call(ResponseFile.find_items, tenant, names)
        for place, name in zip(references, names, strict=True):
            if name not in found:
                reason = "there is no such item; it may no longer be stored"
                raise _not_found(f"input.{place}.id", reason, "item_not_found")
            items[place] = found[name]
        asked = asked.model_copy(update={"input": continued(items)})
    before: list[Item] = []
    if asked.previous_response_id is not None:
        before = await _chain(services, RecordKey(tenant, asked.previous_response_id))
    elif asked.conversation_id is not None:
        key = RecordKey(tenant, asked.conversation_id, "conversation")
        before = await _conversation(services, key)
    return _Resolved(asked=asked, items=items, before=continued(before))


def _is_reference(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def _not_found(field: str, reason: str, code: str) -> RequestRefused:
    return RequestRefused(f"`{field}`: {reason}", status=404, code=code, field=field)


async def _chain(services: Services, key: RecordKey) -> list[Item]:
    field = "previous_response_id"
    try:
        record = await services.answers.responses.call(ResponseFile.record, key)
        if record.is_running:
            reason = "that response is still being generated"
            raise invalid_field(field, reason, code="previous_response_in_progress")
        if record.body.get("conversation"):
            reason = "that response is part of a conversation; use `conversation` to continue it"
            raise invalid_field(field, reason)
        return await services.answers.responses.call(ResponseFile.chain, key)
    except RecordMissing as lost:
        reason = "there is no such response"
        if lost.record_id != key.id:
            reason = "a response that it continues no longer exists"
        reason += "; it may have been deleted, or may no longer be stored"
        raise _not_found(field, reason, "previous_response_not_found") from None


async def _conversation(services: Services, key: RecordKey) -> list[Item]:
    try:
        return await services.answers.responses.call(ResponseFile.items, key)
    except RecordMissing:
        reason = (
            "there is no such conversation; it may have been deleted or may no longer be stored"
        )
        raise _not_found("conversation", reason, "conversation_not_found") from None


class _AttendedResponse(GenerationResponse):
    """A response whose client waits for it. If the client leaves, the part generated so far is
    stored.
    """

    run: ResponseRun | None = None
    # True: an input that is too long fails within the stream. Codex then compacts its conversation,
    # while a status of 400 would end its turn.
    streams_overflow = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send the response."""
        try:
            await super().__call__(scope, receive, send)
        except PromptTooLong as error:  # raised only before anything was sent
            if not self.streams_overflow:
                raise
            problem = problem_of(error)
            record_problem(scope[RECORD], problem, error)
            form = self._format
            failed = Response(form.error_event(problem), media_type=form.stream_type)
            await failed(scope, receive, send)
        finally:
            if self.run is not None:
                self.run.stop()


async def _in_background(
    request: Request, services: Services, generation: GenerationResponse, run: ResponseRun
) -> Response:
    """Start a background response, and answer with its current state or with its events.

    Raises the error for which the response is refused.
    """
    tasks = services.answers.resumable.tasks
    most = services.answers.responses.limits.max_background
    if len(tasks) >= most:
        reason = (
            f"`background`: this server runs at most {most} responses in the background at once; "
            "please try again later"
        )
        raise RequestRefused(reason, status=429, code="rate_limit_exceeded", field="background")
    queued = run.form.response
    task = asyncio.create_task(
        run_in_background(generation, request, stopped=run.stopped), name="background response"
    )
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    task.add_done_callback(run.task_ended)
    if needs_load(services, queued.model):
        run.form.keep_alive()  # stores the response now, because loading the model may take minutes
    else:
        beginning = asyncio.create_task(run.wait_for_first_event())
        try:
            await asyncio.wait((task, beginning), return_when=asyncio.FIRST_COMPLETED)
        finally:
            beginning.cancel()
        if not run.events:
            await task
    try:
        await run.stored()
    except ResponsesUnavailable:  # the client could never retrieve the response
        run.stop()
        raise
    return (
        FollowingResponse(run.events_after(-1), run.form)
        if run.asked.stream
        else json_response(queued)
    )


class CodexReasoningLevel(Struct, frozen=True, kw_only=True):
    """A reasoning effort that a user of Codex can choose."""

    effort: str
    description: str


class CodexTruncation(Struct, frozen=True, kw_only=True):
    """The longest tool output that Codex passes on. The values are Codex' own defaults."""

    mode: Literal["bytes", "tokens"] = "tokens"
    limit: int = 10_000


class CodexModel(Struct, frozen=True, kw_only=True):
    """A model in Codex' format. Codex rejects the whole list if a field is missing."""

    slug: str
    display_name: str
    description: str | None = None
    supported_reasoning_levels: tuple[CodexReasoningLevel, ...] = tuple(
        CodexReasoningLevel(effort=effort, description=f"{effort} effort")
        for effort in ("low", "medium", "high")
    )
    shell_type: str = "unified_exec"
    visibility: str = "list"
    supported_in_api: bool = True
    priority: int
    upgrade: None = None
    base_instructions: str = _INSTRUCTIONS
    supports_reasoning_summaries: bool = True
    support_verbosity: bool = False
    default_verbosity: None = None
    apply_patch_tool_type: str = "freeform"
    truncation_policy: CodexTruncation = CodexTruncation()
    supports_parallel_tool_calls: bool = True
    context_window: int | None
    experimental_supported_tools: tuple[str, ...] = ()
    input_modalities: tuple[str, ...] = ("text",)


class CodexModelList(Struct, frozen=True, kw_only=True):
    """All served models, in OpenAI's format and in Codex' format."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    models: list[CodexModel]


def _models(models: Sequence[ModelStatus]) -> CodexModelList:
    shown = [
        CodexModel(
            slug=model.id,
            display_name=model.id,
            priority=place,
            context_window=model.context_tokens,
            input_modalities=model.input_modalities,
        )
        for place, model in enumerate(models)
    ]
    return CodexModelList(data=[model_card(model) for model in models], models=shown)


RESPONSES = Dialect(
    name="OpenAI's Responses API",
    error=openai_error,
    error_shape=ErrorBody,
    matches_headers=is_codex,
    models=ModelShapes(
        many_type=CodexModelList,
        one_type=ModelCard,
        many=_models,
        one=model_card,
        is_on=lambda server: server.codex_models,
    ),
    prefixes=("/v1/responses", "/v1/conversations"),
    serves="OpenAI's Responses: /v1/responses, /v1/conversations",
    operations=(create_response, compact_response, count_input_tokens, *OPERATIONS),
)

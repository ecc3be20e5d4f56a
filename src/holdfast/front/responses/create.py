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
    as_input,
    asks_for_compaction,
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
# fields of a request that its response object repeats
_REPEATED_FIELDS = {
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
    return await _generate(request, services)


@operation("POST", "/v1/responses/compact", accepts(ResponseRequest), returns(CompactedResponse))
async def compact_response(request: Request, services: Services) -> Response:
    """Have the model summarize a conversation.

    The client sends the result in index of the conversation. Neither is stored.
    """
    return await _generate(request, services, only_compacts=True)


@operation("POST", "/v1/responses/input_tokens", accepts(ResponseRequest), returns(InputTokens))
async def count_input_tokens(request: Request, services: Services) -> Response:
    """Count the tokens of an input, including tools."""
    body = await read_json(request, ResponseRequest, services.limits)
    context = context_of(request, services, cache_salt=body.cache_salt)
    resolved = await _resolve(body, context)
    tools = resolved.body.tools_to_offer(resolved.earlier_items, limits=services.limits)
    count_request = resolved.body.request(
        context, tools=tools, earlier_items=resolved.earlier_items, only_counts=True
    )
    encoded = await services.gateway.encode(count_request)
    return json_response(InputTokens(input_tokens=len(encoded.token_ids)))


async def _generate(
    request: Request, services: Services, *, only_compacts: bool = False
) -> Response:
    """Create the HTTP response that generates a response object and sends it.

    only_compacts: summarize the input, and store nothing.
    """
    answer_record = AnswerRecord(services.telemetry.metrics)
    body_bytes = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    identity = await identity_of(request, body_bytes, services.server)
    if (earlier_answer := rejoin(identity, request, services)) is not None:
        return earlier_answer
    body = parse(ResponseRequest, body_bytes)
    if only_compacts:
        body = _with_compaction_trigger(body)
    context = context_of(request, services, cache_salt=body.cache_salt)
    resolved = await _resolve(body, context)
    body = resolved.body
    tools = body.tools_to_offer(resolved.earlier_items, limits=services.limits)
    generation_request = body.request(context, tools=tools, earlier_items=resolved.earlier_items)
    answer_format = _answer_format(body, generation_request, tools, seal=context.seal)
    if only_compacts:
        assert isinstance(answer_format, CompactionAnswer), "the input ends with a trigger"
        answer_format.replaces = [*resolved.earlier_items, *items_of(body.input)]
    run = None  # None: nothing is stored
    if not only_compacts and (body.stores or body.conversation_id is not None):
        run = ResponseRun(answer_format, body, context.tenant, resolved.items, services)
        if body.background:
            generation = GenerationResponse(
                context, [generation_request], answer_format, answer_record
            )
            return await _start_in_background(request, services, generation, run)
    attended = _AttendedResponse(
        context, [generation_request], answer_format, answer_record, identity=identity
    )
    attended.run = run
    attended.streams_overflow = generation_request.streams and is_codex(request.headers)
    return attended


def is_codex(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from Codex."""
    names = [headers.get(name, "").lower() for name in ("originator", "user-agent")]
    return any(name.startswith("codex") for name in names)


def _with_compaction_trigger(body: ResponseRequest) -> ResponseRequest:
    """Add a `compaction_trigger` to the end of the request's input.

    Raises RequestRefused for requests that cannot be compacted.
    """
    if body.model is None:  # a summary can be decrypted only for the model that wrote it
        raise missing_field("model")
    for field in ("stream", "background"):
        if getattr(body, field):
            raise invalid_field(field, "a compaction cannot be streamed or run in the background")
    items = [*items_of(body.input), {"type": TRIGGER}]
    return body.model_copy(update={"input": items, "store": False})


def _answer_format(
    body: ResponseRequest,
    generation_request: GenerationRequest,
    tools: OfferedTools,
    *,
    seal: Seal,
) -> ResponseAnswer:
    """Create the format of the answer. seal: encrypts texts for the client's tenant."""
    response = _initial_response(body, generation_request)
    if asks_for_compaction(items_of(body.input)):
        seal = summary_seal(seal, response.model)
        return CompactionAnswer(response, tools=tools, shows=body.shows(), seal=seal.encrypt)
    return ResponseAnswer(response, tools=tools, shows=body.shows(), seal=seal.encrypt)


def _initial_response(
    body: ResponseRequest, generation_request: GenerationRequest
) -> ResponseObject:
    """Create the response object, before anything is generated."""
    fields = body.model_dump(
        mode="json", include=_REPEATED_FIELDS, by_alias=True, exclude_unset=True
    )
    repeated = {name: value for name, value in fields.items() if value is not None}
    if "tools" in repeated:
        repeated["tools"] = [
            {**_FUNCTION, **tool} if tool["type"] == "function" else tool
            for tool in repeated["tools"]
        ]
    text = {"format": {"type": "text"}, **repeated.pop("text", {})}
    return ResponseObject(
        id=generation_request.request_id,
        status="queued" if body.background else "in_progress",
        store=body.stores,
        conversation={"id": body.conversation_id} if body.conversation_id else None,
        created_at=int(time.time()),
        model=generation_request.model,
        text=text,
        **sampling_fields(generation_request.sampling),
        **repeated,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResolvedRequest:
    """The body of a request, and the stored items that it refers to."""

    body: ResponseRequest  # with references in the input replaced by the items
    items: Sequence[Item]  # items of the input, in stored form
    # stored items that the request continues: of the previous response or the conversation
    earlier_items: Sequence[Any]


async def _resolve(body: ResponseRequest, context: RequestContext) -> _ResolvedRequest:
    """Look up the stored items, response or conversation that a request refers to.

    Raises RequestRefused if one of them does not exist.
    """
    services = context.services
    tenant = context.tenant
    body.refuse_what_cannot_be_served(services.limits)
    items: list[Item] = [shown_item(item) for item in items_of(body.input)]
    references = [index for index, item in enumerate(items) if _is_reference(item)]
    if references:
        item_ids = [items[index].get("id") or "" for index in references]
        stored_items = await services.answers.responses.call(
            ResponseFile.find_items, tenant, item_ids
        )
        for index, item_id in zip(references, item_ids, strict=True):
            if item_id not in stored_items:
                reason = "there is no such item; it may no longer be stored"
                raise _not_found(f"input.{index}.id", reason, "item_not_found")
            items[index] = stored_items[item_id]
        body = body.model_copy(update={"input": as_input(items)})
    earlier_items: list[Item] = []
    if body.previous_response_id is not None:
        earlier_items = await _items_up_to(services, RecordKey(tenant, body.previous_response_id))
    elif body.conversation_id is not None:
        key = RecordKey(tenant, body.conversation_id, "conversation")
        earlier_items = await _conversation_items(services, key)
    return _ResolvedRequest(body=body, items=items, earlier_items=as_input(earlier_items))


def _is_reference(item: Mapping[str, Any]) -> bool:
    """Whether an item stands for the stored item with its id. Its type may be left out."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def _not_found(field: str, reason: str, code: str) -> RequestRefused:
    return RequestRefused(f"`{field}`: {reason}", status=404, code=code, field=field)


async def _items_up_to(services: Services, key: RecordKey) -> list[Item]:
    """The items of a stored response and of all responses that it continues, oldest first.

    Raises RequestRefused, which names `previous_response_id`.
    """
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
    except RecordMissing as error:
        reason = "there is no such response"
        if error.record_id != key.id:
            reason = "a response that it continues no longer exists"
        reason += "; it may have been deleted, or may no longer be stored"
        raise _not_found(field, reason, "previous_response_not_found") from None


async def _conversation_items(services: Services, key: RecordKey) -> list[Item]:
    """The items of a stored conversation. Raises RequestRefused, which names `conversation`."""
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
            event = self._format.error_event(problem)
            failed_stream = Response(event, media_type=self._format.stream_type)
            await failed_stream(scope, receive, send)
        finally:
            if self.run is not None:
                self.run.stop()


async def _start_in_background(
    request: Request, services: Services, generation: GenerationResponse, run: ResponseRun
) -> Response:
    """Start a background response, and answer with its current state or with its events.

    Waits for the first event, so that a request which is refused gets the error. If the model must
    be loaded, which may take minutes, does not wait.
    """
    tasks = services.answers.resumable.tasks
    most_tasks = services.answers.responses.limits.max_background
    if len(tasks) >= most_tasks:
        reason = (
            f"`background`: this server runs at most {most_tasks} responses in the background at "
            "once; please try again later"
        )
        raise RequestRefused(reason, status=429, code="rate_limit_exceeded", field="background")
    initial_response = run.answer_format.response
    task = asyncio.create_task(
        run_in_background(generation, request, stopped=run.stopped), name="background response"
    )
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    task.add_done_callback(run.task_ended)
    if needs_load(services, initial_response.model):
        # the task begins; `run_in_background` counts the answer first, and ends if there are too many
        await asyncio.sleep(0)
        if task.done():
            await task
        # stores the response now, because loading the model may take minutes
        run.answer_format.keep_alive()
    else:
        first_event = asyncio.create_task(run.wait_for_first_event())
        try:
            await asyncio.wait((task, first_event), return_when=asyncio.FIRST_COMPLETED)
        finally:
            first_event.cancel()
        if not run.events:
            await task
    try:
        await run.wait_until_stored()
    except ResponsesUnavailable:  # the client could never retrieve the response
        run.stop()
        raise
    return (
        FollowingResponse(run.events_after(-1), run.answer_format)
        if run.body.stream
        else json_response(initial_response)
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


def _model_list(models: Sequence[ModelStatus]) -> CodexModelList:
    codex_models = [
        CodexModel(
            slug=model.id,
            display_name=model.id,
            priority=index,
            context_window=model.context_tokens,
            input_modalities=model.input_modalities,
        )
        for index, model in enumerate(models)
    ]
    return CodexModelList(data=[model_card(model) for model in models], models=codex_models)


RESPONSES = Dialect(
    name="OpenAI's Responses API",
    error=openai_error,
    error_shape=ErrorBody,
    matches_headers=is_codex,
    models=ModelShapes(
        many_type=CodexModelList,
        one_type=ModelCard,
        many=_model_list,
        one=model_card,
        is_on=lambda server: server.codex_models,
    ),
    prefixes=("/v1/responses", "/v1/conversations"),
    serves="OpenAI's Responses: /v1/responses, /v1/conversations",
    operations=(create_response, compact_response, count_input_tokens, *OPERATIONS),
)

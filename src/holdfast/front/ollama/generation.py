"""POST /api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from msgspec import Struct
from pydantic import Field, with_config
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from holdfast.config import LimitsSettings
from holdfast.errors import UnknownModel
from holdfast.front.images.sources import image_part, text_source, with_notes
from holdfast.front.ollama.answer import (
    ChatLine,
    ChatLines,
    GenerateLine,
    GenerateLines,
    OllamaError,
    decode_context,
    nanoseconds,
    ollama_error,
)
from holdfast.front.ollama.fields import OllamaGeneration, OllamaOptions, OllamaRequest
from holdfast.front.ollama.models import (
    REFUSED,
    capabilities,
    load_capabilities,
    ollama_delete,
    ollama_ps,
    ollama_pull,
    ollama_show,
    ollama_tags,
    ollama_version,
    served_model,
)
from holdfast.front.output import Embedding
from holdfast.front.request import (
    ChatPrompt,
    EmbeddingRequest,
    GenerationRequest,
    Prompt,
    new_request_id,
)
from holdfast.front.server.access import caller_of, check_admin
from holdfast.front.server.answers import GenerationPlan
from holdfast.front.server.context import RequestContext
from holdfast.front.server.dialect import Dialect, operation
from holdfast.front.server.fields import (
    INT32_MAX,
    STRICT,
    WITH_IMAGES,
    FunctionName,
    FunctionParameters,
    TextOrMany,
    UnsupportedFields,
    checked_definitions,
    non_text_part,
    optional,
    refuse_too_many,
)
from holdfast.front.server.generation import (
    SESSION_FIELDS,
    EmbeddingPlan,
    RequestBody,
    embed,
    generation_response,
)
from holdfast.front.server.openapi import accepts, returns
from holdfast.front.server.problem import invalid_field
from holdfast.front.server.request import parse, read_body
from holdfast.front.server.services import Services

_FUNCTION = "function"
# beginning of the User-Agent of a client that always asks the model to think, without a setting
# to turn that off
_COPILOT = "GitHubCopilotChat/"
_UNSUPPORTED = UnsupportedFields(neutral=SESSION_FIELDS)


@with_config(STRICT)
class PastFunction(TypedDict):
    """The function of an earlier call."""

    name: str
    arguments: NotRequired[dict[str, Any] | None]
    index: NotRequired[int | None]


@with_config(STRICT)
class PastCall(TypedDict):
    """A call in an earlier answer. Many clients lose the call's id."""

    id: NotRequired[str | None]
    function: PastFunction


@with_config(STRICT)
class OllamaMessage(TypedDict):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: NotRequired[str | None]
    thinking: NotRequired[Annotated[str | None, Field(description="The assistant's reasoning.")]]
    images: NotRequired[
        Annotated[
            list[Any] | None,
            Field(description="Images in base64, in messages of the user and in tool results."),
        ]
    ]
    tool_calls: NotRequired[Annotated[list[PastCall], Field(fail_fast=True)] | None]
    tool_name: NotRequired[
        Annotated[str | None, Field(description="For a result: the name of the tool.")]
    ]
    tool_call_id: NotRequired[
        Annotated[str | None, Field(description="For a result: the id of the call.")]
    ]


@with_config(STRICT)
class OllamaFunction(TypedDict):
    """A function that the model may call."""

    name: FunctionName
    description: NotRequired[str | None]
    parameters: NotRequired[FunctionParameters]


@with_config(STRICT)
class OllamaTool(TypedDict):
    """A tool. Only functions are supported."""

    type: NotRequired[str | None]
    function: OllamaFunction


OllamaMessages = Annotated[list[OllamaMessage], Field(fail_fast=True)]
OllamaTools = Annotated[list[OllamaTool], Field(fail_fast=True)]


def definitions(
    tools: Sequence[OllamaTool], *, limits: LimitsSettings
) -> tuple[dict[str, Any], ...]:
    """Return the tools for a prompt; fields that are null are left out.

    Raises RequestRefused, which names the invalid field.
    """
    refuse_too_many(tools, limits.max_tools, field="tools")
    for index, tool in enumerate(tools):
        if (tool_type := tool.get("type") or _FUNCTION) != _FUNCTION:
            shown = f", not {tool_type[:40]!r}"
            raise invalid_field(f"tools.{index}.type", "only functions are supported", shown=shown)
    functions = [
        {name: value for name, value in tool["function"].items() if value is not None}
        for tool in tools
    ]
    return checked_definitions(
        [{"type": _FUNCTION, "function": function} for function in functions],
        field="tools.{}.function",
        most_parts=limits.max_tool_parts,
    )


def conversation(messages: Sequence[OllamaMessage]) -> tuple[tuple[dict[str, Any], ...], bool]:
    """Convert the messages of a request to the messages of a prompt. Also returns whether they have
    images.

    Raises RequestRefused for images in a new system message.

    A result is assigned to the call with its id. Without an id, or if the calls were sent without
    ids, it is assigned to the first unanswered call of the tool that it names, or else to the first
    unanswered call.
    """
    turns: list[dict[str, Any]] = []
    open_calls: dict[str, str] = {}  # id → name, for the latest calls without a result
    has_ids = False  # whether the latest calls were sent with ids
    for index, message in enumerate(messages):
        turn: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
        if images := message.get("images"):
            field = f"messages.{index}.images"
            images_or_note = image_parts(images, field=field)
            texts = text_parts(turn["content"])
            if message["role"] not in WITH_IMAGES:
                images_or_note = [
                    non_text_part({"type": "image"}, role=message["role"], field=field)
                ]
            if message["role"] == "user":
                turn["content"] = [*images_or_note, *texts]
            else:
                turn["content"] = [*texts, *images_or_note]
        if thought := message.get("thinking"):
            turn["reasoning_content"] = thought
        if calls := message.get("tool_calls"):
            turn["tool_calls"] = _calls(calls, index)
            open_calls = {call["id"]: call["function"]["name"] for call in turn["tool_calls"]}
            has_ids = any(call.get("id") for call in calls)
        if message["role"] == "tool":
            name = message.get("tool_name") or ""
            result_id = message.get("tool_call_id") or ""
            is_id_of_call = result_id and (has_ids or result_id in open_calls)
            call_id = result_id if is_id_of_call else _answered_call_id(name, open_calls)
            turn |= {"tool_call_id": call_id, **({"name": name} if name else {})}
            open_calls.pop(call_id, None)
        turns.append(turn)
    return with_notes(turns)


def image_parts(images: Sequence[Any], *, field: str) -> list[dict[str, Any]]:
    """The images of a message as message parts. In Ollama, those of the user come before the text.

    Raises InvalidRequest for an image that is not a text. field: the request field of the images.
    """
    return [
        image_part(text_source(image, f"{field}.{number}")) for number, image in enumerate(images)
    ]


def text_parts(text: str) -> list[dict[str, Any]]:
    """The text of a message as message parts."""
    return [{"type": "text", "text": text}] if text else []


def _calls(calls: Sequence[PastCall], index: int) -> list[dict[str, Any]]:
    """Earlier calls in OpenAI's chat format. index: of the message; for missing ids."""
    return [
        {
            "id": call.get("id") or f"call_{index}_{number}",
            "type": _FUNCTION,
            "function": {
                "name": call["function"]["name"],
                "arguments": call["function"].get("arguments") or {},
            },
        }
        for number, call in enumerate(calls)
    ]


def _answered_call_id(name: str, open_calls: dict[str, str]) -> str:
    """Return the id of the call that a result without a call id answers.

    name: of the tool; empty if unknown. open_calls: id → name, for calls without a result.
    """
    ids_with_name = (call_id for call_id, called in open_calls.items() if called == name)
    return next(ids_with_name, next(iter(open_calls), f"call_{name}"))


async def respond(
    request: Request, services: Services, body_type: type[OllamaGeneration]
) -> Response:
    """Answer a request to /api/chat or /api/generate."""
    body_bytes = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    body = parse(body_type, body_bytes)
    model_id = served_model(body.model, services).id
    await load_capabilities(model_id, services)
    is_copilot = request.headers.get("user-agent", "").startswith(_COPILOT)
    if is_copilot and body.think and "thinking" not in capabilities(model_id, services):
        body.think = None
    if body.only_loads:
        return await _load_or_unload(request, body, services, model_id=model_id)
    # If the request unloads the model, a retry after a lost connection cannot get its answer.
    outlives_client = not _unloads(body, request)
    answer = await generation_response(
        request, services, lambda _: body, body=body_bytes, outlives_client=outlives_client
    )
    return with_unload(answer, body, request, services)


def _unloads(body: OllamaRequest, request: Request) -> bool:
    """Whether to unload the model after the answer, which only administrators may request."""
    return body.asks_to_unload and caller_of(request).is_admin


def with_unload(
    answer: Response, body: OllamaRequest, request: Request, services: Services
) -> Response:
    """Return the answer, and unload the model after sending it if an administrator asked for that.
    `keep_alive` from other clients is ignored.
    """
    if not _unloads(body, request):
        return answer
    model_id = served_model(body.model, services).id
    return _UnloadingResponse(answer, lambda: services.models.control.unload_when_unused(model_id))


class _UnloadingResponse(Response):
    """An answer that unloads its model after it was sent."""

    def __init__(self, answer: Response, unload: Callable[[], None]) -> None:
        super().__init__()
        self._answer = answer
        self._unload = unload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; then unload the model, even after an error."""
        try:
            await self._answer(scope, receive, send)
        finally:
            with contextlib.suppress(UnknownModel):  # the model was removed from the catalog
                self._unload()


async def _load_or_unload(
    request: Request, body: OllamaGeneration, services: Services, *, model_id: str
) -> Response:
    """Load or unload the model, then answer. Only an administrator may unload."""
    if body.asks_to_unload:
        check_admin(request)
        await services.models.control.unload(model_id)
    else:  # encoding a prompt loads the model first and generates nothing
        await services.gateway.encode(GenerationRequest(request_id="", model=model_id, prompt=" "))
    line = body.answer_format(services).line(
        done=True, done_reason="unload" if body.asks_to_unload else "load"
    )
    return Response(msgspec.json.encode(line), media_type="application/json")


class OllamaChat(OllamaGeneration):
    """A request to answer a conversation. Without messages, the model is only loaded."""

    messages: OllamaMessages | None = optional("The conversation so far, oldest first.")
    tools: OllamaTools | None = optional("The tools that the model may call.")

    @property
    def only_loads(self) -> bool:
        """Whether the list of messages is empty."""
        return not self.messages

    def answer_format(self, services: Services) -> ChatLines:
        """Return the format of the answer."""
        return ChatLines(model=self.shown_model(services), shows_logprobs=bool(self.logprobs))

    def plan(self, context: RequestContext) -> GenerationPlan:
        """Return what to generate, and the format of the answer.

        Raises RequestRefused, which names the invalid field.
        """
        services = context.services
        messages, has_images = conversation(self.messages or ())
        tools = definitions(self.tools or (), limits=services.limits)
        if tools:
            self.refuse_without("tools", services)
        last_message = messages[-1]
        prompt = ChatPrompt(
            messages=messages,
            has_images=has_images,
            tools=tools,
            # as in Ollama, a last message that is the assistant's is continued
            continue_last=last_message["role"] == "assistant"
            and bool(last_message["content"])
            and "tool_calls" not in last_message,
        )
        request = self.request(context, prompt=prompt, prompt_field="messages")
        return [request], self.answer_format(services)


@operation(
    "POST",
    "/api/chat",
    accepts(OllamaChat),
    returns(ChatLine, chunk=ChatLine, chunk_type=ChatLines.stream_type),
    summary="chat (Ollama)",
)
async def ollama_chat(request: Request, services: Services) -> Response:
    """Answer a conversation. The answer is a stream of JSON lines unless `stream` is false."""
    return await respond(request, services, OllamaChat)


class OllamaGenerate(OllamaGeneration):
    """A request to answer a prompt as a user message or, with `raw`, to continue a text.

    Without a prompt, the model is only loaded.
    """

    prompt: str | None = optional("The user message.")
    images: list[Any] | None = optional("Images in base64, which come before the prompt.")
    system: str | None = optional("The system message before the user message.")
    raw: bool | None = optional("Continue the prompt as it is, without the model's template.")
    context: Annotated[list[int], Field(fail_fast=True)] | None = optional(
        "The `context` of an earlier answer, to continue that conversation."
    )

    @property
    def only_loads(self) -> bool:
        """Whether the prompt is empty."""
        return not self.prompt

    def answer_format(self, services: Services) -> GenerateLines:
        """Return the format of the answer."""
        return GenerateLines(model=self.shown_model(services), shows_logprobs=bool(self.logprobs))

    def plan(self, context: RequestContext) -> GenerationPlan:
        """Return what to generate, and the format of the answer.

        Raises RequestRefused, which names the invalid field.
        """
        prompt = self._prompt(context.services)
        answer_format = self.answer_format(context.services)
        if isinstance(prompt, ChatPrompt):
            answer_format.turns = [_without_images(turn) for turn in prompt.messages]
        return [self.request(context, prompt=prompt, prompt_field="prompt")], answer_format

    def _prompt(self, services: Services) -> Prompt:
        """The text to continue, or the conversation to answer. Raises RequestRefused."""
        text = self.prompt or ""
        if self.raw:
            for field in ("system", "context", "images"):
                if getattr(self, field):
                    raise invalid_field(field, "not allowed with `raw`: a raw prompt is complete")
            return text
        earlier_turns: tuple[dict[str, Any], ...] = ()
        if self.context:
            earlier_turns = decode_context(self.context, limit_bytes=services.limits.max_body_bytes)
        if self.system:  # replaces the earlier one, because clients send it with every prompt
            others = [turn for turn in earlier_turns if turn["role"] != "system"]
            earlier_turns = ({"role": "system", "content": self.system}, *others)
        content: Any = text
        if self.images:
            content = [*image_parts(self.images, field="images"), *text_parts(text)]
        return ChatPrompt(messages=(*earlier_turns, {"role": "user", "content": content}))


def _without_images(turn: dict[str, Any]) -> dict[str, Any]:
    """The form of a turn in a `context`, without images, as in Ollama."""
    content = turn["content"]
    if isinstance(content, str):
        return turn
    return {**turn, "content": "".join(part.get("text", "") for part in content)}


@operation(
    "POST",
    "/api/generate",
    accepts(OllamaGenerate),
    returns(GenerateLine, chunk=GenerateLine, chunk_type=GenerateLines.stream_type),
    summary="completions (Ollama)",
)
async def ollama_generate(request: Request, services: Services) -> Response:
    """Answer a prompt. The answer is a stream of JSON lines unless `stream` is false."""
    return await respond(request, services, OllamaGenerate)


class EmbeddedTexts(Struct, frozen=True, kw_only=True):
    """The vectors of all texts, in the order of the texts. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    cached_tokens: int  # Holdfast's own field, as in the other answers


class EmbeddedPrompt(Struct, frozen=True, kw_only=True):
    """The vector of the prompt."""

    embedding: list[float]


class OllamaEmbedding(OllamaRequest):
    """The fields of both endpoints that embed texts."""

    options: OllamaOptions | None = optional("Checked, but has no effect.")

    def plan_of(
        self,
        context: RequestContext,
        inputs: Sequence[str],
        create_answer: Callable[[Sequence[Embedding]], Struct],
        *,
        truncates: bool = True,
        dimensions: int | None = None,
        input_field: str = "input",
        is_list: bool = False,
    ) -> EmbeddingPlan:
        """Return what to embed, and the function that encodes the answer. Raises RequestRefused.

        create_answer: creates the answer from the vectors of all inputs.
        input_field: the request field of the inputs. is_list: whether that field has a list.
        """
        services = context.services
        _UNSUPPORTED.refuse(self.model_extra)
        refuse_too_many(inputs, services.limits.max_inputs, field=input_field)
        request = EmbeddingRequest(
            request_id=new_request_id("ollama-"),
            model=served_model(self.model, services).id,
            inputs=tuple(inputs),
            dimensions=dimensions,
            truncates=truncates,
            input_field=input_field,
            is_list=is_list,
            tenant=context.tenant,
            service=context.service(),
        )
        return request, lambda vectors: msgspec.json.encode(create_answer(vectors))


class OllamaEmbed(OllamaEmbedding):
    """A request to embed texts."""

    input: TextOrMany[str] | None = optional(
        "A text or several texts. Without any, the model is only loaded; there are no vectors."
    )
    truncate: bool | None = optional(
        "False: refuse a text that is too long. Otherwise: cut off its end."
    )
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = optional(
        "Number of leading dimensions to keep; the vector is then normalized again."
    )

    def plan(self, context: RequestContext) -> EmbeddingPlan:
        """Return what to embed, and the format of the answer. Raises RequestRefused."""
        began = time.perf_counter()
        model = self.shown_model(context.services)

        def create_answer(vectors: Sequence[Embedding]) -> EmbeddedTexts:
            total_seconds = time.perf_counter() - began
            prefill_seconds = sum(each.timings.prefill_seconds for each in vectors)
            return EmbeddedTexts(
                model=model,
                embeddings=[_numbers(each) for each in vectors],
                total_duration=nanoseconds(total_seconds),
                load_duration=nanoseconds(total_seconds - prefill_seconds),
                prompt_eval_count=sum(each.prompt_tokens for each in vectors),
                cached_tokens=sum(each.cache_report.cached_tokens for each in vectors),
            )

        texts = self.input or []
        return self.plan_of(
            context,
            [texts] if isinstance(texts, str) else texts,
            create_answer,
            truncates=self.truncate is not False,
            dimensions=self.dimensions,
            is_list=isinstance(self.input, list),
        )


class OllamaEmbeddings(OllamaEmbedding):
    """A request to embed a text, for the older endpoint."""

    prompt: str | None = optional(
        "The text to embed. Without it, the model is only loaded, and the vector is empty."
    )

    def plan(self, context: RequestContext) -> EmbeddingPlan:
        """Return what to embed, and the format of the answer. Raises RequestRefused."""

        def create_answer(vectors: Sequence[Embedding]) -> EmbeddedPrompt:
            return EmbeddedPrompt(embedding=_numbers(vectors[0]) if vectors else [])

        return self.plan_of(
            context, [self.prompt] if self.prompt else [], create_answer, input_field="prompt"
        )


@operation(
    "POST",
    "/api/embed",
    accepts(OllamaEmbed),
    returns(EmbeddedTexts),
    summary="embeddings (Ollama)",
)
async def ollama_embed(request: Request, services: Services) -> Response:
    """Compute an embedding vector for each text."""
    return await _embed(request, services, OllamaEmbed)


@operation("POST", "/api/embeddings", accepts(OllamaEmbeddings), returns(EmbeddedPrompt))
async def ollama_embeddings(request: Request, services: Services) -> Response:
    """Compute the embedding vector of one text. This is the older form of /api/embed."""
    return await _embed(request, services, OllamaEmbeddings)


async def _embed(
    request: Request, services: Services, body_type: type[OllamaEmbed] | type[OllamaEmbeddings]
) -> Response:
    """Answer a request for embeddings, and then unload the model if the request asks for it."""
    parsed_bodies: list[OllamaRequest] = []  # has one element once `embed` has parsed the body

    def parse_body(body_bytes: bytes) -> RequestBody[EmbeddingPlan]:
        body = parse(body_type, body_bytes)
        parsed_bodies.append(body)
        return body

    answer = await embed(request, services, parse_body)
    return with_unload(answer, parsed_bodies[0], request, services)


def _numbers(embedding: Embedding) -> list[float]:
    return array("f", embedding.vector).tolist()


OLLAMA = Dialect(
    name="Ollama's API",
    error=ollama_error,
    error_shape=OllamaError,
    prefixes=("/api",),
    serves="Ollama's API: /api/chat, /api/generate, /api/embed, /api/tags, /api/show",
    operations=(
        ollama_chat,
        ollama_generate,
        ollama_embed,
        ollama_embeddings,
        ollama_tags,
        ollama_show,
        ollama_ps,
        ollama_version,
        ollama_pull,
        ollama_delete,
        *REFUSED,
    ),
)

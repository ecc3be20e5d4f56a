"""POST /api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

import contextlib
import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from msgspec import Struct
from pydantic import Discriminator, Field, Tag, with_config
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from holdfast.config import LimitsSettings
from holdfast.errors import UnknownModel
from holdfast.front.ollama.answer import (
    ChatLine,
    ChatLines,
    GenerateLine,
    GenerateLines,
    OllamaError,
    nanoseconds,
    unpacked,
)
from holdfast.front.ollama.fields import OllamaGeneration, OllamaOptions, OllamaRequest
from holdfast.front.ollama.models import (
    REFUSED,
    capabilities,
    learn_capabilities,
    ollama_delete,
    ollama_ps,
    ollama_pull,
    ollama_show,
    ollama_tags,
    ollama_version,
    served_model,
)
from holdfast.front.server.access import caller_of, check_admin
from holdfast.front.server.answers import AnswerPlan
from holdfast.front.server.dialect import Dialect, answers_of, operation, request_of
from holdfast.front.server.fields import (
    INT32_MAX,
    MANY,
    ONE,
    STRICT,
    FunctionName,
    UnsupportedFields,
    checked_definitions,
    one_or_many,
    optional,
    refuse_too_many,
    refused_media,
    without_media,
)
from holdfast.front.server.generation import SESSION_FIELDS, EmbeddingPlan, embed, generate
from holdfast.front.server.problem import Problem, RequestRefused
from holdfast.front.server.request import parse, read_body
from holdfast.front.server.services import Services
from holdfast.wire.output import Embedding
from holdfast.wire.requests import ChatPrompt, EmbeddingRequest, GenerationRequest, Prompt

_FUNCTION = "function"
_COPILOT = "GitHubCopilotChat/"  # asks every model to think, and cannot be told not to
_UNSUPPORTED = UnsupportedFields(neutral=SESSION_FIELDS)
Inputs = Annotated[
    Annotated[str, Tag(ONE)] | Annotated[list[str], Field(fail_fast=True), Tag(MANY)],
    Discriminator(one_or_many),
]


@with_config(STRICT)
class PastFunction(TypedDict):
    """What was called, and with what."""

    name: str
    arguments: NotRequired[dict[str, Any] | None]
    index: NotRequired[int | None]


@with_config(STRICT)
class PastCall(TypedDict):
    """A call of an earlier answer. Many clients do not keep its id."""

    id: NotRequired[str | None]
    function: PastFunction


@with_config(STRICT)
class OllamaMessage(TypedDict):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: NotRequired[str | None]
    thinking: NotRequired[
        Annotated[str | None, Field(description="What the assistant thought before it answered.")]
    ]
    images: NotRequired[
        Annotated[
            list[Any] | None,
            Field(
                description="Not supported by this version yet; in results of tools they are left out."
            ),
        ]
    ]
    tool_calls: NotRequired[Annotated[list[PastCall], Field(fail_fast=True)] | None]
    tool_name: NotRequired[
        Annotated[str | None, Field(description="Of a result: the tool that was called.")]
    ]
    tool_call_id: NotRequired[
        Annotated[str | None, Field(description="Of a result: the id of the call.")]
    ]


@with_config(STRICT)
class OllamaFunction(TypedDict):
    """A function that the model may call."""

    name: FunctionName
    description: NotRequired[str | None]
    parameters: NotRequired[
        Annotated[dict[str, Any] | None, Field(description="JSON schema of its arguments.")]
    ]


@with_config(STRICT)
class OllamaTool(TypedDict):
    """A tool. Only functions are served."""

    type: NotRequired[str | None]
    function: OllamaFunction


OllamaMessages = Annotated[list[OllamaMessage], Field(fail_fast=True)]
OllamaTools = Annotated[list[OllamaTool], Field(fail_fast=True)]


def definitions(
    tools: Sequence[OllamaTool], *, limits: LimitsSettings
) -> tuple[dict[str, Any], ...]:
    """The tools as a prompt has them, without nulls.

    Raises RequestRefused naming what cannot be served.
    """
    refuse_too_many(tools, limits.max_tools, field="tools")
    for place, tool in enumerate(tools):
        if (kind := tool.get("type") or _FUNCTION) != _FUNCTION:
            field, shown = f"tools.{place}.type", f", not {kind[:40]!r}"
            raise RequestRefused(
                f"`{field}`: only functions are supported", field=field, shown=shown
            )
    functions = [
        {name: value for name, value in tool["function"].items() if value is not None}
        for tool in tools
    ]
    ready = [{"type": _FUNCTION, "function": function} for function in functions]
    return checked_definitions(ready, field="tools.{}.function", most_parts=limits.max_tool_parts)


def conversation(messages: Sequence[OllamaMessage]) -> tuple[dict[str, Any], ...]:
    """The messages as a prompt has them.

    Raises RequestRefused for images of the user's; results have notes in their place.

    A result belongs to the call whose id it has; without one to the first of that name which has
    none yet, else to the first.
    """
    ready: list[dict[str, Any]] = []
    open_calls: dict[str, str] = {}  # id → name, of the latest calls without a result
    for place, message in enumerate(messages):
        turn: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
        if images := message.get("images"):
            if message["role"] != "tool":
                raise refused_media("image", field=f"messages.{place}.images")
            notes = without_media([{"type": "image"}] * len(images))
            turn["content"] = "\n".join(
                [*filter(None, [turn["content"]]), *[note["text"] for note in notes]]
            )
        if thought := message.get("thinking"):
            turn["reasoning_content"] = thought
        if calls := message.get("tool_calls"):
            turn["tool_calls"] = _calls(calls, place)
            open_calls = {call["id"]: call["function"]["name"] for call in turn["tool_calls"]}
        if message["role"] == "tool":
            name = message.get("tool_name") or ""
            answered = _answered(message.get("tool_call_id") or "", name, open_calls)
            turn |= {"tool_call_id": answered, **({"name": name} if name else {})}
            open_calls.pop(answered, None)
        ready.append(turn)
    return tuple(ready)


def _calls(calls: Sequence[PastCall], place: int) -> list[dict[str, Any]]:
    return [
        {
            "id": call.get("id") or f"call_{place}_{number}",
            "type": _FUNCTION,
            "function": {
                "name": call["function"]["name"],
                "arguments": call["function"].get("arguments") or {},
            },
        }
        for number, call in enumerate(calls)
    ]


def _answered(given_id: str, name: str, open_calls: dict[str, str]) -> str:
    """The id of the call that a result is of."""
    if given_id in open_calls:
        return given_id
    of_that_name = (call for call, called in open_calls.items() if called == name)
    return next(of_that_name, next(iter(open_calls), given_id or f"call_{name}"))


async def answered(request: Request, services: Services, kind: type[OllamaGeneration]) -> Response:
    """The answer to a request of this kind."""
    body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    asked = parse(kind, body)
    model_id = served_model(asked.model, services).id
    await learn_capabilities(model_id, services)
    is_copilots = request.headers.get("user-agent", "").startswith(_COPILOT)
    if is_copilots and asked.think and "thinking" not in capabilities(model_id, services):
        asked.think = None
    if asked.asks_nothing:
        return await _loaded(request, asked, services, model_id=model_id)
    # A model that is to be unloaded does not wait for a client that may come back.
    outlives_client = not _unloads(asked, request)
    answer = await generate(
        request,
        services,
        lambda _: asked.plan(services),
        body=body,
        outlives_client=outlives_client,
    )
    return with_unload(answer, asked, request, services)


def _unloads(asked: OllamaRequest, request: Request) -> bool:
    return asked.asks_to_unload and caller_of(request).is_admin


def with_unload(
    answer: Response, asked: OllamaRequest, request: Request, services: Services
) -> Response:
    """An answer behind which its model is let go of, if an administrator asks for that: of others
    it is a hint like any.
    """
    if not _unloads(asked, request):
        return answer
    model_id = served_model(asked.model, services).id
    return _Last(answer, lambda: services.control.let_go(model_id))


class _Last(Response):
    """An answer behind which its model is let go of."""

    def __init__(self, answer: Response, let_go: Callable[[], None]) -> None:
        super().__init__()
        self._answer, self._let_go = answer, let_go

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; however it ends, the model is not needed any more."""
        try:
            await self._answer(scope, receive, send)
        finally:
            with contextlib.suppress(UnknownModel):  # it is gone from the catalog meanwhile
                self._let_go()


async def _loaded(
    request: Request, asked: OllamaGeneration, services: Services, *, model_id: str
) -> Response:
    """The answer when the model is there, or gone. To unload it takes an administrator."""
    if asked.asks_to_unload:
        check_admin(request)
        await services.control.unload(model_id)
    else:
        await services.encode(GenerationRequest(request_id="", model=model_id, prompt=" "))
    line = asked.form(services).line(
        done=True, done_reason="unload" if asked.asks_to_unload else "load"
    )
    return Response(msgspec.json.encode(line), media_type="application/json")


class OllamaChat(OllamaGeneration):
    """A conversation to be answered. Without messages the model is loaded, and nothing else."""

    messages: OllamaMessages | None = Field(
        None, description="The conversation so far, oldest first."
    )
    tools: OllamaTools | None = Field(None, description="What the model may call.")

    @property
    def asks_nothing(self) -> bool:
        """Whether there is nothing to be answered."""
        return not self.messages

    def form(self, services: Services) -> ChatLines:
        """How the answer looks."""
        return ChatLines(model=self.shown_model(services), shows_logprobs=bool(self.logprobs))

    def plan(self, services: Services) -> AnswerPlan:
        """What to generate and how to answer.

        Raises RequestRefused naming the field that cannot be served.
        """
        messages = conversation(self.messages or ())
        tools = definitions(self.tools or (), limits=services.limits)
        if tools:
            self.refuse_unless("tools", services)
        last = messages[-1]
        prompt = ChatPrompt(
            messages=messages,
            tools=tools,
            # As Ollama does: what the assistant has begun is gone on with.
            continue_last=last["role"] == "assistant"
            and bool(last["content"])
            and "tool_calls" not in last,
        )
        return self.plan_of(
            self.request(services, prompt=prompt, prompt_field="messages"), self.form(services)
        )


@operation(
    "POST",
    "/api/chat",
    request_of(OllamaChat),
    answers_of(ChatLine, chunk=ChatLine, chunk_type=ChatLines.stream_type),
    summary="chat (Ollama)",
)
async def ollama_chat(request: Request, services: Services) -> Response:
    """Answer a conversation; as lines of JSON unless `stream` is false."""
    return await answered(request, services, OllamaChat)


class OllamaGenerate(OllamaGeneration):
    """A prompt to be answered as a user's message, or, with `raw`, a text to be continued.

    Without one the model is loaded.
    """

    prompt: str | None = Field(None, description="What the user says.")
    system: str | None = Field(None, description="The system message before it.")
    raw: bool | None = Field(
        None, description="Continue the prompt as it is, without the model's template."
    )
    context: Annotated[list[int], Field(fail_fast=True)] | None = Field(
        None, description="Of an earlier answer, as it came, to go on from there."
    )

    @property
    def asks_nothing(self) -> bool:
        """Whether there is nothing to be answered."""
        return not self.prompt

    def form(self, services: Services) -> GenerateLines:
        """How the answer looks."""
        return GenerateLines(model=self.shown_model(services), shows_logprobs=bool(self.logprobs))

    def plan(self, services: Services) -> AnswerPlan:
        """What to generate and how to answer.

        Raises RequestRefused naming the field that cannot be served.
        """
        prompt, form = self._asked(services), self.form(services)
        if isinstance(prompt, ChatPrompt):
            form.turns = prompt.messages
        return self.plan_of(self.request(services, prompt=prompt, prompt_field="prompt"), form)

    def _asked(self, services: Services) -> Prompt:
        text = self.prompt or ""
        if self.raw:
            for field in ("system", "context"):
                if getattr(self, field):
                    raise RequestRefused(
                        f"`{field}`: a prompt that is sent with `raw` has all of it in itself",
                        field=field,
                    )
            return text
        past = (
            unpacked(self.context, limit_bytes=services.limits.max_body_bytes)
            if self.context
            else ()
        )
        if self.system:  # clients send it with every prompt: it takes the place of the earlier one
            past = (
                {"role": "system", "content": self.system},
                *(turn for turn in past if turn["role"] != "system"),
            )
        return ChatPrompt(messages=(*past, {"role": "user", "content": text}))


@operation(
    "POST",
    "/api/generate",
    request_of(OllamaGenerate),
    answers_of(GenerateLine, chunk=GenerateLine, chunk_type=GenerateLines.stream_type),
    summary="completions (Ollama)",
)
async def ollama_generate(request: Request, services: Services) -> Response:
    """Answer a prompt; as lines of JSON unless `stream` is false."""
    return await answered(request, services, OllamaGenerate)


class EmbeddedTexts(Struct, frozen=True, kw_only=True):
    """The vectors of all texts, in their order. Durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    cached_tokens: int  # Holdfast's own, as in the other answers


class EmbeddedPrompt(Struct, frozen=True, kw_only=True):
    """The vector of the prompt."""

    embedding: list[float]


class OllamaEmbedding(OllamaRequest):
    """What both forms have in common."""

    options: OllamaOptions | None = optional("Checked, without effect.")

    def plan_of(
        self,
        services: Services,
        inputs: Sequence[str],
        form: Callable[[Sequence[Embedding]], Struct],
        *,
        truncates: bool = True,
        dimensions: int | None = None,
        input_field: str = "input",
        is_list: bool = False,
    ) -> EmbeddingPlan:
        """What to embed and how to answer. Raises RequestRefused."""
        _UNSUPPORTED.refuse(self.model_extra)
        refuse_too_many(inputs, services.limits.max_inputs, field=input_field)
        request = EmbeddingRequest(
            request_id=f"ollama-{uuid.uuid4().hex}",
            model=served_model(self.model, services).id,
            inputs=tuple(inputs),
            dimensions=dimensions,
            truncates=truncates,
            input_field=input_field,
            is_list=is_list,
        )
        return EmbeddingPlan(
            request=request,
            form=lambda vectors: msgspec.json.encode(form(vectors)),
            cache_salt=self.cache_salt or "",
        )


class OllamaEmbed(OllamaEmbedding):
    """Texts of each of which a vector is wanted."""

    input: Inputs | None = optional(
        "A text, or several. Without one the model is loaded, and no vector comes."
    )
    truncate: bool | None = optional(
        "False: a text that is too long is refused. Otherwise its end is cut off."
    )
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = optional(
        "Keep so many of the first numbers, and bring the vector to length 1 again."
    )

    def plan(self, services: Services) -> EmbeddingPlan:
        """What to embed and how to answer. Raises RequestRefused."""
        began, model = time.perf_counter(), self.shown_model(services)

        def form(vectors: Sequence[Embedding]) -> EmbeddedTexts:
            total = time.perf_counter() - began
            return EmbeddedTexts(
                model=model,
                embeddings=[_numbers(each) for each in vectors],
                total_duration=nanoseconds(total),
                load_duration=nanoseconds(
                    total - sum(each.timings.prefill_seconds for each in vectors)
                ),
                prompt_eval_count=sum(each.prompt_tokens for each in vectors),
                cached_tokens=sum(each.memory.cached_tokens for each in vectors),
            )

        given, is_list = self.input or [], isinstance(self.input, list)
        return self.plan_of(
            services,
            [given] if isinstance(given, str) else given,
            form,
            truncates=self.truncate is not False,
            dimensions=self.dimensions,
            is_list=is_list,
        )


class OllamaEmbeddings(OllamaEmbedding):
    """The older form, of one text."""

    prompt: str | None = optional(
        "The text. Without one the model is loaded, and the vector is empty."
    )

    def plan(self, services: Services) -> EmbeddingPlan:
        """What to embed and how to answer. Raises RequestRefused."""

        def form(vectors: Sequence[Embedding]) -> EmbeddedPrompt:
            return EmbeddedPrompt(embedding=_numbers(vectors[0]) if vectors else [])

        return self.plan_of(
            services, [self.prompt] if self.prompt else [], form, input_field="prompt"
        )


@operation(
    "POST",
    "/api/embed",
    request_of(OllamaEmbed),
    answers_of(EmbeddedTexts),
    summary="embeddings (Ollama)",
)
async def ollama_embed(request: Request, services: Services) -> Response:
    """Make a vector of each text."""
    return await _embedded(request, services, OllamaEmbed)


@operation("POST", "/api/embeddings", request_of(OllamaEmbeddings), answers_of(EmbeddedPrompt))
async def ollama_embeddings(request: Request, services: Services) -> Response:
    """Make a vector of one text: the older form of /api/embed."""
    return await _embedded(request, services, OllamaEmbeddings)


async def _embedded(
    request: Request, services: Services, kind: type[OllamaEmbed] | type[OllamaEmbeddings]
) -> Response:
    asked: list[OllamaRequest] = []

    def plan_of(body: bytes) -> EmbeddingPlan:
        wanted = parse(kind, body)
        asked.append(wanted)
        return wanted.plan(services)

    answer = await embed(request, services, plan_of)
    return with_unload(answer, asked[0], request, services)


def _numbers(embedding: Embedding) -> list[float]:
    return array("f", embedding.vector).tolist()


def ollama_error(problem: Problem) -> OllamaError:
    """Ollama's form."""
    return OllamaError(error=problem.message_with_field)


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

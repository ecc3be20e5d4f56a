"""POST /api/embed and its older form, /api/embeddings: vectors of texts."""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.ollama.answer import nanoseconds
from holdfast.front.ollama.fields import OllamaOptions, OllamaRequest
from holdfast.front.ollama.generation import with_unload
from holdfast.front.ollama.models import served_model
from holdfast.front.server.dialect import answers_of, operation, request_of
from holdfast.front.server.fields import (
    INT32_MAX,
    MANY,
    ONE,
    UnsupportedFields,
    one_or_many,
    refuse_too_many,
)
from holdfast.front.server.reading import SESSION_FIELDS, EmbeddingPlan, embed
from holdfast.front.server.request import parse
from holdfast.front.server.services import Services
from holdfast.wire.output import Embedding
from holdfast.wire.requests import EmbeddingRequest

_UNSUPPORTED = UnsupportedFields(neutral=SESSION_FIELDS)
Inputs = Annotated[
    Annotated[str, Tag(ONE)] | Annotated[list[str], Field(fail_fast=True), Tag(MANY)],
    Discriminator(one_or_many),
]


class EmbeddedTexts(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors of all texts, in their order. Durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    cached_tokens: int  # Holdfast's own, as in the other answers


class EmbeddedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of the prompt."""

    embedding: list[float]


class OllamaEmbedding(OllamaRequest):
    """What both forms have in common."""

    options: OllamaOptions | None = Field(None, description="Checked, without effect.")

    def plan_of(
        self,
        services: Services,
        inputs: Sequence[str],
        form: Callable[[Sequence[Embedding]], msgspec.Struct],
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

    input: Inputs | None = Field(
        None,
        description="A text, or several. Without one the model is loaded, and no vector comes.",
    )
    truncate: bool | None = Field(
        None, description="False: a text that is too long is refused. Otherwise its end is cut off."
    )
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(
        None,
        description="Keep so many of the first numbers, and bring the vector to length 1 again.",
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

    prompt: str | None = Field(
        None, description="The text. Without one the model is loaded, and the vector is empty."
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

"""POST /v1/embeddings: what it takes, and the form of its answer."""

from __future__ import annotations

import base64
import uuid
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.openai.answers import PromptTokensDetails
from holdfast.front.openai.fields import PromptField, prompts_of
from holdfast.front.server.dialect import answers_of, operation, request_of
from holdfast.front.server.fields import (
    INT32_MAX,
    Model,
    SaltField,
    UnsupportedFields,
    refuse_too_many,
)
from holdfast.front.server.reading import SESSION_FIELDS, EmbeddingPlan, embed
from holdfast.front.server.request import parse
from holdfast.front.server.services import Services, model_of
from holdfast.wire.output import Embedding, TextRead
from holdfast.wire.requests import EmbeddingRequest, Pooling

_UNSUPPORTED = UnsupportedFields(
    neutral={
        **SESSION_FIELDS,
        "messages": ([],),
        "normalize": (True,),
        **dict.fromkeys(("input_type", "task", "prompt_name", "instruction"), ()),
        **dict.fromkeys(("late_chunking", "return_multivector"), (False,)),
        "add_special_tokens": (True,),
        "truncate_prompt_tokens": (-1,),
    },
    reasons={
        **dict.fromkeys(
            ("input_type", "task", "prompt_name", "instruction"),
            "write the instruction in front of the text",
        ),
        "messages": "send the text of the conversation as `input`",
        "normalize": "vectors have length 1 here",
        "add_special_tokens": "send token ids as `input` instead",
        "truncate_prompt_tokens": "-1 cuts inputs to the model's window, other lengths are not supported",
    },
)


class ReadUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request that generates nothing."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class VectorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One vector: numbers, or their bytes (float32) in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class VectorList(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors of all inputs, in their order."""

    object: Literal["list"] = "list"
    data: list[VectorEntry]
    model: str
    usage: ReadUsage


class EmbeddingsRequest(SaltField):
    """Texts, or token ids, of each of which a vector is wanted."""

    input: PromptField = Field(
        description="A text, several texts, token ids, or several lists of them."
    )
    model: Model | None = Field(
        None, description="Id of a model that /v1/models lists; the first of them if not given."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Numbers, or their float32 bytes in base64."
    )
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(
        None,
        description="Keep so many of the first numbers, and bring the vector to length 1 again.",
    )
    pooling: Pooling | None = Field(
        None,
        description="Which hidden states make the vector: the mean of all, or the last; if not given, as the model was trained.",
    )
    user: str | None = Field(None, description="Accepted, without effect.")

    def plan(self, services: Services) -> EmbeddingPlan:
        """What to embed and how to answer.

        Raises RequestRefused naming the field that cannot be served.
        """
        extras = self.model_extra or {}
        _UNSUPPORTED.refuse(extras)
        inputs = prompts_of(self.input)
        refuse_too_many(inputs, services.limits.max_inputs, field="input")
        request = EmbeddingRequest(
            request_id=f"embd-{uuid.uuid4().hex}",
            model=model_of(services, self.model),
            inputs=inputs,
            pooling=self.pooling,
            dimensions=self.dimensions,
            truncates=extras.get("truncate_prompt_tokens") == -1,
            is_list=isinstance(self.input, list) and not isinstance(self.input[0], int),
        )
        return EmbeddingPlan(
            request=request,
            form=lambda vectors: self._form(request.model, vectors),
            cache_salt=self.cache_salt or "",
        )

    def _form(self, model: str, vectors: Sequence[Embedding]) -> bytes:
        written = _base64 if self.encoding_format == "base64" else _numbers
        answer = VectorList(
            # encoded one by one, so that the interpreter can turn to others between two of
            # thousands
            data=[
                msgspec.Raw(
                    msgspec.json.encode(VectorEntry(index=index, embedding=written(each.vector)))
                )  # type: ignore[misc]
                for index, each in enumerate(vectors)
            ],
            model=model,
            usage=usage_of(vectors),
        )
        return msgspec.json.encode(answer)


def usage_of(read: Sequence[TextRead]) -> ReadUsage:
    """Counts over all texts that were read."""
    tokens = sum(each.prompt_tokens for each in read)
    details = PromptTokensDetails(cached_tokens=sum(each.memory.cached_tokens for each in read))
    return ReadUsage(prompt_tokens=tokens, total_tokens=tokens, prompt_tokens_details=details)


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def _numbers(vector: bytes) -> list[float]:
    return array("f", vector).tolist()


@operation(
    "POST",
    "/v1/embeddings",
    request_of(EmbeddingsRequest),
    answers_of(VectorList),
    summary="embeddings (OpenAI)",
)
async def create_embedding(request: Request, services: Services) -> Response:
    """Make a vector of each text."""
    return await embed(
        request, services, lambda body: parse(EmbeddingsRequest, body).plan(services)
    )

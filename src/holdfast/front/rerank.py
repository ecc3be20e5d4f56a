"""POST /v1/rerank, in the format that Jina, Cohere, vLLM and llama.cpp share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from pydantic import BaseModel, Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.openai.answer import ErrorBody, openai_error
from holdfast.front.openai.endpoints import ReadUsage, usage_of
from holdfast.front.output import Relevance
from holdfast.front.request import RankMethod, RankRequest, new_request_id
from holdfast.front.server.context import RequestContext
from holdfast.front.server.dialect import Dialect, operation
from holdfast.front.server.fields import (
    INT32_MAX,
    STRICT,
    TAG_MARK,
    CacheSaltField,
    Model,
    UnsupportedFields,
    optional,
    refuse_too_many,
)
from holdfast.front.server.generation import SESSION_FIELDS, RankPlan, rank
from holdfast.front.server.openapi import accepts, returns
from holdfast.front.server.problem import invalid_field
from holdfast.front.server.request import parse
from holdfast.front.server.services import Services, model_of

_TRUNCATION_FIELDS = (
    "max_tokens_per_doc",
    "max_chunks_per_doc",
    "max_query_tokens",
    "truncate_prompt_tokens",
    "chunk_size",
    "overlap_tokens",
)
_UNSUPPORTED = UnsupportedFields(
    neutral={
        **SESSION_FIELDS,
        **dict.fromkeys(_TRUNCATION_FIELDS, ()),
        "rank_fields": ([], ["text"]),
        "return_embeddings": (False,),
        "raw_scores": (False,),
    },
    reasons={
        **dict.fromkeys(
            _TRUNCATION_FIELDS,
            "nothing is truncated: send documents that the model can read as a whole",
        ),
        "rank_fields": "put everything to be ranked into `text`",
        "raw_scores": "a result's `logprob` is the raw score",
    },
)


class TextObject(BaseModel):
    """A document or query in the form `{"text": "..."}`, equal to the plain text."""

    model_config = STRICT

    text: str


def _tag_of_text(value: Any) -> str:
    """The tag of the form that a text has, by which pydantic chooses the type to read it as."""
    return TAG_MARK + ("object" if isinstance(value, dict | TextObject) else "text")


TextOrObject = Annotated[
    Annotated[str, Tag(TAG_MARK + "text")] | Annotated[TextObject, Tag(TAG_MARK + "object")],
    Discriminator(_tag_of_text),
]


class RerankBody(CacheSaltField):
    """The body of a rerank request: a query, and the documents to rank."""

    query: TextOrObject = Field(description="The query: a text, or an object with `text`.")
    documents: Annotated[list[TextOrObject], Field(min_length=1, fail_fast=True)] = Field(
        description="The documents: texts, or objects with `text`."
    )
    model: Model | None = optional("A model that /v1/models lists. Default: the first one.")
    top_n: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = optional(
        "Maximum number of results. The best ones are returned."
    )
    return_documents: bool | None = optional(
        "Whether to return the texts with the results. Default: true."
    )
    instruction: str | None = optional(
        "An instruction that says what makes a document relevant, for models that were trained "
        "with instructions."
    )
    method: RankMethod | None = optional(
        "How to score a document. yes_no: ask the model whether it is relevant. likelihood: how "
        "likely the query is after the document. The default depends on the model."
    )
    user: str | None = optional("Accepted and ignored.")

    def plan(self, context: RequestContext) -> RankPlan:
        """Convert the body into a plan: what to rank, and how to answer.

        Raises RequestRefused, which names the invalid field.
        """
        _UNSUPPORTED.refuse(self.model_extra)
        documents = tuple(map(_text, self.documents))
        refuse_too_many(documents, context.services.limits.max_inputs, field="documents")
        if not (query := _text(self.query)):
            raise invalid_field("query", "must not be empty")
        request = RankRequest(
            request_id=new_request_id("rank-"),
            model=model_of(context.services, self.model),
            query=query,
            documents=documents,
            instruction=self.instruction or "",
            method=self.method,
            tenant=context.tenant,
            service=context.service(),
        )
        return request, lambda relevances: self._encode_answer(request, relevances)

    def _encode_answer(self, request: RankRequest, relevances: Sequence[Relevance]) -> bytes:
        """The answer as JSON: the best documents first, at most `top_n`."""
        indices_by_score = sorted(
            range(len(relevances)), key=lambda index: -relevances[index].score
        )[: self.top_n]
        results = [
            RankedDocument(
                index=index,
                relevance_score=relevances[index].score,
                logprob=relevances[index].logprob,
                document=UNSET
                if self.return_documents is False
                else RankedText(text=request.documents[index]),
            )
            for index in indices_by_score
        ]
        answer = RankedList(
            id=request.request_id,
            model=request.model,
            method=relevances[0].method,
            results=results,
            usage=usage_of(relevances),
        )
        return msgspec.json.encode(answer)


class RankedText(Struct, frozen=True, kw_only=True):
    """The text of a document."""

    text: str


class RankedDocument(Struct, frozen=True, kw_only=True):
    """A document with its score."""

    index: int  # of the document in the request
    relevance_score: float  # 0 to 1
    logprob: float  # the logarithm of the score
    document: RankedText | UnsetType = UNSET


class RankedList(Struct, frozen=True, kw_only=True):
    """The answer: the documents, the most relevant first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    method: RankMethod
    results: list[RankedDocument]
    usage: ReadUsage


def _text(text_or_object: str | TextObject) -> str:
    return text_or_object if isinstance(text_or_object, str) else text_or_object.text


@operation(
    "POST", "/v1/rerank", accepts(RerankBody), returns(RankedList), summary="reranking (Jina)"
)
async def rerank(request: Request, services: Services) -> Response:
    """Rank documents by their relevance to a query."""
    return await rank(request, services, partial(parse, RerankBody))


@operation("POST", "/v2/rerank", accepts(RerankBody), returns(RankedList))
async def rerank_as_cohere(request: Request, services: Services) -> Response:
    """Rank documents like /v1/rerank; Cohere's clients use this path."""
    return await rank(request, services, partial(parse, RerankBody))


RERANK = Dialect(
    name="The rerank API",
    error=openai_error,
    error_shape=ErrorBody,
    prefixes=("/v1/rerank", "/v2/rerank"),
    serves="reranking: /v1/rerank",
    operations=(rerank, rerank_as_cohere),
)

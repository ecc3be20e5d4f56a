"""The API by which documents are ranked. Its errors have OpenAI's form."""

from __future__ import annotations

from holdfast.front.openai.answers import ErrorBody, openai_error
from holdfast.front.rerank.rerank import rerank, rerank_as_cohere
from holdfast.front.server.dialect import Dialect

RERANK = Dialect(
    name="The rerank API",
    error=openai_error,
    error_shape=ErrorBody,
    prefixes=("/v1/rerank", "/v2/rerank"),
    serves="reranking: /v1/rerank",
    operations=(rerank, rerank_as_cohere),
)

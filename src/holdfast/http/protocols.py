"""Which protocol a path belongs to: the form of its errors, and what is said as long as it is not served."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.http.error_forms import ErrorForm, anthropic_error, ollama_error, openai_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """A protocol that clients may speak to this server. `unserved_status` is chosen so that its clients show the message."""

    name: str
    prefixes: tuple[str, ...]
    form: ErrorForm
    unserved_status: int


# None of the statuses is a 5xx: the official clients would repeat the request, Claude Code ten times without a word.
_PROTOCOLS = (
    Protocol(
        name="Anthropic's Messages API",
        prefixes=("/v1/messages", "/v1/complete"),
        form=anthropic_error,
        unserved_status=400,  # of a 404 Claude Code says that something is wrong with the model's name
    ),
    Protocol(
        name="Ollama's API",
        prefixes=("/api",),
        form=ollama_error,
        unserved_status=400,  # a 404 means that a model has to be pulled
    ),
    Protocol(name="OpenAI's Responses API", prefixes=("/v1/responses",), form=openai_error, unserved_status=404),
    Protocol(name="OpenAI's Embeddings API", prefixes=("/v1/embeddings",), form=openai_error, unserved_status=404),
    Protocol(
        name="This part of OpenAI's API",
        prefixes=("/v1/audio", "/v1/images", "/v1/moderations", "/v1/files", "/v1/batches", "/v1/assistants", "/v1/threads"),
        form=openai_error,
        unserved_status=404,
    ),
)
_BY_PREFIX = {prefix: protocol for protocol in _PROTOCOLS for prefix in protocol.prefixes}


def unserved_protocol(path: str) -> Protocol | None:
    """The protocol to which a path belongs, if it is one that this version does not serve."""
    _, first, second = (*path.split("/", 3), "", "")[:3]
    return _BY_PREFIX.get(f"/{first}/{second}") or _BY_PREFIX.get(f"/{first}")


def error_form(path: str) -> ErrorForm:
    """How errors look that are answered on a path."""
    protocol = unserved_protocol(path)
    return openai_error if protocol is None else protocol.form

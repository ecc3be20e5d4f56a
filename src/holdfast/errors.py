"""The error types of all packages. Only `front/server/problem.py` turns them into status codes."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import ClassVar, Literal

_LONGEST_SHOWN = 100  # characters of an unknown name that a message shows
_MOST_NAMES = 8  # names that a message lists
_MOST_NEAR_NAMES = 3
_MIN_LIKENESS = 0.5  # of names that `nearest_names` returns


class SessionFailure(enum.Enum):
    """Why a session command failed."""

    NOT_FOUND = "not_found"
    EXISTS = "exists"
    OVER_QUOTA = "over_quota"
    NOT_KEPT = "not_kept"  # none of the session's blocks are left to export
    NO_ROOM = "no_room"  # the session fits neither in RAM nor on disk
    TOO_MANY = "too_many"
    BAD_FILE = "bad_file"
    OTHER_MODEL = "other_model"
    INVALID = "invalid"  # an invalid id or invalid metadata
    BUSY = "busy"  # too many exports and imports are running
    OFF = "off"  # this worker works without a cache
    FAILED = "failed"


class HoldfastError(Exception):
    """Any error that Holdfast raises on purpose. Its message can be shown to a user."""


class InvalidRequest(HoldfastError):
    """The request can never be served: status 4xx.

    field: the invalid field of the request, if there is one.
    shown: the end of the message, which quotes the request. The log omits this part, because it may
        contain part of a prompt.
    """

    def __init__(self, message: str, *, field: str = "", shown: str = "") -> None:
        super().__init__(message + shown)
        self.field = field
        self.loggable = message


class UnknownModel(InvalidRequest):
    """The request names an unknown model: status 404.

    available: names and aliases of the models.
    """

    def __init__(self, *, model: str, available: tuple[str, ...], why: str = "") -> None:
        """why: the reason why a local model is not served; empty if there is none."""
        shown_name = model if len(model) <= _LONGEST_SHOWN else model[:_LONGEST_SHOWN] + "…"
        similar_names = nearest_names(shown_name, available)
        unlisted = len(available) - _MOST_NAMES
        available_text = ", ".join(available[:_MOST_NAMES]) + (
            f" and {unlisted} more" if unlisted > 0 else ""
        )
        suggestion = f"; did you mean {' or '.join(similar_names)}?" if similar_names else ""
        details = f": {why}" if why else f"; available: {available_text}{suggestion}"
        super().__init__(
            f"model {shown_name!r} does not exist on this server{details}", field="model"
        )
        self.model = model
        self.available = available


class PromptTooLong(InvalidRequest):
    """The rendered prompt plus one token for the answer does not fit the model's context window.

    The message is OpenAI's, because agents recognize by it that they must compact the conversation.

    truncation: the field `truncation` of the request, about which the message says what it could do,
    or why it did not suffice; empty if such requests do not have it. auto_context_tokens: the
    context with `kv_bits` `auto`, which the message names if it is longer.
    """

    def __init__(
        self,
        *,
        prompt_tokens: int,
        context_tokens: int,
        field: str = "messages",
        truncation: Literal["", "disabled", "middle"] = "",
        auto_context_tokens: int = 0,
    ) -> None:
        noun = "messages" if field.startswith("messages") else "prompt"
        message = (
            f"This model's maximum context length is {context_tokens} tokens. However, your {noun} "
            f"resulted in {prompt_tokens} "
            f"tokens. Please reduce the length of the {noun}."
        )
        room_hint = (
            " An answer needs room for at least one token."
            if prompt_tokens <= context_tokens
            else ""
        )
        options_hint = ""
        if truncation == "disabled":
            options_hint = ' With "truncation": "middle", the server leaves out the middle.'
        elif truncation == "middle":
            options_hint = ' "truncation": "middle" cannot shorten it enough'
            is_text_prompt = field.startswith("prompt")
            options_hint += (
                "." if is_text_prompt else ": tools and the messages that must stay are too long."
            )
        if auto_context_tokens > context_tokens:
            options_hint += f' With "kv_bits": "auto", the maximum is {auto_context_tokens} tokens.'
        super().__init__(message + room_hint + options_hint, field=field)
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class ImagesRefused(InvalidRequest):
    """The request contains an image, but the model cannot be given images."""


class ImageTooLarge(InvalidRequest):
    """An image has too many pixels or bytes; a smaller version may be accepted.

    Agents recognize this error by the beginning of its message, and then shrink the image. The
    front recognizes it by the same words in the reason that a worker sends.
    """

    BEGINNING: ClassVar = "image too large:"

    def __init__(self, reason: str, *, field: str = "") -> None:
        has_beginning = reason.startswith(self.BEGINNING)
        super().__init__(reason if has_beginning else f"{self.BEGINNING} {reason}", field=field)


class NoEmbeddings(InvalidRequest):
    """The model gives no embeddings, because its hidden states cannot be accessed."""

    def __init__(self) -> None:
        super().__init__(
            "this model gives no embeddings: its hidden states cannot be accessed",
            field="model",
        )


class TooLargeForMemory(InvalidRequest):
    """The request alone needs more KV memory than the budget, so it could never be admitted."""

    def __init__(self, *, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"the prompt and the answer need {needed_bytes:,} bytes of KV memory, but the budget "
            f"is {budget_bytes:,}; send a shorter prompt or ask for a shorter answer"
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class SessionRefused(InvalidRequest):
    """A session command failed; `failure` says why and determines the status."""

    def __init__(self, failure: SessionFailure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class QueueFull(HoldfastError):
    """The queue is full: status 503 with Retry-After."""

    def __init__(self, *, queued: int, limit: int, retry_after_seconds: float) -> None:
        super().__init__(
            f"{queued} requests are already waiting (limit {limit}); try again in "
            f"{retry_after_seconds:.0f} s"
        )
        self.queued = queued
        self.limit = limit
        self.retry_after_seconds = retry_after_seconds


class ResponsesUnavailable(HoldfastError):
    """The file of responses cannot be used now (disk full, file locked or missing): status 503."""


class WorkerUnavailable(HoldfastError):
    """The worker process of the model is not ready, has died or is being restarted: status 503."""

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class RenderingUnavailable(WorkerUnavailable):
    """No process could render the chat template: status 503 with Retry-After."""

    def __init__(self, *, template: str, why: str) -> None:
        super().__init__(
            f"the model's chat template {template!r} cannot be rendered now: {why}; please try "
            "again"
        )


class ModelPinned(InvalidRequest):
    """A pinned model cannot be unloaded: status 409."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"model {model!r} is pinned and therefore stays loaded; unpin it first", field="model"
        )


class ModelInUse(InvalidRequest):
    """A model in use cannot be removed: status 409."""

    def __init__(self, model: str, why: str) -> None:
        super().__init__(f"model {model!r} {why}; try again later", field="model")


class ServerStopping(WorkerUnavailable):
    """The server is stopping and takes no new requests: status 503 with Retry-After."""

    def __init__(self, *, retry_after_seconds: float) -> None:
        super().__init__(
            "the server is stopping and takes no new requests; try again in "
            f"{retry_after_seconds:.0f} s"
        )
        self.retry_after_seconds = retry_after_seconds


class GenerationFailed(HoldfastError):
    """An accepted request failed, for example by a crash.

    It gets status 500, or an error event in a stream.

    is_deadly: the request crashed workers, so it must not be retried.
    """

    def __init__(self, message: str, *, is_deadly: bool = False) -> None:
        super().__init__(message)
        self.is_deadly = is_deadly


class ImageUnresolved(HoldfastError):
    """An image could not be placed in the rendered prompt: status 500.

    This is a bug in Holdfast. The request fails, because a model must never read an image's mark.
    """

    def __init__(self) -> None:
        super().__init__("an image of the conversation could not be placed in the prompt")


class TemplateOverrun(HoldfastError):
    """Rendering a model's chat template exceeded the time or memory limit: status 500.

    why: the predicate of the message's first clause, such as "took more than 5 s".
    """

    def __init__(self, *, template: str, why: str) -> None:
        super().__init__(f"the model's chat template {template!r} {why}; rendering was stopped")
        self.template = template
        self.why = why


class TimeLimitExceeded(HoldfastError):
    """The request exceeded its time limit, set by the client or the server."""

    def __init__(self, *, seconds: float) -> None:
        super().__init__(
            f"the request took longer than its limit of {seconds:g} s; the prefilled part of its "
            "prompt stays cached"
        )
        self.seconds = seconds


class ConfigError(HoldfastError):
    """A setting is unknown or has an invalid value. A starting server exits with code 2."""


class AddressInUse(ConfigError):
    """Another program already listens on the server's port.

    url: the address at which that program can be reached.
    """

    def __init__(self, *, host: str, port: int, url: str) -> None:
        super().__init__(
            f"port {port} on {host} is in use by another program; stop it or choose another port "
            "(--port)"
        )
        self.host = host
        self.port = port
        self.url = url


class ModelLoadError(HoldfastError):
    """A model cannot be fetched or loaded. The program exits with code 2."""


class UnusableModel(ModelLoadError):
    """The files of a model are missing, damaged, or in a format that is not supported: status 422.

    Retrying does not help until the files change.
    """


class DamagedModel(UnusableModel):
    """Files of a model are missing or damaged; downloading them again helps."""


class NoSuchModel(ModelLoadError):
    """The model is not on the Hub, or not in the Hub's local cache."""


def nearest_names(name: str, known_names: Iterable[str]) -> tuple[str, ...]:
    """Known names that are similar to a name, the nearest first.

    Ignores case and the part before a /.
    """
    wanted_name = name.lower()
    candidates = []
    for known_name in known_names:
        lower_name = known_name.lower()
        likeness = max(
            _likeness(wanted_name, lower_name),
            _likeness(_after_slash(wanted_name), _after_slash(lower_name)),
        )
        if likeness >= _MIN_LIKENESS:
            candidates.append((-likeness, known_name))
    return tuple(known_name for _, known_name in sorted(candidates)[:_MOST_NEAR_NAMES])


def _after_slash(name: str) -> str:
    return name.rpartition("/")[2]


def _likeness(wanted: str, other: str) -> float:
    """The likeness of two names: 0 to 1, plus 0.3 if one name is a part of the other."""
    is_part = bool(other and wanted) and (other in wanted or wanted in other)
    matcher = SequenceMatcher(a=other, b=wanted)
    if not is_part and matcher.quick_ratio() < _MIN_LIKENESS:  # a cheap upper bound of the ratio
        return 0.0
    return matcher.ratio() + 0.3 * is_part

"""Requests in the form that all protocols and the library share, and their prompts."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

from holdfast.wire.kv import CacheUse
from holdfast.wire.requests import (
    SAMPLING_RANGES,
    Pooling,
    RequestId,
    SamplingParams,
    ServiceClass,
    TokenIds,
)


@dataclass(frozen=True, slots=True)
class PlacedAnswer:
    """An earlier answer whose text is part of a prompt.

    When the prompt is tokenized, the generated tokens of the answer replace the
    characters from `start` to `end` (exclusive).
    """

    start: int
    end: int
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a prompt, whose placeholder begins at a character, or whose tokens at a token."""

    start: int
    image: str  # SHA-256 of the file, in hexadecimal digits


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """A prompt before tokenization. If the client sent `token_ids`, `text` is empty."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    add_special_tokens: bool = False
    answers: tuple[PlacedAnswer, ...] = ()  # earlier answers in a chat, in order of appearance
    images: tuple[PlacedImage, ...] = ()  # in order of appearance
    # whether the template opens the reasoning, so that the answer begins inside it
    in_reasoning: bool = False
    # positions in the text after which later prompts are likely to differ; empty for models that
    # can resume at any token
    branch_points: tuple[int, ...] = ()
    breakpoints: tuple[int, ...] = ()  # positions of the `CacheBreakpoint`s; 0: unknown
    # the template's text between the header of the new answer and the answer; None: unknown
    answer_opening: str | None = None
    dropped_tokens: int = 0  # tokens of earlier answers that the template left out


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the model sees it: rendered by the chat template, and tokenized."""

    text: str  # empty if the client sent token ids
    token_ids: TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """A prompt after tokenization."""

    token_ids: TokenIds
    branch_points: tuple[int, ...] = ()  # `PromptText.branch_points`, as token positions
    breakpoints: tuple[int, ...] = ()
    images: tuple[PlacedImage, ...] = ()
    put_back_tokens: int = 0  # tokens of earlier answers that were put back exactly as generated


# The seed with which clients of llama.cpp, vLLM and Ollama ask for a random one; other negative
# numbers are fixed seeds there, too. No `SamplingParams` has it.
RANDOM_SEED: Final = -1


_MAX_SEED = 2**63 - 1


def sampling_options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a GenerationRequest for the sampling parameters of a request.

    parameters: the parameters by name. The client left out those that are None.
    """
    values = {name: value for name, value in parameters.items() if value is not None}
    if "seed" in values:
        seed = values.pop("seed")
        if seed != RANDOM_SEED:
            # the seeds of further choices count up from this one and must stay below 2**64
            values["seed"] = seed & _MAX_SEED
    unset = tuple(name for name in SAMPLING_RANGES if name not in values)
    return {"sampling": SamplingParams(**values), "unset_sampling": unset}


# The default `max_tokens` of the library and the command line. Requests over HTTP have no default
# limit, because agents write long files.
DEFAULT_ANSWER_TOKENS: Final = 4096


def new_request_id(prefix: str) -> RequestId:
    """A unique id. prefix: names the kind of the request, such as `chatcmpl-`."""
    return f"{prefix}{uuid.uuid4().hex}"


class CacheBreakpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a part of the conversation that the client wants cached.

    The breakpoint comes after `messages` whole messages, plus `parts` content parts of the next
    message. If both are 0, it comes after the tools and the leading system messages, which
    templates write in one piece.
    """

    messages: int
    parts: int = 0
    seconds: float = 300.0  # the time that the client asks for; only reported in the usage


class MarkedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """The first `tokens` tokens of a prompt, up to a cache breakpoint with these `seconds`."""

    tokens: int
    seconds: float


RESERVED_TEMPLATE_ARGUMENTS: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt"}
)
"""Arguments of a chat template that the server sets; template options cannot have these names."""


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation for the model's chat template.

    Messages are dictionaries as in OpenAI's API. An image is a content part
    `{"type": "image", "image": …}`, with the SHA-256 of its file.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    # Names of tools that are not defined at the head of the conversation. Such a tool is defined
    # where a message part {"type": "tool_reference", "tool_name": NAME} refers to it, so that the
    # prefix before that part stays the same.
    found_tools: tuple[str, ...] = ()
    # for error messages: the request field with the schema of each tool; empty: the fields of
    # OpenAI's chat API
    tool_fields: tuple[str, ...] = ()
    template_options: dict[str, Any] = {}  # e.g. {"enable_thinking": False}
    continue_last: bool = False  # continue the last assistant message instead of answering it
    has_images: bool = True  # False: no message has an image
    cache_breakpoints: tuple[CacheBreakpoint, ...] = ()  # only a few: the protocols limit them

    @property
    def listed_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the chat template lists."""
        if not self.found_tools:
            return self.tools
        return tuple(
            tool for tool in self.tools if tool["function"]["name"] not in self.found_tools
        )


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the answer may or must call tools. If `names` is set, it may call only these."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True  # whether one answer may contain several calls
    # tools whose arguments are held to their schemas, as far as a grammar can enforce them
    enforced_names: tuple[str, ...] = ()


ThinkingEffort: TypeAlias = Literal["off", "on", "minimal", "low", "medium", "high", "max"]


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and how much the model reasons before it answers.

    Has an effect only as far as the model's chat template supports it.
    """

    effort: ThinkingEffort | None = None  # None: the template's default
    budget_tokens: int | None = None  # the reasoning is ended after this many tokens


FormatKind: TypeAlias = Literal["json_object", "json_schema", "regex", "lark", "choice"]


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar of the visible answer.

    field: the request field that asks for this format, for error messages.
    """

    kind: FormatKind
    schema: dict[str, Any] | bool | None = None  # for json_schema
    pattern: str = ""  # for regex and lark
    choices: tuple[str, ...] = ()  # for choice
    field: str = "response_format"


RankMethod: TypeAlias = Literal["yes_no", "likelihood"]
"""How a document is scored: by the probability that the model answers yes when it is asked whether
the document is relevant, or by the likelihood of the query as a continuation of the document.
"""


Truncation: TypeAlias = Literal["disabled", "middle"]
"""What happens to a prompt that does not fit the context: it is refused, or its middle is left out.
"""


# str: a plain text, to which the tokenizer adds its special tokens; tuple: token ids
Prompt: TypeAlias = ChatPrompt | str | tuple[int, ...]


class GenerationRequest(CacheUse, frozen=True, kw_only=True):
    """A request to generate answers, in the form that all protocols and the library share."""

    request_id: RequestId
    model: str
    prompt: Prompt
    max_tokens: int | None = None  # None: as many as fit in the context window
    choices: int = 1
    sampling: SamplingParams = SamplingParams()
    # fields of `sampling` that the client left out: generation_config.json supplies them
    unset_sampling: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    want_logprobs: bool = False
    top_logprobs: int = 0
    echo: bool = False  # whether the answer begins with the prompt, with its logprobs if wanted
    ignore_eos: bool = False
    reports_progress: bool = False  # whether to send PromptProgress even for short prompts
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking = Thinking()
    output_format: OutputFormat | None = None
    prediction: str = ""  # what the client expects the answer to be; empty: nothing
    service: ServiceClass = ServiceClass()
    prompt_field: str = "messages"  # the request field with the prompt, for error messages
    truncation: Truncation = "disabled"
    streams: bool = False  # whether the answer is streamed
    explains: bool = False  # whether the answer says how much of the prompt was cached


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to embed texts or token ids. Each input becomes one vector."""

    request_id: RequestId
    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    pooling: Pooling | None = None  # None: as the model was trained
    dimensions: int | None = None  # the number of leading dimensions to return; None: all
    # whether to cut inputs that exceed the window; otherwise they are refused
    truncates: bool = False
    tenant: str = ""
    service: ServiceClass = ServiceClass()
    # the request field, for error messages, which call the third input `input.2`
    input_field: str = "input"
    is_list: bool = True  # False: there is one input, and error messages call it `input`

    def field_of(self, place: int) -> str:
        """The name of the input at index `place` in error messages."""
        return f"{self.input_field}.{place}" if self.is_list else self.input_field


class RankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to score documents by their relevance to a query."""

    request_id: RequestId
    model: str
    query: str
    documents: tuple[str, ...]
    instruction: str = ""  # what counts as relevant; empty: as the model was trained
    method: RankMethod | None = None  # None: as the model was trained
    tenant: str = ""
    service: ServiceClass = ServiceClass()

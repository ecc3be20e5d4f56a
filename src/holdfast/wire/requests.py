"""Requests, independent of protocol and model: the prompt, its token ids, sampling."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

TOKEN_BYTES = 4
_SMALL_BYTES = 2048

RequestId: TypeAlias = str
Priority: TypeAlias = Literal["interactive", "batch"]  # batch runs on what interactive leaves free


class TokenIds(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Token ids, packed as little-endian uint32.

    Sending, copying or comparing 100,000 of them takes microseconds. A slice is packed too. Packed
    ids are equal only to other packed ids, never to a tuple.
    """

    packed: bytes = b""

    @staticmethod
    def of(token_ids: Iterable[int]) -> TokenIds:
        """Pack token ids. Raises OverflowError if an id does not fit."""
        if isinstance(token_ids, TokenIds):
            return token_ids
        return TokenIds(array("I", token_ids).tobytes())

    @staticmethod
    def joined(parts: Iterable[TokenIds]) -> TokenIds:
        """Concatenate packed ids."""
        return TokenIds(b"".join([part.packed for part in parts]))

    @property
    def view(self) -> memoryview[int]:
        """The ids as integers, without a copy."""
        return memoryview(self.packed).cast("I")

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(self.view)

    def __contains__(self, token_id: object) -> bool:
        return token_id in self.view

    def __getitem__(self, part: slice) -> TokenIds:
        return TokenIds(self.view[part].tobytes())

    def __add__(self, other: TokenIds) -> TokenIds:
        return TokenIds(self.packed + other.packed)


def common_tokens(ours: bytes | bytearray, theirs: bytes | bytearray) -> int:
    """The length of the common prefix of two packed sequences.

    For 100,000 equal tokens this takes 20 µs.
    """
    low, high = 0, min(len(ours), len(theirs))
    if ours[:high] == theirs[:high]:
        return high // TOKEN_BYTES
    while high - low > _SMALL_BYTES:
        middle = (low + high) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle
    # the lowest differing bit of two little-endian numbers is in their first differing byte
    differing = int.from_bytes(ours[low:high], "little") ^ int.from_bytes(
        theirs[low:high], "little"
    )
    lowest_bit = (differing & -differing).bit_length() - 1
    return (low + lowest_bit // 8) // TOKEN_BYTES


def token_at(packed: bytes, index: int) -> int:
    """Return one token of a packed sequence."""
    return int.from_bytes(packed[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES], "little")


@dataclass(frozen=True, slots=True)
class PlacedAnswer:
    """An earlier answer within the text of a prompt.

    Its tokens replace the characters from `start` to `end`.
    """

    start: int
    end: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """A prompt before tokenization. If the client sent `token_ids`, `text` is empty."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    add_special_tokens: bool = False
    answers: tuple[PlacedAnswer, ...] = ()  # earlier answers in a chat, in order of appearance
    # whether the template opens the reasoning, so that the answer begins inside it
    in_reasoning: bool = False
    # positions in the text after which later prompts may differ, if that matters to the model
    branch_points: tuple[int, ...] = ()
    breakpoints: tuple[int, ...] = ()  # positions of the cache breakpoints; 0: unknown
    # the template's text after the header of the new answer; None: unknown
    opening: str | None = None
    dropped_tokens: int = 0  # tokens of earlier answers that the template left out


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the model sees it."""

    text: str  # empty if the client sent token ids
    token_ids: TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """A prompt after tokenization."""

    token_ids: TokenIds
    branch_points: tuple[int, ...] = ()  # `PromptText.branch_points`, as token positions
    breakpoints: tuple[int, ...] = ()
    put_back_tokens: int = 0  # tokens of earlier answers that were put back exactly as generated


class ServiceClass(msgspec.Struct, frozen=True, kw_only=True):
    """How the scheduler ranks a request."""

    flow: str = ""  # for fair queueing: flows share the machine, however many requests each has
    priority: Priority = "interactive"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a request samples its tokens. The defaults sample from the model's own distribution."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: the gateway chooses one


SAMPLING_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),  # 0: always the most likely token
    "top_k": (0, 2**31 - 1),  # it is an int32 on the device
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-3, 100),
    "logit_bias": (-100, 100),  # for each token; the lowest value bans the token
}
"""Lowest and highest value of each field of `SamplingParams` that has a range.

A protocol may allow less: OpenAI's temperature ends at 2.
"""


class CacheBreakpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a part of the conversation that the client wants cached.

    The breakpoint comes after `messages` whole messages, plus `parts` content parts of the next
    message. With no message at all, it comes after the tools and the leading system messages, which
    templates write in one piece.
    """

    messages: int
    parts: int = 0
    seconds: float = 300.0  # how long to cache it after its last use


RESERVED_TEMPLATE_ARGUMENTS: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt"}
)
"""Arguments of a chat template that the server sets; template options cannot have these names."""


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation for the model's chat template.

    Messages are dictionaries as in OpenAI's API.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    # Names of tools that are not defined at the head of the conversation. Such a tool is defined
    # where a message part {"type": "tool_reference", "tool_name": NAME} refers to it, so that the
    # prefix before that part stays the same.
    found_tools: tuple[str, ...] = ()
    # for errors: the request's field of each tool's schema; empty: as in OpenAI's chat API
    tool_fields: tuple[str, ...] = ()
    template_options: dict[str, Any] = {}  # e.g. {"enable_thinking": False}
    continue_last: bool = False  # continue the last assistant message instead of answering it
    cache_breakpoints: tuple[CacheBreakpoint, ...] = ()  # a protocol allows a handful

    @property
    def listed_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the chat template lists."""
        if not self.found_tools:
            return self.tools
        return tuple(
            tool for tool in self.tools if tool["function"]["name"] not in self.found_tools
        )


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the answer may or must call tools. If names are given, only those tools."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True  # whether one answer may contain several calls
    held: tuple[str, ...] = ()  # tools whose schemas are enforced, as far as a grammar can do that


ThinkingEffort: TypeAlias = Literal["off", "on", "minimal", "low", "medium", "high", "max"]


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and how much the model reasons first, as far as its chat template supports that."""

    effort: ThinkingEffort | None = None  # None: the template's default
    budget_tokens: int | None = None  # the reasoning is ended after this many tokens


FormatKind: TypeAlias = Literal["json_object", "json_schema", "regex", "lark", "choice"]


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar of the visible answer. field: the request's field that sets it, for errors."""

    kind: FormatKind
    schema: dict[str, Any] | bool | None = None  # for json_schema
    pattern: str = ""  # for regex and lark
    choices: tuple[str, ...] = ()  # for choice
    field: str = "response_format"


Pooling: TypeAlias = Literal["mean", "last"]
"""How hidden states become the embedding of a text: as their mean, or as that of the last token."""

RankMethod: TypeAlias = Literal["yes_no", "likelihood"]
"""How a document is scored: by the model's yes or no, or by the likelihood of the query after the
document.
"""

# the tokenizer puts its special tokens in front of a plain text
Prompt: TypeAlias = ChatPrompt | str | tuple[int, ...]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a protocol or the library asks for, independent of protocol and model."""

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
    tells_progress: bool = False  # whether to send PromptProgress even for short prompts
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking = Thinking()
    output_format: OutputFormat | None = None
    tenant: str = ""  # tenants do not share cached prefixes; a hash, nothing secret
    session_id: str = ""
    service: ServiceClass = ServiceClass()
    prompt_field: str = "messages"  # the request's field that contains the prompt, for errors


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Texts or token ids to embed; each becomes one vector."""

    request_id: RequestId
    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    pooling: Pooling | None = None  # None: as the model was trained
    dimensions: int | None = None  # the number of leading dimensions to return; None: all
    # whether to cut inputs that exceed the window; otherwise they are refused
    truncates: bool = False
    tenant: str = ""
    service: ServiceClass = ServiceClass()
    input_field: str = "input"  # the request's field, for errors: the third input is `input.2`
    is_list: bool = True  # False: there is one input, called `input` in errors

    def field_of(self, place: int) -> str:
        """The name of an input, for errors."""
        return f"{self.input_field}.{place}" if self.is_list else self.input_field


class RankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Score documents by their relevance to a query."""

    request_id: RequestId
    model: str
    query: str
    documents: tuple[str, ...]
    instruction: str = ""  # what counts as relevant; empty: as the model was trained
    method: RankMethod | None = None  # None: as the model was trained
    tenant: str = ""
    service: ServiceClass = ServiceClass()

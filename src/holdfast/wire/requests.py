"""What is asked for, neutral of protocol and model: the prompt, its token ids, sampling."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

TOKEN_ID_BYTES = 4
TOKEN_BYTES = 4
_SMALL_BYTES = 2048
RequestId: TypeAlias = str


Priority: TypeAlias = Literal["interactive", "batch"]
"""Whose turn it is first: somebody waits for an interactive answer; one of a batch takes what is
left.
"""


class TokenIds(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Token ids, packed as little-endian uint32: 100,000 of them are sent, copied and compared in
    microseconds.

    A slice is packed too. Equal to other packed ids only, never to a tuple.
    """

    packed: bytes = b""

    @staticmethod
    def of(token_ids: Iterable[int]) -> TokenIds:
        """Pack ids. Raises OverflowError for one that does not fit."""
        if isinstance(token_ids, TokenIds):
            return token_ids
        ids = array("I", token_ids)
        assert ids.itemsize == TOKEN_ID_BYTES
        return TokenIds(_little_endian(ids.tobytes()))

    @staticmethod
    def joined(parts: Iterable[TokenIds]) -> TokenIds:
        """Several runs as one."""
        return TokenIds(b"".join([part.packed for part in parts]))

    @property
    def view(self) -> memoryview[int]:
        """The ids as integers, without a copy."""
        return memoryview(_little_endian(self.packed)).cast("I")

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_ID_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(self.view)

    def __contains__(self, token_id: object) -> bool:
        return token_id in self.view

    def __getitem__(self, part: slice) -> TokenIds:
        return TokenIds(_little_endian(self.view[part].tobytes()))

    def __add__(self, other: TokenIds) -> TokenIds:
        return TokenIds(self.packed + other.packed)


def _little_endian(packed: bytes) -> bytes:
    """From the order of the machine, and back: all that MLX runs on are little-endian."""
    if sys.byteorder == "little":
        return packed
    ids = array("I", packed)
    ids.byteswap()
    return ids.tobytes()


def common_tokens(ours: bytes | bytearray, theirs: bytes | bytearray) -> int:
    """How many tokens two runs begin with alike. 100,000 equal tokens cost 20 µs."""
    low, high = 0, min(len(ours), len(theirs))
    if ours[:high] == theirs[:high]:
        return high // TOKEN_BYTES
    while high - low > _SMALL_BYTES:
        middle = (low + high) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle
    # The lowest bit in which two little-endian numbers differ lies in the first byte in which they
    # differ.
    differing = int.from_bytes(ours[low:high], "little") ^ int.from_bytes(
        theirs[low:high], "little"
    )
    lowest_bit = (differing & -differing).bit_length() - 1
    return (low + lowest_bit // 8) // TOKEN_BYTES


def token_at(packed: bytes, index: int) -> int:
    """One token of a run."""
    return int.from_bytes(packed[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES], "little")


@dataclass(frozen=True, slots=True)
class PlacedAnswer:
    """An answer of ours in the text of a prompt: the characters from start to end are to be these
    tokens.
    """

    start: int
    end: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """A prompt before tokenization.

    `token_ids` is set when the client sent ids; then `text` is empty.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    add_special_tokens: bool = False
    answers: tuple[PlacedAnswer, ...] = ()  # of a chat, in order of appearance
    in_reasoning: bool = False  # the template has opened a thought, in which the answer begins
    # characters behind which later prompts may differ, where that matters to the model
    branch_points: tuple[int, ...] = ()
    # characters behind which the prompt's cache breakpoints are, one each; 0: nobody can tell
    breakpoints: tuple[int, ...] = ()
    # what the template writes behind the header of the new answer; None: nobody can tell
    opening: str | None = None
    dropped_tokens: int = 0  # of earlier answers, which the template left out


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the model would read it."""

    text: str  # empty where the client sent token ids
    token_ids: TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """A prompt after tokenization."""

    token_ids: TokenIds
    branch_points: tuple[int, ...] = ()  # the same as tokens
    breakpoints: tuple[int, ...] = ()  # the same as tokens
    put_back_tokens: int = 0  # of earlier answers, as they were generated


class ServiceClass(msgspec.Struct, frozen=True, kw_only=True):
    """How a request stands among others that want to run."""

    # who asks, for fair queueing: what one flow has many of gives way to what another has few of
    flow: str = ""
    priority: Priority = "interactive"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request draws its tokens. The defaults draw from the model's own distribution."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    # None: the gateway draws one before the request leaves the front process
    seed: int | None = None


SAMPLING_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),  # 0: the most likely token
    "top_k": (0, 2**31 - 1),  # it is an int32 on the device
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-3, 100),
    "logit_bias": (-100, 100),  # of each token; the lowest bans it
}
"""Lowest and highest value of each field of `SamplingParams` that has a range, wherever the value
comes from.

A protocol may promise less: OpenAI's temperature ends at 2.
"""


class CacheBreakpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a conversation up to which its client wants it kept: it will be sent again, and go
    on from there.

    It stands behind so many whole messages, and behind so many content parts of the next one.
    Behind no message at all means behind the tools, and behind the system messages at the
    beginning, which templates write in one piece with them.
    """

    messages: int
    parts: int = 0
    seconds: float = 300.0  # since it was used last


RESERVED_TEMPLATE_ARGUMENTS: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt"}
)
"""What a chat template is given of the request itself, and no option of it may be named."""


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation to be rendered by the model's chat template.

    Messages are OpenAI-shaped dictionaries.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    # Names of tools that are defined within the conversation, where a part {"type":
    # "tool_reference", "tool_name": NAME} of a message refers to them, and not at its head: what
    # was read before stays as it was.
    found_tools: tuple[str, ...] = ()
    # The request's field of each tool's schema, to name in errors; none: as OpenAI's chat has it.
    tool_fields: tuple[str, ...] = ()
    template_options: dict[str, Any] = {}  # e.g. {"enable_thinking": False}
    continue_last: bool = False  # the last assistant message is to be continued, not answered
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
    """Whether the answer is to call tools. With names, only these may be called."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True  # several calls in one answer are allowed
    # tools whose calls are held to their schemas as far as a grammar can, strict or not
    held: tuple[str, ...] = ()


ThinkingEffort: TypeAlias = Literal["off", "on", "minimal", "low", "medium", "high", "max"]


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and how much the model is to think first; its chat template decides how that is said."""

    effort: ThinkingEffort | None = None  # None: as the template has it
    budget_tokens: int | None = None  # so many tokens of thought, then it is closed; None: no bound


FormatKind: TypeAlias = Literal["json_object", "json_schema", "regex", "lark", "choice"]


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A form that the visible answer must have.

    `field` is the request's field to name in errors about it.
    """

    kind: FormatKind
    schema: dict[str, Any] | bool | None = None  # of json_schema
    pattern: str = ""  # of regex and lark
    choices: tuple[str, ...] = ()  # of choice
    field: str = "response_format"


Pooling: TypeAlias = Literal["mean", "last"]
"""Which of a text's hidden states stand for it: the mean of all, or that of its last token."""

RankMethod: TypeAlias = Literal["yes_no", "likelihood"]
"""How a document is scored: by the model's yes or no to it, or by how likely the query is behind
it.
"""


# A text is tokenized as it is, with the tokenizer's own special tokens in front; token ids are used
# as they are.
Prompt: TypeAlias = ChatPrompt | str | tuple[int, ...]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a protocol in `http` (or the library) asks for, neutral of protocol and model.

    `intake` makes it servable.
    """

    request_id: RequestId
    model: str
    prompt: Prompt
    max_tokens: int | None = None  # None: as many as fit the context window
    choices: int = 1
    sampling: SamplingParams = SamplingParams()
    # fields of `sampling` that the client left open, for generation_config.json to fill
    unset_sampling: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    want_logprobs: bool = False
    top_logprobs: int = 0
    echo: bool = False  # the prompt is part of the answer (with its logprobs if wanted)
    ignore_eos: bool = False
    tells_progress: bool = False  # how far the prompt is read, also when it is read at once
    tool_choice: ToolChoice = ToolChoice()  # the tools themselves are a part of the chat prompt
    thinking: Thinking = Thinking()
    output_format: OutputFormat | None = None
    # what one tenant has read is not there for another; nothing secret, it is hashed already
    tenant: str = ""
    session_id: str = ""  # the session whose branch this goes on; empty: none
    service: ServiceClass = ServiceClass()
    prompt_field: str = "messages"  # the request's field to name in errors about the prompt


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Texts (or token ids) of each of which a vector is asked for."""

    request_id: RequestId
    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    pooling: Pooling | None = None  # None: as the model was trained
    dimensions: int | None = None  # so many of the first ones; None: all
    truncates: bool = False  # what is longer than the window is cut at its end; else it is refused
    tenant: str = ""
    service: ServiceClass = ServiceClass()
    # the request's field to name in errors: the third input is `input.2`
    input_field: str = "input"
    is_list: bool = True  # else there is one input, which errors name `input`

    def field_of(self, place: int) -> str:
        """The name of an input in errors."""
        return f"{self.input_field}.{place}" if self.is_list else self.input_field


class RankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A query and documents, of each of which is asked how much it is about the query."""

    request_id: RequestId
    model: str
    query: str
    documents: tuple[str, ...]
    instruction: str = ""  # what counts as relevant; empty: as the model was trained
    method: RankMethod | None = None  # None: as the model was trained
    tenant: str = ""
    service: ServiceClass = ServiceClass()

"""A request's prompt on its way from text to tokens."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.wire.token_ids import TokenIds


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

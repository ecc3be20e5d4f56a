"""A request's prompt on its way from text to tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """The text of one message of a chat. Of all roles, so that an answer is looked for behind what was said before it."""

    text: str
    is_answer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """A prompt before tokenization. `token_ids` is set when the client sent ids; then `text` is empty."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    add_special_tokens: bool = False
    turns: tuple[Turn, ...] = ()  # of a chat, in order of appearance
    in_reasoning: bool = False  # the template has opened a thought, in which the answer begins
    branch_points: tuple[int, ...] = ()  # characters behind which later prompts may differ, where that matters to the model


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """A prompt after tokenization."""

    token_ids: tuple[int, ...]
    branch_points: tuple[int, ...] = ()  # the same as tokens
    dropped_tokens: int = 0  # of earlier answers, which the template left out

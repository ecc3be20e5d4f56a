"""The thought in front of an answer, as a part of its grammar: free text up to its end."""

from __future__ import annotations

from typing import Literal, TypeAlias

from holdfast.front.structured.lark import GAP, Rules
from holdfast.front.toolcalls.dialect import ModelDialect
from holdfast.wire.prompt import PromptText

ThoughtState: TypeAlias = Literal["open", "possible", "none"]
"""At the beginning of an answer: the prompt has opened a thought, the model may open one, there is
none.
"""


def thought_state(prompt: PromptText, dialect: ModelDialect) -> ThoughtState:
    """Where an answer to this prompt begins.

    A model whose prompt has just closed a thought has been told not to think.
    """
    if dialect.reasoning is None:
        return "none"
    if prompt.in_reasoning:
        return "open"
    return "none" if prompt.text.rstrip().endswith(dialect.reasoning.end.strip()) else "possible"


def thought(rules: Rules, dialect: ModelDialect, state: ThoughtState) -> str:
    """What stands in front of the visible answer: a thought with its markers and the white space
    behind it, or nothing.
    """
    if dialect.reasoning is None or state == "none":
        return ""
    inner = f"{rules.text_before(dialect.reasoning.end.strip())} {rules.terminal(GAP)}"
    return (
        inner if state == "open" else f"({rules.literal(dialect.reasoning.start.strip())} {inner})?"
    )

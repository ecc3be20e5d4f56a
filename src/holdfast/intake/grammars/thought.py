"""The thought in front of an answer, as a part of its grammar: free text up to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from holdfast.intake.grammars.lark import ANY_TEXT, escaped, marker
from holdfast.parsing.dialect import ModelDialect, ReasoningFormat

ThoughtState: TypeAlias = Literal["open", "possible", "none"]
"""At the beginning of an answer: the prompt has opened a thought, the model may open one, there is none."""


def thought_state(prompt_text: str, dialect: ModelDialect) -> ThoughtState:
    """Whether an answer to this prompt begins within a thought. What was said earlier in the prompt says nothing of it."""
    if dialect.reasoning is None:
        return "none"
    end = prompt_text.rstrip()
    if end.endswith(dialect.reasoning.start.strip()):
        return "open"
    return "none" if end.endswith(dialect.reasoning.end.strip()) else "possible"


def thought_rules(dialect: ModelDialect, state: ThoughtState) -> Sequence[str]:
    """Rules for `thought`, which stands in front of the visible answer and may be empty."""
    reasoning = dialect.reasoning
    if reasoning is None or state == "none":
        return ('thought: ""',)
    start = marker(reasoning.start.strip(), dialect.marker_ids)
    inner = "thinking" if state == "open" else f"({start} thinking)?"
    return (f"thought: {inner}", *_thinking(reasoning, dialect), r"GAP: /[ \t\n]{0,4}/")


def _thinking(reasoning: ReasoningFormat, dialect: ModelDialect) -> Sequence[str]:
    """Free text and the marker that ends it, with the white space that belongs to that."""
    end = reasoning.end.strip()
    if end in dialect.marker_ids:
        return (f"thinking: THINKING {marker(end, dialect.marker_ids)} GAP", f"THINKING: {ANY_TEXT}")
    return ("thinking: thinking_to_end GAP", rf"thinking_to_end[lazy]: /(.|\n)*{escaped(end)}/")

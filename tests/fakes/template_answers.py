"""Answers with calls as a chat template writes them, and checks that a grammar allows them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from holdfast.config import LimitsSettings, ToolsSettings
from holdfast.front.prompt.dialects import FoundDialect
from holdfast.front.prompt.template import ChatTemplate, common_prefix
from holdfast.front.prompt.template_probes import opens_thought
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.prompt.tokenizer_bundle import turn_end_token_ids
from holdfast.front.request import (
    ChatPrompt,
    GenerationRequest,
    OutputFormat,
    PromptText,
    ToolChoice,
)
from holdfast.front.structured.answer import answer_grammar
from holdfast.front.toolcalls.dialect import ModelDialect
from holdfast.worker.engine.constraints import GrammarMatcher, Grammars, GrammarVocabulary

_ARGUMENTS: Final = {"query": 'Zürich "S"', "limit": 3}
_PARAMETERS: Final[Mapping[str, Any]] = {
    "find_places": {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what"},
            "limit": {"type": "integer", "description": "how many"},
        },
        "required": ["query"],
    },
    "list_all": {"type": "object", "properties": {}},
}
TOOLS: Final = tuple(
    {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": parameters},
    }
    for name, parameters in _PARAMETERS.items()
)
QUESTION: Final[dict[str, Any]] = {"role": "user", "content": "question3841"}
_RESULT: Final = "result0592"
_THOUGHT: Final = "A thought."
_TEXT: Final = "I look."
_ONE: Final = ("find_places",)
_TWO: Final = ("find_places", "list_all")

# the contents of an answer: its text, its thought, and the tools it calls
ANSWERS: Final = {
    "one call": ("", "", _ONE),
    "two calls": ("", "", _TWO),
    "a text and a call": (_TEXT, "", _ONE),
    "a thought and a call": ("", _THOUGHT, _ONE),
    "a thought, a text and a call": (_TEXT, _THOUGHT, _ONE),
}
# If a call is required, no text may precede it, as in the APIs of the large providers; otherwise a
# small model would keep writing text.
CHOICES: Final = {
    "auto": ToolChoice(),
    "auto, one call": ToolChoice(parallel=False),
    "required": ToolChoice(mode="required"),
    "required, one call": ToolChoice(mode="required", parallel=False),
    "named": ToolChoice(mode="required", names=("find_places",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswer:
    """prompt: the rendered text before the answer. text: the answer, and the template's text
    between it and the next message.
    """

    prompt: str
    text: str
    in_reasoning: bool


def pairs() -> Iterator[tuple[str, str]]:
    """Each answer with each choice that allows it."""
    for answer, (text, _, calls) in ANSWERS.items():
        for choice, chosen in CHOICES.items():
            if len(calls) > 1 and (not chosen.parallel or chosen.names):
                continue
            if not (text and chosen.mode == "required"):
                yield answer, choice


def written(found: FoundDialect, answer: str) -> WrittenAnswer | None:
    """An answer as the template renders it; None if the template omits a part."""
    text, thought, names = ANSWERS[answer]
    template, dialect = found.template, found.dialect
    assert template is not None
    if len(names) > 1 and not found.report.parallel:
        return None
    calls = [_call(place, name) for place, name in enumerate(names)]
    message = {"role": "assistant", "content": text, "tool_calls": calls}
    if thought:
        message["reasoning_content"] = thought
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": name, "content": _RESULT}
        for call, name in zip(calls, names, strict=True)
    ]
    asked = template.try_render(ChatPrompt(messages=(QUESTION,), tools=TOOLS))
    whole = template.try_render(ChatPrompt(messages=(QUESTION, message, *results), tools=TOOLS))
    start = _start(template, dialect, asked, whole)
    said = whole[start:].partition(_RESULT)[0]
    if not (asked and whole and thought in said and text in said):
        return None
    return _from_prompt(dialect, asked, whole[:start], said)


def _call(place: int, name: str) -> dict[str, Any]:
    arguments = json.dumps(_ARGUMENTS if name == "find_places" else {}, ensure_ascii=False)
    return {
        "type": "function",
        "id": f"call{place:05}",
        "function": {"name": name, "arguments": arguments},
    }


def _start(template: ChatTemplate, dialect: ModelDialect, asked: str, whole: str) -> int:
    """Where the answer begins: after the prompt, or where the two texts differ."""
    start = len(common_prefix(asked, whole))
    opening = template.opening(ChatPrompt(messages=(QUESTION,), tools=TOOLS), asked)
    header = asked[: len(asked) - len(opening)]
    if dialect.reasoning is not None:
        for mark in (dialect.reasoning.start.strip(), dialect.reasoning.end.strip()):
            opening = opening.partition(mark)[0]
    header += opening
    # the prompt may open a thought that the template leaves out of a past answer
    if start < len(asked) and whole.startswith(header):
        start = len(header)
    if whole[:start].endswith("<|"):  # only the prompt has another message here
        start = whole.index(">", start) + 1
    return start


def _from_prompt(dialect: ModelDialect, asked: str, prompt: str, said: str) -> WrittenAnswer:
    thought = dialect.reasoning
    if thought is None:
        return WrittenAnswer(prompt=prompt, text=said, in_reasoning=False)
    start, end = thought.start.strip(), thought.end.strip()
    if said.startswith(end) and asked.rstrip().endswith(end):  # the prompt contains the end already
        return WrittenAnswer(prompt=asked, text=said.removeprefix(end), in_reasoning=False)
    opened = said.startswith(end) and opens_thought(asked[len(prompt) - 1 :], dialect)
    return WrittenAnswer(
        prompt=prompt, text=said, in_reasoning=opened or prompt.rstrip().endswith(start)
    )


def grammar_of(
    dialect: ModelDialect,
    answer: WrittenAnswer,
    choice: ToolChoice,
    *,
    output_format: OutputFormat | None = None,
) -> str:
    """The grammar of an answer to a rendered prompt."""
    request = GenerationRequest(
        request_id="r",
        model="m",
        prompt=ChatPrompt(messages=(QUESTION,), tools=TOOLS),
        tool_choice=choice,
        output_format=output_format,
    )
    return answer_grammar(
        request,
        dialect,
        prompt=PromptText(text=answer.prompt, in_reasoning=answer.in_reasoning),
        limits=LimitsSettings(),
        tools=ToolsSettings(constrain="auto"),
    ).text


def refusal(
    tokenizer: Tokenizer,
    dialect: ModelDialect,
    grammar: str,
    text: str,
    *,
    by_masks: bool = False,
) -> str:
    """Why the grammar refuses a token of this text before the end of the turn; empty if it does
    not. by_masks: also look for each token in the mask, which takes most of the time.

    Uses the worker's matcher with the model's own tokens. A turn ends at the first end token, or at
    the end of the text if the template writes none.
    """
    vocab_size = tokenizer.backend.get_vocab_size(with_added_tokens=True)
    own_ends = turn_end_token_ids(dialect, tokenizer)
    matcher = _grammars(tokenizer).matcher(grammar, stop_token_ids=own_ends)
    turn_ends = {*tokenizer.eos_token_ids, *own_ends}
    message_ends = {dialect.marker_ids[end] for end in dialect.message_ends}
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    for place, token_id in enumerate(token_ids):
        is_end = token_id in turn_ends
        is_allowed = not (is_end or by_masks) or _allows_any(matcher, mask, {token_id})
        if not is_allowed or not (is_end or matcher.add(token_id)):
            before = tokenizer.decode(token_ids[:place], skip_special_tokens=False)
            token = tokenizer.decode((token_id,), skip_special_tokens=False)
            return f"{token!r} is refused after {before[-60:]!r}"
        if is_end:
            return ""
        if token_id in message_ends and _allows_any(matcher, mask, turn_ends):
            return ""
    if _allows_any(matcher, mask, turn_ends):
        return ""
    return f"no end after {text[-60:]!r}"


@cache
def _grammars(tokenizer: Tokenizer) -> Grammars:
    backend = tokenizer.backend
    known = GrammarVocabulary(
        tokenizer_json=backend.to_str(), end_token_ids=tuple(tokenizer.eos_token_ids)
    )
    return Grammars(known, vocab_size=backend.get_vocab_size(with_added_tokens=True))


def _allows_any(matcher: GrammarMatcher, mask: NDArray[np.int32], token_ids: set[int]) -> bool:
    matcher.fill(mask)
    return any(_is_set(mask, token_id) for token_id in token_ids)


def _is_set(bits: NDArray[np.int32], place: int) -> bool:
    return bool(bits[place // 32] >> place % 32 & 1)

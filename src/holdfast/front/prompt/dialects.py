"""How a model writes calls and thoughts, and what its template makes of them: found by rules when
it is loaded, and proved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import msgspec
from tokenizers import AddedToken

from holdfast.errors import InvalidRequest
from holdfast.front.prompt.conversation import ToolHabits
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.template_probes import (
    Options,
    Proof,
    ThinkingSwitch,
    find_switch,
    follows_results,
    leaves_out_calls,
    opens_thought,
    prove,
    shows_tools,
    takes_text_and_thought,
)
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.toolcalls.dialect import PLAIN, CallFormat, ModelDialect, ReasoningFormat
from holdfast.front.toolcalls.families import FAMILIES, families_for
from holdfast.front.toolcalls.markers import in_vocabulary
from holdfast.wire.requests import ChatPrompt

ToolsBy: TypeAlias = Literal["template", "text", "none"]

_IN_TEXT: Final = "hermes"
_NO_TOOLS: Final = "the chat template shows no tools"
# an answer's text between a result and the user, the least that a template takes
_BRIDGES: Final = ("", "OK.")
_LONGEST_OPENING = 2000  # characters that a template writes for an answer to begin
_LEAST_MARKER = 3  # characters: shorter added tokens are runs of white space and single letters
_QUESTION = {"role": "user", "content": "Hello!"}
_WITH_THOUGHT = (
    _QUESTION,
    {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."},
    _QUESTION,
)


REASONING_FORMATS: Final = (
    ReasoningFormat(start="<|channel>thought\n", end="<channel|>"),
    ReasoningFormat(start="<|open|>think<|sep|>", end="<|close|>think<|sep|>"),
    ReasoningFormat(start="<seed:think>", end="</seed:think>"),
    ReasoningFormat(start="<mm:think>", end="</mm:think>"),
    ReasoningFormat(start="<longcat_think>", end="</longcat_think>"),
    ReasoningFormat(start="<|think:start|>", end="<|think:end|>"),
    ReasoningFormat(start="<|START_THINKING|>", end="<|END_THINKING|>"),
    ReasoningFormat(start="<|inner_prefix|>", end="<|inner_suffix|>"),
    ReasoningFormat(start="[THINK]", end="[/THINK]"),
    ReasoningFormat(start="◁think▷", end="◁/think▷"),
    ReasoningFormat(start="<think>", end="</think>"),
    ReasoningFormat(start="<|think|>", end="<|end|>"),
    ReasoningFormat(start="Here are my reasoning steps:", end="[BEGIN FINAL RESPONSE]"),
    ReasoningFormat(start="Here is my thought process:", end="Here is my response:"),
)
"""Markers of thoughts, those of one family before those of many."""


SILENT_MARKS: Final = (
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|START_TEXT|>",
    "<|END_TEXT|>",
    "<response>",
    "</response>",
    "<answer>",
    "</answer>",
    "[END FINAL RESPONSE]",
)
"""Stand around visible text and say nothing; counted as such where they are tokens."""
FRAMES: Final = (("<answer>", "</answer>"),)
"""Stand as ordinary text around the whole visible answer of models whose templates name them:
Hunyuan A13B.
"""


def reasoning_for(
    source: str, tokens: Collection[str], *, shown: str = ""
) -> ReasoningFormat | None:
    """The markers of thoughts: named by a template, written by it, or a pair of tokens though it
    names none.

    shown: a conversation as the template renders it, up to where an answer begins. Some build their
    markers from parts, so that the source holds none of them.
    """
    formats = [in_vocabulary(each, (each.start,), tokens) for each in REASONING_FORMATS]
    named = (each for each in formats if each.end in source and each.start.strip() in source)
    written = (each for each in formats if _is_written(each, shown))
    paired = (each for each in formats if each.end in tokens and _first_token(each.start, tokens))
    # R1's template only cuts thoughts out
    half = (each for each in formats if each.start == "<think>" and each.end in source)
    return next(named, None) or next(written, None) or next(paired, None) or next(half, None)


def _is_written(reasoning: ReasoningFormat, shown: str) -> bool:
    """Whether a rendered conversation holds a whole thought, or ends with the beginning of one."""
    start = reasoning.start.strip()
    return shown.rstrip().endswith(start) or (start in shown and reasoning.end in shown)


def frame_for(source: str, tokens: Collection[str]) -> tuple[str, str]:
    """What stands in text around every answer, named by the template; empty where it is tokens or
    there is none.
    """
    named = (
        frame for frame in FRAMES if all(mark in source and mark not in tokens for mark in frame)
    )
    return next(named, ("", ""))


def _first_token(marker: str, tokens: Collection[str]) -> bool:
    return any(marker.startswith(token) for token in tokens)


class ThinkingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model's thoughts.

    `switch` are the template's options that turn them on and off.
    """

    start: str
    end: str
    opened_by_prompt: bool  # unless a request asks for something else
    switch: tuple[str, ...] = ()
    efforts: dict[str, dict[str, Any]] = {}  # what is asked → the template's options for it


class DialectReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of a model's tools and thoughts when it was loaded.

    `tools`: its template shows them ("template"), they are told in text ("text"), or there is no
    template ("none").
    """

    family: str = ""
    tools: ToolsBy = "none"
    proven: bool = False
    why: str = ""  # the family's own way was not proven
    # the template writes the calls of earlier answers; else they are written into their text
    calls_kept: bool = False
    # it takes several calls in one answer; else they become pairs of call and result
    parallel: bool = False
    ids: str = ""  # what call ids look like
    thinking: ThinkingReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDialect:
    """All of it, for requests and for the reports."""

    dialect: ModelDialect = PLAIN
    # brings conversations with tools into the form that it needs
    template: ChatTemplate | None = None
    switch: ThinkingSwitch = ThinkingSwitch()
    report: DialectReport = DialectReport()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    dialect: ModelDialect
    habits: ToolHabits
    proof: Proof


def find_dialect(
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    *,
    config: Mapping[str, Any],
    model_type: str = "",
) -> FoundDialect:
    """Try the families that fit a template, and take the first whose calls come back through it.

    config: tokenizer_config.json. A model whose template shows no tools, or of which nothing is
    proven, gets them in text.
    """
    tokens = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}
    reasoning = reasoning_for("", tokens)
    if template is not None:
        reasoning = reasoning_for(
            template.with_tools, tokens, shown=_rendered(template, {}, _WITH_THOUGHT)
        )
    if template is None:
        return FoundDialect(dialect=_dialect("", None, reasoning, tokenizer))
    search = _Search(template, tokenizer, reasoning, tokens)
    parser_type = str(config.get("tool_parser_type", ""))
    names = families_for(
        template.with_tools, tokens, parser_type=parser_type, model_type=model_type
    )
    named = (
        name
        for name in families_for(template.with_tools, (), parser_type="", model_type="")
        if name != _IN_TEXT
    )
    found, why = search.by_family(names if search.shows_tools else tuple(named))
    if found is None:
        found = search.in_text(names)
    in_template = found.habits.in_text is None and found.habits.told is None
    tools: ToolsBy = "template" if in_template else "text"
    adapted = template.with_tool_habits(found.habits)
    switch = find_switch(template.with_tools, lambda options: _rendered(template, options))
    return FoundDialect(
        dialect=replace(found.dialect, frame=frame_for(template.with_tools, tokens)),
        template=adapted,
        switch=switch,
        report=DialectReport(
            family=found.dialect.family,
            tools=tools,
            proven=not found.proof.failure,
            why=why or found.proof.failure,
            calls_kept=found.habits.in_text is None and found.habits.written is None,
            parallel=found.habits.parallel,
            ids=found.habits.id_form,
            thinking=None
            if reasoning is None
            else _thinking_report(adapted, found.dialect, reasoning, switch),
        ),
    )


class _Search:
    """Looks for the family of one model."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        reasoning: ReasoningFormat | None,
        tokens: Set[str],
    ) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._reasoning, self._tokens = reasoning, tokens
        self._drops_calls = leaves_out_calls(template)
        self.shows_tools = shows_tools(template)

    def by_family(self, names: Sequence[str]) -> tuple[_Candidate | None, str]:
        """The best proven candidate, and why there is none, or why its tools are told in text."""
        failure, best = "no family of models is known that writes calls like this", None
        for name in names:
            calls = FAMILIES[name].calls
            found = self._tried(name, in_vocabulary(calls, calls.marks, self._tokens))
            if not found.proof.failure and (
                best is None or found.proof.likeness > best.proof.likeness
            ):
                best = found
            if best is not None and best.proof.likeness == 1:
                break
            failure = f"{name}: {found.proof.failure}"
        if self.shows_tools:
            return best, "" if best else failure
        return best, _NO_TOOLS

    def in_text(self, names: Sequence[str]) -> _Candidate:
        """Tools told in the system message.

        A family whose markers are all tokens is read too: the model may be of it.
        """
        calls = FAMILIES[_IN_TEXT].calls
        others = (FAMILIES[name].calls for name in names if name != _IN_TEXT)
        own = next(
            (other for other in others if other.marks and self._tokens >= set(other.marks)), None
        )
        read_too = () if own is None else (own,)
        return self._candidate(
            _IN_TEXT, calls, ToolHabits(in_text=calls, id_form=calls.id_form), read_too=read_too
        )

    def _tried(self, name: str, calls: CallFormat) -> _Candidate:
        """The family with the first habits with which its calls come back."""
        ended = _rendered(self._template, {})
        opened = next((opener for opener in calls.openers if ended.endswith(opener)), "")
        habits = ToolHabits(id_form=calls.id_form, left_to_model=opened)
        if not self.shows_tools:
            return self._candidate(name, calls, replace(habits, told=calls, written=calls))
        candidates = (
            self._candidate(name, calls, each)
            for each in (
                (replace(habits, written=calls),)
                if self._drops_calls
                else (habits, replace(habits, parallel=False))
            )
        )
        tried = []
        for candidate in candidates:
            if not candidate.proof.failure:
                return candidate
            tried.append(candidate)
        return tried[0]

    def _candidate(
        self,
        name: str,
        calls: CallFormat,
        habits: ToolHabits,
        *,
        read_too: tuple[CallFormat, ...] = (),
    ) -> _Candidate:
        dialect = _dialect(name, calls, self._reasoning, self._tokenizer, read_too=read_too)
        template = self._template.with_tool_habits(habits)
        proof = prove(template, dialect, self._tokenizer, parallel=habits.parallel)
        if not proof.failure:
            habits = self._mended(habits)
        return _Candidate(dialect=dialect, habits=habits, proof=proof)

    def _mended(self, habits: ToolHabits) -> ToolHabits:
        """The habits with what else the template asks of a conversation that goes on."""
        bridged = (replace(habits, answer_behind_results=text) for text in _BRIDGES)
        if not follows_results(self._template.with_tool_habits(habits)):
            habits = next(
                (
                    each
                    for each in bridged
                    if follows_results(self._template.with_tool_habits(each))
                ),
                habits,
            )
        if not takes_text_and_thought(self._template.with_tool_habits(habits)):
            habits = replace(habits, thought_beside_text=False)
        return habits


def _dialect(
    name: str,
    calls: CallFormat | None,
    reasoning: ReasoningFormat | None,
    tokenizer: Tokenizer,
    *,
    read_too: tuple[CallFormat, ...] = (),
) -> ModelDialect:
    added = tokenizer.backend.get_added_tokens_decoder()
    contents = {token.content for token in added.values()}
    of_family = FAMILIES[name].silent_marks if name else ()
    silent = (*(mark for mark in SILENT_MARKS if mark in contents), *of_family)
    forms = (calls, *read_too) if calls else ()
    marks = [
        *(mark for form in forms for mark in form.marks),
        *((reasoning.start, reasoning.end) if reasoning else ()),
        *silent,
    ]
    ids = {
        token.content: token_id for token_id, token in added.items() if _is_in_marks(token, marks)
    }
    return ModelDialect(
        family=name,
        calls=calls,
        read_too=read_too,
        reasoning=reasoning,
        marker_ids=ids,
        dropped_marks=silent,
    )


def _is_in_marks(token: AddedToken, marks: Iterable[str]) -> bool:
    """Whether a token is a mark, or a part of one that readers have to be told of: its beginning,
    or what is not shown.
    """
    content = token.content
    if len(content.strip()) < _LEAST_MARKER:
        return False
    return any(content in mark if token.special else mark.startswith(content) for mark in marks)


def _rendered(
    template: ChatTemplate, options: Options, messages: tuple[dict[str, Any], ...] = (_QUESTION,)
) -> str:
    try:
        return template.render(ChatPrompt(messages=messages, template_options=options))
    except InvalidRequest:
        return ""


def _thinking_report(
    template: ChatTemplate,
    dialect: ModelDialect,
    reasoning: ReasoningFormat,
    switch: ThinkingSwitch,
) -> ThinkingReport:
    prompt = ChatPrompt(messages=(_QUESTION,))
    return ThinkingReport(
        start=reasoning.start.strip(),
        end=reasoning.end.strip(),
        opened_by_prompt=prompt_opens_thought(template, dialect, prompt, _rendered(template, {})),
        switch=switch.names,
        efforts={str(effort): options for effort, options in switch.options.items()},
    )


def prompt_opens_thought(
    template: ChatTemplate, dialect: ModelDialect, prompt: ChatPrompt, text: str
) -> bool:
    """Whether an answer to a rendered conversation begins within a thought.

    What counts is what the template writes behind the last message: a message may hold the markers
    too.
    """
    if dialect.reasoning is None:
        return False
    if prompt.continue_last:
        content = prompt.messages[-1].get("content")
        return isinstance(content, str) and opens_thought(content, dialect)
    if dialect.reasoning.start.strip() not in text[-_LONGEST_OPENING:]:
        return False
    opening = template.opening(prompt, text)
    return (
        opens_thought(opening, dialect)
        if opening
        else text.rstrip().endswith(dialect.reasoning.start.strip())
    )

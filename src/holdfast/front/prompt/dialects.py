"""Recognizes how a model writes calls and thoughts (its *dialect*), and how its template handles
them (its *habits*).

When a model is loaded, its added tokens and the words in its chat template suggest model families.
A family is *proven*, and may be chosen, if its calls can be rendered by the template and read back
(`template_probes.prove`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import msgspec
from tokenizers import AddedToken

from holdfast.front.prompt.conversation import ToolHabits
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.template_probes import (
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
from holdfast.front.prompt.turn_ends import find_turn_ends
from holdfast.front.request import ChatPrompt
from holdfast.front.toolcalls.call_format import CallFormat
from holdfast.front.toolcalls.dialect import PLAIN, ModelDialect, ReasoningFormat
from holdfast.front.toolcalls.families import FAMILIES, families_for
from holdfast.front.toolcalls.incoming import markers_in, spelled_as_in_vocabulary

ToolsBy: TypeAlias = Literal["template", "text", "none"]


# formats of a single family come before formats that many families share
_REASONING_FORMATS: Final = (
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
    ReasoningFormat(start="<|think|>", end="<|end|><|begin|>assistant"),
    ReasoningFormat(start="Here are my reasoning steps:", end="[BEGIN FINAL RESPONSE]"),
    ReasoningFormat(start="Here is my thought process:", end="Here is my response:"),
)

# markers around visible text that carry no meaning; removed only where they are tokens
_SILENT_MARKS: Final = (
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
# ordinary text that a model puts around the whole visible answer, if the template names it (Hunyuan
# A13B)
_FRAMES: Final = (("<answer>", "</answer>"),)
_TEXT_FAMILY: Final = "hermes"  # its call format is used when tools are described as text
_ANSWERS_BETWEEN: Final = ("", "OK.")  # answers to try between a result and a user message
_MAX_OPENING = 2000  # characters of a generation prompt
# grammars treat a token of this form as special, even if it is not declared so
_TAG_PATTERN = re.compile(r"<.+>")
_MIN_MARKER = 3  # characters: shorter added tokens are runs of white space and single letters
_QUESTION = {"role": "user", "content": "Hello!"}
_FIRST_TURN: Final = ChatPrompt(messages=(_QUESTION,))
_WITH_THOUGHT: Final = ChatPrompt(
    messages=(
        _QUESTION,
        {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."},
        _QUESTION,
    )
)


class ThinkingReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes its thoughts."""

    start: str  # marker that opens a thought
    end: str  # marker that closes a thought
    # whether the prompt opens a thought by default; a request may change that
    opened_by_prompt: bool
    switch: tuple[str, ...] = ()  # names of the template options that turn thinking on and off
    efforts: dict[str, dict[str, Any]] = {}  # the template options for each effort


class DialectReport(msgspec.Struct, frozen=True, kw_only=True):
    """The findings about a model's tools and thoughts when it was loaded."""

    family: str = ""  # the tool-call family; empty: none was recognized
    # "template": the template shows the tools; "text": a message describes them; "none": the model
    # has no template
    tools: ToolsBy = "none"
    proven: bool = False  # whether calls that the template rendered were read back unchanged
    why: str = ""  # why the family is not proven, or why a message describes the tools
    # whether the template writes past calls; otherwise they are written into the text of answers
    calls_kept: bool = False
    # whether the template accepts several calls in one answer; otherwise each call becomes a
    # separate answer, followed by its result
    parallel: bool = False
    ids: str = ""  # the form of call ids
    thinking: ThinkingReport | None = None  # None: the model writes no thoughts


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDialect:
    """The dialect of a model, together with a template and a report that fit it."""

    dialect: ModelDialect = PLAIN
    template: ChatTemplate | None = None  # adapts conversations with tools
    switch: ThinkingSwitch = ThinkingSwitch()  # how to turn thinking on and off
    report: DialectReport = DialectReport()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A family that was tried, and how well it fits."""

    dialect: ModelDialect
    habits: ToolHabits  # what the template requires with this dialect
    proof: Proof  # whether rendered calls were read back unchanged


def find_dialect(
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    *,
    config: Mapping[str, Any],
    model_type: str = "",
) -> FoundDialect:
    """Try the model families that match a template, and choose one whose calls can be read back.

    If the template shows no tools, or no family is proven, a message describes the tools.

    config: tokenizer_config.json.
    """
    added_tokens = {
        token.content for token in tokenizer.backend.get_added_tokens_decoder().values()
    }
    source = "" if template is None else template.with_tools
    probe_text = "" if template is None else template.try_render(_WITH_THOUGHT)
    reasoning = _reasoning_for(source, added_tokens, probe_text=probe_text)
    if template is None:
        return FoundDialect(dialect=_make_dialect("", None, reasoning, tokenizer))
    search = _Search(template, tokenizer, reasoning, added_tokens)
    parser_type = str(config.get("tool_parser_type", ""))
    matching_families = families_for(
        source, added_tokens, parser_type=parser_type, model_type=model_type
    )
    # those that the template itself names; only these are tried if it shows no tools
    named_families = families_for(source, (), parser_type="", model_type="")
    candidate, why = search.by_family(
        matching_families
        if search.shows_tools
        else [name for name in named_families if name != _TEXT_FAMILY]
    )
    if candidate is None:
        candidate = search.in_text(matching_families)
    adapted = template.with_tool_habits(candidate.habits)
    switch = find_switch(template)
    return FoundDialect(
        dialect=_with_ends(
            replace(candidate.dialect, frame=_frame_for(source, added_tokens)), adapted, tokenizer
        ),
        template=adapted,
        switch=switch,
        report=DialectReport(
            family=candidate.dialect.family,
            tools="text" if candidate.habits.describes_tools else "template",
            proven=not candidate.proof.failure,
            why=why or candidate.proof.failure,
            calls_kept=candidate.habits.tools_in_text_format is None
            and candidate.habits.written_calls_format is None,
            parallel=candidate.habits.parallel,
            ids=candidate.habits.id_form,
            thinking=_thinking_report(adapted, candidate.dialect, switch),
        ),
    )


class _Search:
    """Searches for the family of one model: the one whose calls the template renders and we read
    back.

    tokens: the texts of the model's added tokens.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        reasoning: ReasoningFormat | None,
        tokens: Set[str],
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._reasoning = reasoning
        self._tokens = tokens
        self._drops_calls = leaves_out_calls(template)
        self.shows_tools = shows_tools(template)

    def by_family(self, names: Iterable[str]) -> tuple[_Candidate | None, str]:
        """The proven candidate that fits best, and a reason. None if no candidate was proven.

        The reason says why no candidate exists, or why a message describes the tools.
        """
        failure = "this model's calls match no known model family"
        best: _Candidate | None = None
        for name in names:
            calls = FAMILIES[name].calls
            candidate = self._best_habits(
                name, spelled_as_in_vocabulary(calls, calls.markers, self._tokens)
            )
            if candidate.proof.failure:
                failure = f"{name}: {candidate.proof.failure}"
            elif best is None or candidate.proof.likeness > best.proof.likeness:
                best = candidate
            if best is not None and best.proof.likeness == 1:
                break
        if not self.shows_tools:
            return best, "the chat template shows no tools"
        return best, failure if best is None else ""

    def in_text(self, names: Iterable[str]) -> _Candidate:
        """The candidate that describes tools in the system message.

        If all markers of a family are tokens of this model, calls in that family's syntax are read,
        too, because the model may belong to it.
        """
        calls = FAMILIES[_TEXT_FAMILY].calls
        others = [FAMILIES[name].calls for name in names if name != _TEXT_FAMILY]
        fitting_formats = [
            other for other in others if other.markers and self._tokens >= set(other.markers)
        ]
        habits = ToolHabits(tools_in_text_format=calls, id_form=calls.id_form)
        return self._candidate(_TEXT_FAMILY, calls, habits, also_read=tuple(fitting_formats[:1]))

    def _best_habits(self, name: str, calls: CallFormat) -> _Candidate:
        """Try to prove a family with several assumptions about the habits of its template.

        Returns the family with the first habits that could be proven, or, if none could, with the
        habits that were tried first.
        """
        prompt = self._template.try_render(_FIRST_TURN)
        begun_call = next((opener for opener in calls.call_starts if prompt.endswith(opener)), "")
        habits = ToolHabits(id_form=calls.id_form, left_to_model=begun_call)
        if not self.shows_tools:
            return self._candidate(
                name,
                calls,
                replace(habits, described_tools_format=calls, written_calls_format=calls),
            )
        if self._drops_calls:
            return self._candidate(name, calls, replace(habits, written_calls_format=calls))
        first = self._candidate(name, calls, habits)
        if not first.proof.failure:
            return first
        second = self._candidate(name, calls, replace(habits, parallel=False))
        return first if second.proof.failure else second

    def _candidate(
        self,
        name: str,
        calls: CallFormat,
        habits: ToolHabits,
        *,
        also_read: tuple[CallFormat, ...] = (),
    ) -> _Candidate:
        """A family with these habits, and whether its calls are read back with them.

        also_read: the formats of other families whose calls are read, too.
        """
        dialect = _make_dialect(name, calls, self._reasoning, self._tokenizer, also_read=also_read)
        template = self._template.with_tool_habits(habits)
        proof = prove(template, dialect, self._tokenizer, parallel=habits.parallel)
        if not proof.failure:
            habits = self._with_other_habits(habits)
        return _Candidate(dialect=dialect, habits=habits, proof=proof)

    def _with_other_habits(self, habits: ToolHabits) -> ToolHabits:
        """Adapt the habits to the template's other requirements for the turns after a call."""
        if not follows_results(self._template.with_tool_habits(habits)):
            for answer_text in _ANSWERS_BETWEEN:
                changed_habits = replace(habits, answer_after_results=answer_text)
                if follows_results(self._template.with_tool_habits(changed_habits)):
                    habits = changed_habits
                    break
        if not takes_text_and_thought(self._template.with_tool_habits(habits)):
            habits = replace(habits, thought_beside_text=False)
        return habits


def _make_dialect(
    name: str,
    calls: CallFormat | None,
    reasoning: ReasoningFormat | None,
    tokenizer: Tokenizer,
    *,
    also_read: tuple[CallFormat, ...] = (),
) -> ModelDialect:
    """Combine the parts of a dialect, and find its markers among the tokenizer's added tokens."""
    added_tokens = tokenizer.backend.get_added_tokens_decoder()
    contents = {token.content for token in added_tokens.values()}
    silent_markers: list[str] = [mark for mark in _SILENT_MARKS if mark in contents]
    silent_markers += FAMILIES[name].silent_markers if name else ()
    all_markers = list(silent_markers)
    for call_format in (calls, *also_read):
        all_markers += call_format.markers if call_format is not None else ()
    if reasoning is not None:
        all_markers += (reasoning.start, reasoning.end)
    marker_ids = {
        token.content.strip(): token_id
        for token_id, token in _tokens_with_spaces_first(added_tokens)
        if _is_needed_by_parsers(token, all_markers)
    }
    markup = "\n".join(_grammar_markup(calls))
    return ModelDialect(
        family=name,
        calls=calls,
        also_read=also_read,
        reasoning=reasoning,
        marker_ids=marker_ids,
        more_markup_ids={
            token.content: token_id
            for token_id, token in added_tokens.items()
            if token.content not in marker_ids
            and _TAG_PATTERN.fullmatch(token.content)
            and token.content in markup
        },
        dropped_markers=tuple(silent_markers),
    )


def _tokens_with_spaces_first(added: Mapping[int, AddedToken]) -> Sequence[tuple[int, AddedToken]]:
    """The tokens, those with surrounding white space first. In some models, such a token is a
    marker with the white space after it.
    """
    return sorted(added.items(), key=lambda item: item[1].content == item[1].content.strip())


def _with_ends(dialect: ModelDialect, template: ChatTemplate, tokenizer: Tokenizer) -> ModelDialect:
    """Add the end markers of answers, from the template, the family, and the model's files.

    A turn end ends every answer: sampling it stops the generation. A message end ends an answer only
    if no other part follows it: the reader of the answer's text finds it.
    """
    token_ids = {
        token.content: token_id
        for token_id, token in tokenizer.backend.get_added_tokens_decoder().items()
    }
    ends = find_turn_ends(template, dialect, tokens=token_ids)
    eos_tokens = [
        text for text, token_id in token_ids.items() if token_id in tokenizer.eos_token_ids
    ]
    turn_ends = dict.fromkeys((*ends.turn, *eos_tokens))
    # the reader of channels recognizes message ends by itself
    is_in_channels = dialect.calls is not None and bool(dialect.calls.channel_starts)
    message_ends = (
        () if is_in_channels else tuple(end for end in ends.message if end not in turn_ends)
    )
    return replace(
        dialect,
        turn_ends=(*turn_ends,),
        message_ends=tuple(end.strip() for end in message_ends),
        marker_ids={**{end.strip(): token_ids[end] for end in message_ends}, **dialect.marker_ids},
    )


def _grammar_markup(calls: CallFormat | None) -> Iterator[str]:
    """All markup that a grammar writes in calls."""
    if calls is None:
        return
    for layout in (*calls.grammar_layouts, *calls.incomplete_layouts):
        yield from layout.markup
    if calls.channels is not None:
        yield from (*calls.channels.text, *calls.channels.thought, calls.channels.end)


def _is_needed_by_parsers(token: AddedToken, marks: Iterable[str]) -> bool:
    """Whether the parsers of answers must know a token by its id.

    They must if it is a mark, the beginning of a mark, or a special token within a mark, because
    special tokens are not decoded to text.
    """
    content = token.content.strip()
    if len(content) < _MIN_MARKER:
        return False
    return any(content in mark if token.special else mark.startswith(content) for mark in marks)


def _thinking_report(
    template: ChatTemplate, dialect: ModelDialect, switch: ThinkingSwitch
) -> ThinkingReport | None:
    """How the model writes thoughts, for /health and `holdfast doctor`; None if it writes none."""
    if dialect.reasoning is None:
        return None
    text = template.try_render(_FIRST_TURN)
    return ThinkingReport(
        start=dialect.reasoning.start.strip(),
        end=dialect.reasoning.end.strip(),
        opened_by_prompt=prompt_opens_thought(template, dialect, _FIRST_TURN, text),
        switch=switch.names,
        efforts={str(effort): options for effort, options in switch.options.items()},
    )


def prompt_opens_thought(
    template: ChatTemplate, dialect: ModelDialect, prompt: ChatPrompt, text: str
) -> bool:
    """Whether the answer to a rendered conversation begins within a thought.

    Only the generation prompt is examined, because a message may contain the markers, too.
    """
    if dialect.reasoning is None:
        return False
    if prompt.continue_last:
        content = prompt.messages[-1].get("content")
        return isinstance(content, str) and opens_thought(content, dialect)
    start = dialect.reasoning.start.strip()
    if start not in text[-_MAX_OPENING:]:
        return False
    opening = template.opening(prompt, text)
    return opens_thought(opening, dialect) if opening else text.rstrip().endswith(start)


def _reasoning_for(
    source: str, tokens: Collection[str], *, probe_text: str
) -> ReasoningFormat | None:
    """The markers around thoughts: those that the template names or renders.

    If there are none, returns a known pair of markers that are tokens, or else None.

    probe_text: a rendered conversation up to where the answer begins. It is needed because some
        templates build their markers from parts.
    """
    formats = [spelled_as_in_vocabulary(each, (each.start,), tokens) for each in _REASONING_FORMATS]
    named_formats = [each for each in formats if _is_named(each, source)]
    written_formats = [each for each in formats if _is_written(each, probe_text)]
    token_formats = [
        each
        for each in formats
        if each.end in tokens and any(each.start.startswith(token) for token in tokens)
    ]
    # DeepSeek R1's template names only the end marker, to cut thoughts out of past answers
    end_only_formats = [each for each in formats if each.start == "<think>" and each.end in source]
    return next(iter((*named_formats, *written_formats, *token_formats, *end_only_formats)), None)


def _is_named(reasoning: ReasoningFormat, source: str) -> bool:
    """Whether a template contains both markers. The end may consist of several markers in a row."""
    end_markers = markers_in(reasoning.end)
    end_parts = end_markers if len(end_markers) > 1 else (reasoning.end,)
    return reasoning.start.strip() in source and all(end in source for end in end_parts)


def _is_written(reasoning: ReasoningFormat, probe_text: str) -> bool:
    """Whether a rendered conversation contains a whole thought, or ends by opening one."""
    start = reasoning.start.strip()
    return probe_text.rstrip().endswith(start) or (
        start in probe_text and reasoning.end in probe_text
    )


def _frame_for(source: str, tokens: Collection[str]) -> tuple[str, str]:
    """The text that the template puts around every answer.

    Returns two empty strings if the template names no such text, or if that text consists of
    tokens.
    """
    for frame in _FRAMES:
        if all(mark in source and mark not in tokens for mark in frame):
            return frame
    return ("", "")

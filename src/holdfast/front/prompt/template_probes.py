"""Probes of a chat template at load.

`prove` renders a conversation with calls and reads them back, so that a model's calls are known to
be understood. `rewritten_turns` finds out whether the template writes past answers differently
from how the model generated them, above all without their thoughts: the next turn's prompt then
differs from the cached tokens, and can be prefilled before that turn arrives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from holdfast.errors import InvalidRequest
from holdfast.front.answers.answer import AnswerReader
from holdfast.front.prompt.conversation import Message, answer_message
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenize import Tokenizer, well_formed
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import PLAIN, Call, ModelDialect
from holdfast.front.toolcalls.segments import AnswerPart, CallArguments, CallBegun, CallEnded
from holdfast.wire.output import ToolCall
from holdfast.wire.requests import ChatPrompt, Thinking, ThinkingEffort

_QUESTION: Final = "question3841"
_RESULTS: Final = ("result5927", "result6038")
_FOLLOW_UP: Final = "question7162"
NextTurn: TypeAlias = Literal["user", "results"]
"""What comes behind an answer: a message of the user, or, where it has called tools, their results.
"""

NEXT_TURNS: Final[tuple[NextTurn, ...]] = get_args(NextTurn)
_THOUGHT: Final = "thought5528"
_ANSWER: Final = "answer6639"
_NEXT: Final = "next7740"
Options: TypeAlias = dict[str, Any]
# of a short conversation with these options; empty when they are refused
Rendered: TypeAlias = Callable[[Options], str]

_YES_OR_NO: Final = ("enable_thinking", "thinking", "reasoning")
_MODES: Final = ("thinking_mode", "reasoning_mode")
_OFF_WORDS: Final = ("none", "no_think", "off", "disabled", "chat")
_ON_WORDS: Final = ("enabled", "on", "thinking", "adaptive", "auto")
_EFFORTS: Final = ("reasoning_effort", "thinking_effort")
# Where on one scale the words of templates stand.
_RANK: Final[Mapping[str, int]] = {
    **dict.fromkeys(_OFF_WORDS, 0),
    "minimal": 2,
    "low": 4,
    "medium": 6,
    "high": 8,
    "xhigh": 9,
    "max": 10,
}
_USUAL: Final = ("low", "medium", "high")  # of templates that print whatever they are given
_BUDGETS: Final[Mapping[ThinkingEffort, int]] = {
    "off": 0,
    "on": -1,
    "minimal": 512,
    "low": 1024,
    "medium": 4096,
    "high": 16384,
    "max": -1,
}
KEEPING: Final[Mapping[str, Any]] = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
}
"""Options of templates that keep the thoughts of earlier turns in the prompt."""


class _ProbeCall(NamedTuple):
    name: str
    arguments: Mapping[str, Any]


_CALLS: Final = (
    _ProbeCall(
        "find_places",
        {
            "query": 'Zürich "Süd", 東京\n<b>1 < 2</b> it\'s',
            "options": {"limit": 3, "tags": ["a", "b{}"], "deep": {"ratio": 1.5, "open": True}},
        },
    ),
    _ProbeCall("list_all", {}),
)
_OBJECT: Final = {"type": "object", "properties": {}}
PROBE_TOOLS: Final[tuple[dict[str, Any], ...]] = (
    {
        "type": "function",
        "function": {
            "name": "find_places",
            "description": "Find places.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for"},
                    "options": {
                        "type": "object",
                        "properties": {},
                        # asked for by a template that writes types of Python
                        "additionalProperties": {"type": "string"},
                        "description": "how",
                    },
                },
                "required": ["query"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "list_all", "description": "List all.", "parameters": _OBJECT},
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What came of it. `failure` is empty when names and arguments came back as they were."""

    failure: str = ""
    # how much of what the family's own format writes stands so in the template's text; 1: all
    likeness: float = 0.0


def shows_tools(template: ChatTemplate) -> bool:
    """Whether tools that are sent are in the prompt."""
    return _CALLS[0].name in _rendered(template, ({"role": "user", "content": _QUESTION},))


def leaves_out_calls(template: ChatTemplate) -> bool:
    """Whether the calls of an answer are not in the prompt, though the results are."""
    answer = _answer(template, _rendered(template, _conversation()), behind=0, dialect=PLAIN)
    return bool(answer.text) and not any(
        word in answer.text for word in (*_CALLS[0].arguments, _CALLS[1].name)
    )


def follows_results(template: ChatTemplate) -> bool:
    """Whether a message of the user may stand right behind a result."""
    return _FOLLOW_UP in _rendered(
        template, (*_conversation(), {"role": "user", "content": _FOLLOW_UP})
    )


def takes_text_and_thought(template: ChatTemplate) -> bool:
    """Whether an answer may have a thought, a text and calls."""
    question, answer, *results = _conversation()
    return bool(
        _rendered(
            template,
            (question, {**answer, "content": "text", "reasoning_content": "thought"}, *results),
        )
    )


def prove(
    template: ChatTemplate, dialect: ModelDialect, tokenizer: Tokenizer, *, parallel: bool = True
) -> Proof:
    """Have the template write two calls, and read what stands between question and result.

    parallel: both are in one answer, else in two. The tokens that end an answer end it here too.
    """
    messages = _conversation()
    whole = _rendered(template, messages)
    if not whole:
        return Proof(failure="the template refuses a conversation with calls")
    if any(result not in whole for result in _RESULTS):
        return Proof(failure="the template leaves out results of tools")
    ends = [
        text
        for token_id in tokenizer.eos_token_ids
        if (text := tokenizer.backend.id_to_token(token_id))
    ]
    parts = (_CALLS,) if parallel else (_CALLS[:1], _CALLS[1:])
    answers = [
        _answer(template, whole, behind=place, dialect=dialect) for place in range(len(parts))
    ]
    for answer, calls in zip(answers, parts, strict=True):
        if failure := _misread(answer, calls, dialect, ends):
            return Proof(failure=failure)
    return Proof(
        likeness=min(
            _likeness(answer, calls, dialect) for answer, calls in zip(answers, parts, strict=True)
        )
    )


class _Answer(NamedTuple):
    text: str
    in_thought: bool


def _rendered(template: ChatTemplate, messages: Sequence[Message]) -> str:
    try:
        return well_formed(template.render(ChatPrompt(messages=tuple(messages), tools=PROBE_TOOLS)))
    except InvalidRequest:
        return ""


def _conversation() -> tuple[Message, ...]:
    calls = [_call(place) for place in range(len(_CALLS))]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    return ({"role": "user", "content": _QUESTION}, answer, _result(0), _result(1))


def _asked(results: int) -> tuple[Message, ...]:
    """The conversation up to an answer, when so many of the calls have been made, one in each
    answer.
    """
    pairs = (
        [{"role": "assistant", "content": "", "tool_calls": [_call(place)]}, _result(place)]
        for place in range(results)
    )
    return (
        {"role": "user", "content": _QUESTION},
        *(message for pair in pairs for message in pair),
    )


def _call(place: int) -> Message:
    name, arguments = _CALLS[place]
    return {
        "type": "function",
        "id": f"call{place:05}",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def _result(place: int) -> Message:
    return {
        "role": "tool",
        "tool_call_id": f"call{place:05}",
        "name": _CALLS[place].name,
        "content": _RESULTS[place],
    }


def _answer(template: ChatTemplate, whole: str, *, behind: int, dialect: ModelDialect) -> _Answer:
    """What the model would have generated behind so many results, and what follows it up to the
    next one.
    """
    prompt = ChatPrompt(messages=_asked(behind), tools=PROBE_TOOLS)
    before = _rendered(template, prompt.messages)
    opening = template.opening(prompt, before)
    begin = len(_common(before, whole))
    header = before[: len(before) - len(opening)] + _up_to_thought(opening, dialect)
    # an answer of the past lacks the thought that a new one begins with
    if begin < len(before) and whole.startswith(header):
        begin = len(header)
    in_thought = opens_thought(whole[len(before) - len(opening) : begin], dialect)
    end = whole.find(_RESULTS[behind], begin)
    return _Answer(whole[begin : end if end >= 0 else len(whole)], in_thought)


def _common(first: str, second: str) -> str:
    place = next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        None,
    )
    return first[: min(len(first), len(second)) if place is None else place]


def _up_to_thought(opening: str, dialect: ModelDialect) -> str:
    if dialect.reasoning is None:
        return opening
    places = [
        opening.find(mark)
        for mark in (dialect.reasoning.start.strip(), dialect.reasoning.end.strip())
    ]
    found = [place for place in places if place >= 0]
    return opening[: min(found)] if found else opening


def opens_thought(tail: str, dialect: ModelDialect) -> bool:
    """Whether a text ends within a thought."""
    if dialect.reasoning is None:
        return False
    start, end = dialect.reasoning.start.strip(), dialect.reasoning.end.strip()
    return tail.rfind(start) > tail.rfind(end)


def _likeness(answer: _Answer, calls: Sequence[_ProbeCall], dialect: ModelDialect) -> float:
    if dialect.calls is None:
        return 0.0
    written = dialect.calls.write(
        [Call(call.name, call.arguments, f"call{place:05}") for place, call in enumerate(calls)]
    ).strip()
    begins = (found.start() for found in re.finditer(re.escape(written[:4]), answer.text))
    return max((len(_common(written, answer.text[begin:])) for begin in begins), default=0) / len(
        written
    )


def _misread(
    answer: _Answer, calls: Sequence[_ProbeCall], dialect: ModelDialect, ends: Sequence[str]
) -> str:
    """What is wrong with the calls that are read from an answer; empty: nothing."""
    end = min(
        (place for mark in ends if (place := answer.text.find(mark)) >= 0), default=len(answer.text)
    )
    reader = AnswerReader(dialect, tools=DeclaredTools(PROBE_TOOLS), in_reasoning=answer.in_thought)
    parts = [*reader.push(dialect.markers.encode(answer.text[:end])), *reader.flush()]
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    if names != [call.name for call in calls]:
        return f"{len(calls)} calls were written, {len(names)} were read: {', '.join(names)}"
    for call, arguments in zip(calls, _arguments(parts), strict=False):
        if not _is_same(arguments, call.arguments):
            return f"the arguments of {call.name} came back as {arguments[:200]}"
    return ""


def _arguments(parts: Iterable[AnswerPart]) -> Iterator[str]:
    text = ""
    for part in parts:
        if isinstance(part, CallArguments):
            text += part.text
        elif isinstance(part, CallEnded):
            yield text
            text = ""


def _is_same(text: str, arguments: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads(text) == arguments)
    except ValueError:
        return False


def next_messages(calls: Iterable[ToolCall], content: str) -> tuple[Message, ...]:
    """What comes behind an answer with these calls: a result of each, or a message of the user, of
    this content.
    """
    results = tuple({"role": "tool", "tool_call_id": call.id, "content": content} for call in calls)
    return results or ({"role": "user", "content": content},)


def rewritten_turns(
    template: ChatTemplate | None, dialect: ModelDialect, *, options: Mapping[str, Any]
) -> frozenset[NextTurn]:
    """What behind an answer makes the template leave out its thought, or write what precedes it
    otherwise than it was asked.
    """
    if template is None:
        return frozenset()
    return frozenset(
        turn for turn in NEXT_TURNS if _rewrites(template, dialect, turn, dict(options))
    )


def _rewrites(
    template: ChatTemplate, dialect: ModelDialect, turn: NextTurn, options: dict[str, Any]
) -> bool:
    has_thoughts = dialect.reasoning is not None
    calls = (
        (ToolCall(id="call00001", name="list_all", arguments="{}"),) if turn == "results" else ()
    )
    tools = PROBE_TOOLS if calls else ()
    question = {"role": "user", "content": _QUESTION}
    answer = answer_message(_ANSWER, reasoning=_THOUGHT if has_thoughts else "", calls=calls)
    asked, later = (
        _rendered_or_empty(
            template, ChatPrompt(messages=messages, tools=tools, template_options=options)
        )
        for messages in ((question,), (question, answer, *next_messages(calls, _NEXT)))
    )
    if not asked or _NEXT not in later:
        return False
    return not later.startswith(asked) or (has_thoughts and _THOUGHT not in later)


def _rendered_or_empty(template: ChatTemplate, prompt: ChatPrompt) -> str:
    try:
        return well_formed(template.render(prompt))
    except InvalidRequest:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingSwitch:
    """What a template's options have to be for each effort.

    Without any: the template has no switch.
    """

    options: Mapping[ThinkingEffort, Options] = field(default_factory=dict)
    budget_option: str = ""  # takes a number of tokens
    keeping: Options = field(default_factory=dict)  # keeps the thoughts of earlier turns

    @property
    def names(self) -> tuple[str, ...]:
        """The options that it uses."""
        return tuple(
            dict.fromkeys([*(name for options in self.options.values() for name in options)])
        )

    def asked(self, thinking: Thinking) -> Options:
        """The options for what a request asks; nothing for one that asks nothing."""
        effort = thinking.effort
        if effort is None and thinking.budget_tokens is not None:
            effort = "off" if thinking.budget_tokens == 0 else "on"
        if effort is None:
            return {}
        options = dict(self.options.get(effort, {}))
        if self.budget_option and thinking.budget_tokens is not None and effort != "off":
            options[self.budget_option] = thinking.budget_tokens
        return options


def find_switch(source: str, rendered: Rendered) -> ThinkingSwitch:
    """Try the options that the template's text names, and keep those that change what it writes."""
    probe = _Probe(source, rendered)
    toggle = probe.yes_or_no() | probe.modes()
    words = probe.effort_words({name: values[True] for name, values in toggle.items()})
    in_steps = any(0 < rank < _RANK["high"] for known in words.values() for rank in known.values())
    budget = "thinking_budget" if probe.differs("thinking_budget", (0, 512)) else ""
    options: dict[ThinkingEffort, Options] = {}
    for effort in get_args(ThinkingEffort):
        asked = {name: values[_is_on(effort, in_steps=in_steps)] for name, values in toggle.items()}
        for name, known in words.items():
            asked |= _nearest(name, known, effort, toggled=bool(toggle))
        if probe.differs(
            "low_effort", (True, False), {name: values[True] for name, values in toggle.items()}
        ):
            asked |= {"low_effort": True} if effort in ("minimal", "low") else {}
        if budget and not asked:
            asked[budget] = _BUDGETS[effort]
        if asked and rendered(asked):
            options[effort] = asked
    keeping = {name: value for name, value in KEEPING.items() if probe.names(name)}
    return ThinkingSwitch(options=options, budget_option=budget, keeping=keeping)


def _is_on(effort: ThinkingEffort, *, in_steps: bool) -> bool:
    """Whether a switch that knows but on and off is on.

    Least thought is none where there is nothing between.
    """
    return effort != "off" and (in_steps or effort != "minimal")


def _nearest(
    name: str, known: Mapping[str, int], effort: ThinkingEffort, *, toggled: bool
) -> Options:
    if toggled and effort in ("off", "on"):
        return {}
    if effort == "on" and 0 not in known.values():
        return {}
    above = {word: rank for word, rank in known.items() if rank or effort == "off"}
    if "max" in known and "high" not in known:
        above[""] = _RANK["high"]  # the option left out
    wanted = _RANK[{"off": "none", "on": "high"}.get(effort, effort)]
    word = min(above, key=lambda each: (abs(above[each] - wanted), -above[each]), default="")
    return {name: word} if word else {}


class _Probe:
    """Asks the template."""

    def __init__(self, source: str, rendered: Rendered) -> None:
        self._source, self._rendered = source, rendered

    def names(self, option: str) -> bool:
        return re.search(rf"\b{option}\b", self._source) is not None

    def differs(self, option: str, values: tuple[Any, Any], others: Options | None = None) -> bool:
        """Whether the template takes both values of the option and writes something else for each."""
        if not self.names(option):
            return False
        first, second = (self._rendered({**(others or {}), option: value}) for value in values)
        return bool(first and second) and first != second

    def yes_or_no(self) -> dict[str, dict[bool, Any]]:
        """The option that is true or false; the first that does anything, since templates take the
        others for its names.
        """
        found = next((name for name in _YES_OR_NO if self.differs(name, (True, False))), "")
        return {found: {True: True, False: False}} if found else {}

    def modes(self) -> dict[str, dict[bool, Any]]:
        for name in _MODES:
            off, on = self._words(name, _OFF_WORDS), self._words(name, _ON_WORDS)
            if off and on and self.differs(name, (on[0], off[0])):
                return {name: {True: on[0], False: off[0]}}
        return {}

    def effort_words(self, on: Options) -> dict[str, dict[str, int]]:
        """The option for the effort, and the words that it takes, by rank; `on` are the options
        with which it is heeded.
        """
        for name in _EFFORTS:
            if not self.names(name):
                continue
            words = self._words(name, _RANK, on)
            if len(words) < 2 and all(
                word in self._rendered({**on, name: word}) for word in _USUAL
            ):
                words = list(dict.fromkeys([*_USUAL, *words]))
            texts = {self._rendered({**on, name: word}) for word in words}
            if words and len(texts | {self._rendered(on)}) > 1:
                return {name: {word: _RANK[word] for word in words}}
        return {}

    def _words(self, option: str, among: Iterable[str], others: Options | None = None) -> list[str]:
        """Those words that the template's text holds in quotes and that it takes as the option's
        value.
        """
        quoted = set(re.findall(r"""["']([a-z_]+)["']""", self._source))
        return [
            word
            for word in among
            if word in quoted and self._rendered({**(others or {}), option: word})
        ]

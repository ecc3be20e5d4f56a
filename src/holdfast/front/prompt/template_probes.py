"""Finds out what a chat template does, by rendering short conversations when its model is loaded.

`prove` renders a conversation with calls and reads them back, which proves that the model's calls
are understood. `rewritten_turns` finds out whether the template changes past answers, for example
by leaving out their thoughts. If so, the next turn's prompt differs from the cached tokens, and can
be prefilled before that turn arrives. `find_switch` finds the options that turn thinking on and
off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from holdfast.front.answers.reader import AnswerReader
from holdfast.front.output import ToolCall, tool_calls_of
from holdfast.front.prompt.conversation import Message, answer_message
from holdfast.front.prompt.template import ChatTemplate, common_prefix
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.request import ChatPrompt, Thinking, ThinkingEffort
from holdfast.front.toolcalls.call_format import Call
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import PLAIN, ModelDialect

NextTurn: TypeAlias = Literal["user", "results"]
"""What follows an answer: a user message, or the results of the tools that the answer called."""

NEXT_TURNS: Final[tuple[NextTurn, ...]] = get_args(NextTurn)
_QUESTION: Final[Message] = {"role": "user", "content": "question3841"}
_RESULTS: Final = ("result5927", "result6038")
_FOLLOW_UP: Final = "question7162"
_THOUGHT: Final = "thought5528"
_ANSWER: Final = "answer6639"
_NEXT: Final = "next7740"


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
_TOOLS: Final[tuple[dict[str, Any], ...]] = (
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
                        # required by a template that writes Python types
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
        "function": {
            "name": "list_all",
            "description": "List all.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The result of `prove`. `failure` is empty if names and arguments were read back unchanged."""

    failure: str = ""
    # how closely the template's calls match the family's own format: the share of the text that is
    # the same, 0 to 1
    likeness: float = 0.0


def shows_tools(template: ChatTemplate) -> bool:
    """Whether tools in a request appear in the prompt."""
    return _CALLS[0].name in _rendered(template, (_QUESTION,))


def leaves_out_calls(template: ChatTemplate) -> bool:
    """Whether the prompt shows the results of calls, but not the calls."""
    answer = _answer(template, _rendered(template, _conversation()), after=0, dialect=PLAIN)
    return bool(answer.text) and not any(
        word in answer.text for word in (*_CALLS[0].arguments, _CALLS[1].name)
    )


def follows_results(template: ChatTemplate) -> bool:
    """Whether a user message may directly follow a result."""
    follow_up = {"role": "user", "content": _FOLLOW_UP}
    return _FOLLOW_UP in _rendered(template, (*_conversation(), follow_up))


def takes_text_and_thought(template: ChatTemplate) -> bool:
    """Whether an answer may have a thought, a text and calls."""
    question, answer, *results = _conversation()
    answer = {**answer, "content": "text", "reasoning_content": "thought"}
    return bool(_rendered(template, (question, answer, *results)))


def prove(
    template: ChatTemplate, dialect: ModelDialect, tokenizer: Tokenizer, *, parallel: bool = True
) -> Proof:
    """Render two calls with the template, and parse them from the rendered text.

    An end-of-answer token ends the parsed text, as it would end a real answer.

    parallel: True if both calls are in one answer; False if each has its own answer.
    """
    whole = _rendered(template, _conversation())
    if not whole:
        return Proof(failure="the template refuses a conversation with calls")
    if any(result not in whole for result in _RESULTS):
        return Proof(failure="the template leaves out the results of tools")
    ends = [tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.eos_token_ids]
    likeness = 1.0
    for place, calls in enumerate((_CALLS,) if parallel else (_CALLS[:1], _CALLS[1:])):
        answer = _answer(template, whole, after=place, dialect=dialect)
        failure = _misread(answer, calls, dialect, [end for end in ends if end])
        if failure:
            return Proof(failure=failure)
        likeness = min(likeness, _likeness(answer, calls, dialect))
    return Proof(likeness=likeness)


class _Answer(NamedTuple):
    text: str
    in_thought: bool


def _rendered(template: ChatTemplate, messages: Sequence[Message]) -> str:
    return template.try_render(ChatPrompt(messages=tuple(messages), tools=_TOOLS))


def _conversation() -> tuple[Message, ...]:
    calls = [_call(place) for place in range(len(_CALLS))]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    return (_QUESTION, answer, _result(0), _result(1))


def _call(place: int) -> Message:
    name, arguments = _CALLS[place]
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"type": "function", "id": _call_id(place), "function": function}


def _call_id(place: int) -> str:
    return f"call{place:05}"


def _result(place: int) -> Message:
    return {
        "role": "tool",
        "tool_call_id": _call_id(place),
        "name": _CALLS[place].name,
        "content": _RESULTS[place],
    }


def _answer(template: ChatTemplate, whole: str, *, after: int, dialect: ModelDialect) -> _Answer:
    """The text that the model would generate after the first `after` results.

    It includes what the template writes after that, up to the next result.

    whole: the rendered conversation with all results.
    """
    asked = [_QUESTION]
    for place in range(after):
        asked += [{"role": "assistant", "content": "", "tool_calls": [_call(place)]}]
        asked += [_result(place)]
    before = _rendered(template, asked)
    opening = template.opening(ChatPrompt(messages=tuple(asked), tools=_TOOLS), before)
    history = before[: len(before) - len(opening)]
    start = len(common_prefix(before, whole))
    header = history + _up_to_thought(opening, dialect)
    # the prompt for a new answer may open a thought, which the template omits from a past answer
    if start < len(before) and whole.startswith(header):
        start = len(header)
    end = whole.find(_RESULTS[after], start)
    return _Answer(
        text=whole[start : end if end >= 0 else len(whole)],
        in_thought=opens_thought(whole[len(history) : start], dialect),
    )


def _up_to_thought(opening: str, dialect: ModelDialect) -> str:
    if dialect.reasoning is not None:
        for mark in (dialect.reasoning.start.strip(), dialect.reasoning.end.strip()):
            opening = opening.partition(mark)[0]
    return opening


def opens_thought(tail: str, dialect: ModelDialect) -> bool:
    """Whether a text ends within a thought."""
    if dialect.reasoning is None:
        return False
    start = dialect.reasoning.start.strip()
    end = dialect.reasoning.end.strip()
    return tail.rfind(start) > tail.rfind(end)


def _likeness(answer: _Answer, calls: Sequence[_ProbeCall], dialect: ModelDialect) -> float:
    if dialect.calls is None:
        return 0.0
    written = dialect.calls.write(
        [Call(call.name, call.arguments, _call_id(place)) for place, call in enumerate(calls)]
    ).strip()
    starts = (found.start() for found in re.finditer(re.escape(written[:4]), answer.text))
    alike = (len(common_prefix(written, answer.text[start:])) for start in starts)
    return max(alike, default=0) / len(written)


def _misread(
    answer: _Answer, calls: Sequence[_ProbeCall], dialect: ModelDialect, ends: Sequence[str]
) -> str:
    """The fault of the calls that are parsed from an answer; empty if there is none."""
    text = answer.text
    for mark in ends:
        text = text.partition(mark)[0]
    reader = AnswerReader(dialect, tools=DeclaredTools(_TOOLS), in_reasoning=answer.in_thought)
    read = tool_calls_of([*reader.push(dialect.markers.encode(text)), *reader.flush()])
    names = [call.name for call in read]
    if names != [call.name for call in calls]:
        return f"{len(calls)} calls were written, {len(names)} were read: {', '.join(names)}"
    for call, found in zip(calls, read, strict=True):
        if not _is_same(found.arguments, call.arguments):
            return f"the arguments of {call.name} were read back as {found.arguments[:200]}"
    return ""


def _is_same(text: str, arguments: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads(text) == arguments)
    except ValueError:
        return False


def next_messages(calls: Iterable[ToolCall], content: str) -> tuple[Message, ...]:
    """The messages after an answer: one result per call, or a user message, with this content."""
    results = tuple({"role": "tool", "tool_call_id": call.id, "content": content} for call in calls)
    return results or ({"role": "user", "content": content},)


def rewritten_turns(
    template: ChatTemplate | None, dialect: ModelDialect, *, options: Mapping[str, Any]
) -> frozenset[NextTurn]:
    """The next turns for which the template omits the thought of an answer, or changes the text
    before it.
    """
    if template is None:
        return frozenset()
    return frozenset(
        turn for turn in NEXT_TURNS if _rewrites(template, dialect, turn, dict(options))
    )


def _rewrites(
    template: ChatTemplate, dialect: ModelDialect, turn: NextTurn, options: Options
) -> bool:
    """Whether the prompt of the next turn does not begin with the prompt before, or lacks the
    thought of the answer between them.
    """
    thought = "" if dialect.reasoning is None else _THOUGHT
    calls = [ToolCall(id="call00001", name="list_all", arguments="{}")] if turn == "results" else []
    answer = answer_message(_ANSWER, reasoning=thought, calls=calls)
    prompt = ChatPrompt(
        messages=(_QUESTION,), tools=_TOOLS if calls else (), template_options=options
    )
    asked = template.try_render(prompt)
    messages = (_QUESTION, answer, *next_messages(calls, _NEXT))
    later = template.try_render(
        ChatPrompt(messages=messages, tools=prompt.tools, template_options=options)
    )
    if not asked or _NEXT not in later:
        return False
    return not later.startswith(asked) or thought not in later


Options: TypeAlias = dict[str, Any]
_YES_OR_NO: Final = ("enable_thinking", "thinking", "reasoning")
_MODES: Final = ("thinking_mode", "reasoning_mode")
_OFF_WORDS: Final = ("none", "no_think", "off", "disabled", "chat")
_ON_WORDS: Final = ("enabled", "on", "thinking", "adaptive", "auto")
_EFFORTS: Final = ("reasoning_effort", "thinking_effort")
_BUDGET: Final = "thinking_budget"
_RANK: Final[Mapping[str, int]] = {  # ranks the words of all templates on one scale
    **dict.fromkeys(_OFF_WORDS, 0),
    "minimal": 2,
    "low": 4,
    "medium": 6,
    "high": 8,
    "xhigh": 9,
    "max": 10,
}
_USUAL: Final = ("low", "medium", "high")  # words to use for templates that print any value
_BUDGETS: Final[Mapping[ThinkingEffort, int]] = {
    "off": 0,
    "on": -1,
    "minimal": 512,
    "low": 1024,
    "medium": 4096,
    "high": 16384,
    "max": -1,
}
# names of options that keep the thoughts of earlier turns in the prompt
_KEEPING: Final[Mapping[str, Any]] = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingSwitch:
    """The template options for each thinking effort. If empty, the template has no switch."""

    options: Mapping[ThinkingEffort, Options] = field(default_factory=dict)
    budget_option: str = ""  # name of the option that limits a thought to a number of tokens
    keeping: Options = field(default_factory=dict)  # options that keep thoughts of earlier turns

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the options."""
        return tuple(dict.fromkeys(name for options in self.options.values() for name in options))

    def asked(self, thinking: Thinking) -> Options:
        """The template options for the thinking that a request asks for.

        Empty if the request leaves thinking to the template's default.
        """
        effort = thinking.effort
        if effort is None and thinking.budget_tokens is not None:
            effort = "off" if thinking.budget_tokens == 0 else "on"
        if effort is None:
            return {}
        options = dict(self.options.get(effort, {}))
        if self.budget_option and thinking.budget_tokens is not None and effort != "off":
            options[self.budget_option] = thinking.budget_tokens
        return options


def find_switch(template: ChatTemplate) -> ThinkingSwitch:
    """Find the options that switch thinking, by comparing the texts rendered with their values.

    The model's name is never considered.
    """
    probe = _SwitchProbe(template)
    toggle = probe.yes_or_no() | probe.modes()
    turned_on = {name: values[True] for name, values in toggle.items()}
    words = probe.effort_words(turned_on)
    has_low_effort = probe.differs("low_effort", (True, False), turned_on)
    has_steps = any(0 < rank < _RANK["high"] for known in words.values() for rank in known.values())
    budget = _BUDGET if probe.differs(_BUDGET, (0, 512)) else ""
    options: dict[ThinkingEffort, Options] = {}
    for effort in get_args(ThinkingEffort):
        # without a level between on and off, minimal thinking means no thinking
        is_on = effort != "off" and (has_steps or effort != "minimal")
        asked = {name: values[is_on] for name, values in toggle.items()}
        for name, known in words.items():
            asked |= _nearest(name, known, effort, has_toggle=bool(toggle))
        if has_low_effort and effort in ("minimal", "low"):
            asked["low_effort"] = True
        if budget and not asked:
            asked[budget] = _BUDGETS[effort]
        if asked and probe.rendered(asked):
            options[effort] = asked
    keeping = {name: value for name, value in _KEEPING.items() if probe.names(name)}
    return ThinkingSwitch(options=options, budget_option=budget, keeping=keeping)


def _nearest(
    name: str, known: Mapping[str, int], effort: ThinkingEffort, *, has_toggle: bool
) -> Options:
    """The option that sets the known word whose rank is closest to an effort; empty: no option."""
    if has_toggle and effort in ("off", "on"):
        return {}
    if effort == "on" and 0 not in known.values():
        return {}
    ranks = {word: rank for word, rank in known.items() if rank or effort == "off"}
    if "max" in known and "high" not in known:
        ranks[""] = _RANK["high"]  # the empty word means that the option is left out
    wanted = _RANK[{"off": "none", "on": "high"}.get(effort, effort)]
    word = min(ranks, key=lambda each: (abs(ranks[each] - wanted), -ranks[each]), default="")
    return {name: word} if word else {}


class _SwitchProbe:
    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._source = template.with_tools
        self._quoted = set(re.findall(r"""["']([a-z_]+)["']""", self._source))

    def rendered(self, options: Options) -> str:
        message = {"role": "user", "content": "Hello!"}
        return self._template.try_render(ChatPrompt(messages=(message,), template_options=options))

    def names(self, option: str) -> bool:
        return re.search(rf"\b{option}\b", self._source) is not None

    def differs(self, option: str, values: tuple[Any, Any], others: Options | None = None) -> bool:
        """Whether the template accepts both values and renders them to different texts."""
        if not self.names(option):
            return False
        first, second = (self.rendered({**(others or {}), option: value}) for value in values)
        return bool(first and second) and first != second

    def yes_or_no(self) -> dict[str, dict[bool, Any]]:
        """The first boolean option that has an effect, with its values for on and off.

        Further options are usually aliases of this one. Empty if there is none.
        """
        for name in _YES_OR_NO:
            if self.differs(name, (True, False)):
                return {name: {True: True, False: False}}
        return {}

    def modes(self) -> dict[str, dict[bool, Any]]:
        for name in _MODES:
            off = self._words(name, _OFF_WORDS, {})
            on = self._words(name, _ON_WORDS, {})
            if off and on and self.differs(name, (on[0], off[0])):
                return {name: {True: on[0], False: off[0]}}
        return {}

    def effort_words(self, on: Options) -> dict[str, dict[str, int]]:
        """The option that sets the thinking effort, and the rank of each word that it accepts.

        Empty if the template has no such option.

        on: the options that turn thinking on.
        """
        for name in _EFFORTS:
            if not self.names(name):
                continue
            words = self._words(name, _RANK, on)
            if len(words) < 2 and all(word in self.rendered({**on, name: word}) for word in _USUAL):
                words = list(dict.fromkeys([*_USUAL, *words]))
            texts = {self.rendered({**on, name: word}) for word in words}
            if words and len(texts | {self.rendered(on)}) > 1:
                return {name: {word: _RANK[word] for word in words}}
        return {}

    def _words(self, option: str, among: Iterable[str], others: Options) -> list[str]:
        """The words that the template quotes and accepts as a value of the option."""
        return [
            word
            for word in among
            if word in self._quoted and self.rendered({**others, option: word})
        ]

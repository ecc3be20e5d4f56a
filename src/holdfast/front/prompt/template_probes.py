"""Finds out what a chat template does, by rendering short conversations when its model is loaded.
The texts in these conversations are *probes*: words that a template cannot contain by chance.

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
    answer = _answer_in(
        template, _rendered(template, _conversation()), results_before=0, dialect=PLAIN
    )
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
    conversation_text = _rendered(template, _conversation())
    if not conversation_text:
        return Proof(failure="the template refuses a conversation with calls")
    if any(result not in conversation_text for result in _RESULTS):
        return Proof(failure="the template leaves out the results of tools")
    ends = [tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.eos_token_ids]
    likeness = 1.0
    for turn, calls in enumerate((_CALLS,) if parallel else (_CALLS[:1], _CALLS[1:])):
        answer = _answer_in(template, conversation_text, results_before=turn, dialect=dialect)
        failure = _failure_to_read(answer, calls, dialect, [end for end in ends if end])
        if failure:
            return Proof(failure=failure)
        likeness = min(likeness, _likeness(answer, calls, dialect))
    return Proof(likeness=likeness)


class _Answer(NamedTuple):
    """The text of an answer in a rendered conversation. in_thought: whether it begins within a
    thought.
    """

    text: str
    in_thought: bool


def _rendered(template: ChatTemplate, messages: Sequence[Message]) -> str:
    """Render messages with the tools of the probes; empty if the template refuses them."""
    return template.try_render(ChatPrompt(messages=tuple(messages), tools=_TOOLS))


def _conversation() -> tuple[Message, ...]:
    """A question, one answer with both calls, and their results."""
    calls = [_call_message(place) for place in range(len(_CALLS))]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    return (_QUESTION, answer, _result_message(0), _result_message(1))


def _call_message(index: int) -> Message:
    """The call with this index, in OpenAI's format."""
    name, arguments = _CALLS[index]
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"type": "function", "id": _call_id(index), "function": function}


def _call_id(index: int) -> str:
    return f"call{index:05}"


def _result_message(index: int) -> Message:
    """The message with the result of the call with this index."""
    return {
        "role": "tool",
        "tool_call_id": _call_id(index),
        "name": _CALLS[index].name,
        "content": _RESULTS[index],
    }


def _answer_in(
    template: ChatTemplate, conversation_text: str, *, results_before: int, dialect: ModelDialect
) -> _Answer:
    """The text that the model would generate after the first `results_before` results.

    It includes what the template writes after that, up to the next result.

    conversation_text: the rendered conversation with all results.
    """
    messages_before = [_QUESTION]
    for index in range(results_before):
        messages_before += [
            {"role": "assistant", "content": "", "tool_calls": [_call_message(index)]}
        ]
        messages_before += [_result_message(index)]
    prompt_text = _rendered(template, messages_before)
    opening = template.opening(
        ChatPrompt(messages=tuple(messages_before), tools=_TOOLS), prompt_text
    )
    history = prompt_text[: len(prompt_text) - len(opening)]
    start = len(common_prefix(prompt_text, conversation_text))
    header = history + _up_to_thought(opening, dialect)
    # the prompt for a new answer may open a thought, which the template omits from a past answer
    if start < len(prompt_text) and conversation_text.startswith(header):
        start = len(header)
    end = conversation_text.find(_RESULTS[results_before], start)
    return _Answer(
        text=conversation_text[start : end if end >= 0 else len(conversation_text)],
        in_thought=opens_thought(conversation_text[len(history) : start], dialect),
    )


def _up_to_thought(opening: str, dialect: ModelDialect) -> str:
    """The part of a generation prompt before the first marker of a thought."""
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
    """How closely the answer's calls match the family's own format: the share of its text, 0 to 1,
    that is the same from the beginning of a call on.
    """
    if dialect.calls is None:
        return 0.0
    expected_text = dialect.calls.write(
        [Call(call.name, call.arguments, _call_id(index)) for index, call in enumerate(calls)]
    ).strip()
    call_starts = (
        found.start() for found in re.finditer(re.escape(expected_text[:4]), answer.text)
    )
    common_lengths = (
        len(common_prefix(expected_text, answer.text[start:])) for start in call_starts
    )
    return max(common_lengths, default=0) / len(expected_text)


def _failure_to_read(
    answer: _Answer, calls: Sequence[_ProbeCall], dialect: ModelDialect, end_texts: Sequence[str]
) -> str:
    """The fault of the calls that are parsed from an answer; empty if there is none."""
    text = answer.text
    for end_text in end_texts:
        text = text.partition(end_text)[0]
    reader = AnswerReader(dialect, tools=DeclaredTools(_TOOLS), in_reasoning=answer.in_thought)
    read_calls = tool_calls_of([*reader.push(dialect.markers.encode(text)), *reader.flush()])
    read_names = [call.name for call in read_calls]
    if read_names != [call.name for call in calls]:
        return (
            f"{len(calls)} calls were written, {len(read_names)} were read: {', '.join(read_names)}"
        )
    for call, read_call in zip(calls, read_calls, strict=True):
        if not _equals_json(read_call.arguments, call.arguments):
            return f"the arguments of {call.name} were read back as {read_call.arguments[:200]}"
    return ""


def _equals_json(text: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a JSON text has the same value as these arguments."""
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
    prompt_text = template.try_render(prompt)
    messages = (_QUESTION, answer, *next_messages(calls, _NEXT))
    next_prompt_text = template.try_render(
        ChatPrompt(messages=messages, tools=prompt.tools, template_options=options)
    )
    if not prompt_text or _NEXT not in next_prompt_text:
        return False
    return not next_prompt_text.startswith(prompt_text) or thought not in next_prompt_text


Options: TypeAlias = dict[str, Any]
_BOOLEAN_OPTIONS: Final = ("enable_thinking", "thinking", "reasoning")
_MODE_OPTIONS: Final = ("thinking_mode", "reasoning_mode")
_OFF_WORDS: Final = ("none", "no_think", "off", "disabled", "chat")
_ON_WORDS: Final = ("enabled", "on", "thinking", "adaptive", "auto")
_EFFORT_OPTIONS: Final = ("reasoning_effort", "thinking_effort")
_BUDGET_OPTION: Final = "thinking_budget"
_RANKS: Final[Mapping[str, int]] = {  # ranks the words of all templates on one scale
    **dict.fromkeys(_OFF_WORDS, 0),
    "minimal": 2,
    "low": 4,
    "medium": 6,
    "high": 8,
    "xhigh": 9,
    "max": 10,
}
# words to use for templates that print any value
_COMMON_EFFORT_WORDS: Final = ("low", "medium", "high")
_BUDGET_TOKENS: Final[Mapping[ThinkingEffort, int]] = {
    "off": 0,
    "on": -1,
    "minimal": 512,
    "low": 1024,
    "medium": 4096,
    "high": 16384,
    "max": -1,
}
# names of options that keep the thoughts of earlier turns in the prompt
_KEEP_THOUGHTS_OPTIONS: Final[Mapping[str, Any]] = {
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

    def options_for(self, thinking: Thinking) -> Options:
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
    # for each option: its values that turn thinking on (True) and off (False)
    on_off_values = probe.yes_or_no() | probe.modes()
    on_options = {name: values[True] for name, values in on_off_values.items()}
    effort_ranks = probe.effort_words(on_options)
    has_low_effort = probe.differs("low_effort", (True, False), on_options)
    has_levels = any(
        0 < rank < _RANKS["high"] for ranks in effort_ranks.values() for rank in ranks.values()
    )
    budget_option = _BUDGET_OPTION if probe.differs(_BUDGET_OPTION, (0, 512)) else ""
    options: dict[ThinkingEffort, Options] = {}
    for effort in get_args(ThinkingEffort):
        # without a level between on and off, minimal thinking means no thinking
        is_on = effort != "off" and (has_levels or effort != "minimal")
        effort_options = {name: values[is_on] for name, values in on_off_values.items()}
        for name, ranks in effort_ranks.items():
            effort_options |= _nearest_option(name, ranks, effort, has_toggle=bool(on_off_values))
        if has_low_effort and effort in ("minimal", "low"):
            effort_options["low_effort"] = True
        if budget_option and not effort_options:
            effort_options[budget_option] = _BUDGET_TOKENS[effort]
        if effort_options and probe.rendered(effort_options):
            options[effort] = effort_options
    keep_options = {
        name: value for name, value in _KEEP_THOUGHTS_OPTIONS.items() if probe.contains_name(name)
    }
    return ThinkingSwitch(options=options, budget_option=budget_option, keeping=keep_options)


def _nearest_option(
    name: str, ranks: Mapping[str, int], effort: ThinkingEffort, *, has_toggle: bool
) -> Options:
    """The option that sets the word whose rank is closest to that of an effort; empty: no option.

    ranks: the rank of each word that the option accepts. has_toggle: whether another option turns
        thinking on and off.
    """
    if has_toggle and effort in ("off", "on"):
        return {}
    if effort == "on" and 0 not in ranks.values():
        return {}
    allowed_ranks = {word: rank for word, rank in ranks.items() if rank or effort == "off"}
    if "max" in ranks and "high" not in ranks:
        # the empty word means that the option is left out
        allowed_ranks[""] = _RANKS["high"]
    wanted = _RANKS[{"off": "none", "on": "high"}.get(effort, effort)]
    word = min(
        allowed_ranks,
        key=lambda each: (abs(allowed_ranks[each] - wanted), -allowed_ranks[each]),
        default="",
    )
    return {name: word} if word else {}


class _SwitchProbe:
    """Finds the options of one template that switch thinking, by rendering a message with their
    values.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._source = template.with_tools
        self._quoted = set(re.findall(r"""["']([a-z_]+)["']""", self._source))

    def rendered(self, options: Options) -> str:
        """The rendered text of a short conversation with these options; empty if it is refused."""
        message = {"role": "user", "content": "Hello!"}
        return self._template.try_render(ChatPrompt(messages=(message,), template_options=options))

    def contains_name(self, option: str) -> bool:
        """Whether the template's source mentions the option."""
        return re.search(rf"\b{option}\b", self._source) is not None

    def differs(self, option: str, values: tuple[Any, Any], others: Options | None = None) -> bool:
        """Whether the template accepts both values and renders them to different texts."""
        if not self.contains_name(option):
            return False
        first_text, second_text = (
            self.rendered({**(others or {}), option: value}) for value in values
        )
        return bool(first_text and second_text) and first_text != second_text

    def yes_or_no(self) -> dict[str, dict[bool, Any]]:
        """The first boolean option that has an effect, with its values for on and off.

        Further options are usually aliases of this one. Empty if there is none.
        """
        for name in _BOOLEAN_OPTIONS:
            if self.differs(name, (True, False)):
                return {name: {True: True, False: False}}
        return {}

    def modes(self) -> dict[str, dict[bool, Any]]:
        """The first option whose words turn thinking on and off, with these words; empty if there
        is none.
        """
        for name in _MODE_OPTIONS:
            off_words = self._words(name, _OFF_WORDS, {})
            on_words = self._words(name, _ON_WORDS, {})
            if off_words and on_words and self.differs(name, (on_words[0], off_words[0])):
                return {name: {True: on_words[0], False: off_words[0]}}
        return {}

    def effort_words(self, on_options: Options) -> dict[str, dict[str, int]]:
        """The option that sets the thinking effort, and the rank of each word that it accepts.

        Empty if the template has no such option.

        on_options: the options that turn thinking on.
        """
        for name in _EFFORT_OPTIONS:
            if not self.contains_name(name):
                continue
            words = self._words(name, _RANKS, on_options)
            if len(words) < 2 and all(
                word in self.rendered({**on_options, name: word}) for word in _COMMON_EFFORT_WORDS
            ):
                words = list(dict.fromkeys([*_COMMON_EFFORT_WORDS, *words]))
            texts = {self.rendered({**on_options, name: word}) for word in words}
            if words and len(texts | {self.rendered(on_options)}) > 1:
                return {name: {word: _RANKS[word] for word in words}}
        return {}

    def _words(self, option: str, among: Iterable[str], others: Options) -> list[str]:
        """The words that the template quotes and accepts as a value of the option."""
        return [
            word
            for word in among
            if word in self._quoted and self.rendered({**others, option: word})
        ]

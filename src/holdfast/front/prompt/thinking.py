"""The switches by which chat templates are told whether and how much to think: found by rendering,
never by a model's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, get_args

from holdfast.wire.requests import Thinking, ThinkingEffort

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

"""Requests of every protocol with injected faults: each starts as a shape that a client sends
(`request_shapes.py`).
"""

from __future__ import annotations

import copy
from typing import Any

from tests.fakes.fuzzed_bodies import BodyFuzzer
from tests.fakes.fuzzed_json import JsonFuzzer
from tests.fakes.request_shapes import Shapes

_SCHEMAS = ("schema", "parameters", "input_schema", "format", "json")
_TOKENS = 2


class ShapeFuzzer(JsonFuzzer):
    """Draws paths and bodies, the same ones for the same seed."""

    def __init__(self, seed: int, shapes: Shapes, *, model: str, bound: tuple[str, ...]) -> None:
        """bound: the path of names to the number of tokens to generate, which is kept small; none
        if there is none.
        """
        super().__init__(seed)
        self._model, self._bound = model, bound
        self._shapes = [(path, shape) for path, shapes_of in shapes.items() for shape in shapes_of]
        # the values under a name in any of the shapes
        self._known: dict[str, list[Any]] = {}
        self._tops = {
            path: sorted({name for shape in shapes_of for name in shape})
            for path, shapes_of in shapes.items()
        }
        for _, shape in self._shapes:
            self._learn(shape)

    def _learn(self, value: Any) -> None:
        for name, each in (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        ):
            if isinstance(name, str):
                self._known.setdefault(name, []).append(each)
            self._learn(each)

    def request(self) -> tuple[str, bytes]:
        """A path and a body for it.

        Most bodies are JSON objects; every third object resembles one that a client sends.
        """
        dice = self.dice
        path, shape = dice.choice(self._shapes)
        sent = {"model": self._model, **shape}
        body: Any = copy.deepcopy(sent)
        while dice.random() < 0.3:
            name = dice.choice(self._tops[path])
            body[name] = copy.deepcopy(dice.choice(self._known[name]))
        for _ in range(dice.choice((0, 0, 1, 1, 1, 2, 3))):
            body = self._changed(body) if dice.random() < 0.7 else self.mutated(body)
        if body != sent or "thinking" not in sent:
            self._keep_short(body, self._bound)
        return path, self.written(body)

    def _changed(self, value: Any) -> Any:
        """Replace a part by a value of the same name elsewhere, a schema, another object's member,
        or duplicate it.
        """
        dice = self.dice
        if isinstance(value, list) and value:
            at = dice.randrange(len(value))
            if dice.random() < 0.15:
                return [*value, value[at]]
            return [*value[:at], self._changed(value[at]), *value[at + 1 :]]
        if not isinstance(value, dict) or not value:
            return self.anything(1)
        name = dice.choice([*value])
        if name in _SCHEMAS and dice.random() < 0.5:
            return {**value, name: self.schema()}
        if dice.random() < 0.55:
            return {**value, name: self._changed(value[name])}
        if dice.random() < 0.4:
            name = dice.choice([*self._known])
        return {**value, name: copy.deepcopy(dice.choice(self._known.get(name, [None])))}

    def _keep_short(self, body: Any, bound: tuple[str, ...]) -> None:
        # A body that takes minutes to answer reveals nothing more, so values that are not numbers
        # are kept. A thinking budget in Messages must be larger: it stays if it is the only
        # change, since a short answer uses little of the budget.
        if not bound or not isinstance(body, dict):
            return
        name, *rest = bound
        if rest:
            if body.get(name) is None:
                body[name] = {}
            self._keep_short(body[name], tuple(rest))
        elif body.get(name) is None or (
            isinstance(body[name], int) and not 0 <= body[name] <= _TOKENS
        ):
            body[name] = self.dice.randint(1, _TOKENS)


class ChatFuzzer(BodyFuzzer):
    """The original fuzzed chats, with their path."""

    def request(self) -> tuple[str, bytes]:
        """A path and a body for it."""
        return "/v1/chat/completions", self.body()

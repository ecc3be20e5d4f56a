"""Faulty chat request bodies: each drawn from a seed, many of them nearly right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fakes.fuzzed_json import NUMBERS, STRINGS, JsonFuzzer

_NAMES = [
    "get_weather",
    "f",
    "",
    "two words",
    "x" * 300,
    "<tool_call>",
    "mcp__a__b",
    "ünï",
    "a.b",
    "\ud83d",
    "\x00",
    "{}",
]


class BodyFuzzer(JsonFuzzer):
    """Draws bodies of chats, the same ones for the same seed."""

    def __init__(self, seed: int, *, model: str) -> None:
        super().__init__(seed)
        self._model = model

    def body(self) -> bytes:
        """One body. Most are JSON objects."""
        fields = self._fields()
        for _ in range(self.dice.choice((0, 0, 0, 0, 1, 2))):
            fields = self.mutated(fields)
        return self.written(fields)

    def _fields(self) -> dict[str, Any]:
        dice = self.dice
        fields: dict[str, Any] = {
            "model": self._model,
            "max_tokens": dice.randint(1, 3),
            "messages": self._messages(),
        }
        often = dice.choice((0.02, 0.04, 0.15))
        for name, draw in self._optional().items():
            if dice.random() < often:
                fields[name] = draw()
        return fields

    def _optional(self) -> dict[str, Callable[[], Any]]:
        pick = self.dice.choice
        return {
            "tools": lambda: [self._tool() for _ in range(pick((0, 1, 1, 2, 3)))],
            "functions": lambda: [self._tool()["function"] for _ in range(pick((0, 1, 2)))],
            "tool_choice": self._tool_choice,
            "function_call": lambda: pick(("auto", "none", {"name": pick(_NAMES)}, "required", 5)),
            "parallel_tool_calls": lambda: pick((True, False, 1, "no", None)),
            "response_format": self._response_format,
            "structured_outputs": lambda: {
                pick(("json", "regex", "choice", "grammar", "json_object", "other")): self._form()
            },
            "guided_json": self.schema,
            "guided_regex": lambda: pick(
                ("a+", "(", "[a-z]{1,5}", "(a|b)*c", "a{1000}", "(?<=x)y", "", "^x$", "\\p{L}+")
            ),
            "guided_choice": lambda: pick(
                (["yes", "no"], [], [""], ["x"] * 3, [1], "yes", ["☃", '"'])
            ),
            "guided_grammar": lambda: pick(
                ('start: "x"', "start: /[0-9]+/", "nonsense", "start: start", "start: y", "")
            ),
            "reasoning_effort": lambda: pick(("none", "low", "max", "huge", True, 5)),
            "enable_thinking": lambda: pick((True, False, "yes", 0)),
            "thinking": lambda: pick(
                (
                    True,
                    "low",
                    {"type": "enabled", "budget_tokens": pick(NUMBERS)},
                    {"type": "x"},
                    [],
                )
            ),
            "think": lambda: pick((False, "high", {}, 5)),
            "reasoning": lambda: pick(
                ({"effort": "low"}, {"max_tokens": pick(NUMBERS)}, "low", {"enabled": 5})
            ),
            "thinking_budget": lambda: pick(NUMBERS),
            "chat_template_kwargs": lambda: {
                pick(("enable_thinking", "x", "messages", "tools", "")): self.anything(2)
            },
            "stream": lambda: pick((True, False, False, "true")),
            "stream_options": lambda: pick(({"include_usage": True}, {}, {"include_usage": 5}, [])),
            "n": lambda: pick((1, 2, 3, 0, 17, "2")),
            "logprobs": lambda: pick((True, False, 2)),
            "top_logprobs": lambda: pick((0, 2, 20, 21, -1)),
            "stop": lambda: pick(("x", ["x", "y"], [], [""], ["a"] * 20, 5, "\ud83d")),
            "temperature": lambda: pick((0, 1, 2, 2.1, -1, "1", 1e-320)),
            "seed": lambda: pick(NUMBERS),
            "logit_bias": lambda: {pick(("5", "x", "-1", "99999999")): pick((1, -100, 101, "x"))},
            "continue_final_message": lambda: pick((True, False)),
            "add_generation_prompt": lambda: pick((True, False)),
            "echo": lambda: pick((True, False)),
            "holdfast": lambda: pick(({"explain": True}, {"explain": 5}, {"x": 1}, [])),
            "session_id": lambda: pick(("s", "", "a/b", "x" * 300, 5)),
            "max_completion_tokens": lambda: pick((1, 2, 0, "3")),
            "metadata": lambda: self.anything(3),
        }

    def _messages(self) -> list[Any]:
        dice = self.dice
        turns: list[dict[str, Any]] = [{"role": "user", "content": dice.choice(STRINGS) or "x"}]
        for place in range(dice.choice((0, 0, 0, 0, 1, 3))):
            draw = dice.choice((self._call_turn, self._result, self._said, self._thought))
            turns.append(draw(place))
        return turns

    def _call_turn(self, place: int) -> dict[str, Any]:
        dice = self.dice
        arguments = dice.choice(
            (
                '{"city": "Oslo"}',
                "{",
                "",
                "5",
                "[]",
                {"city": "Oslo"},
                {},
                None,
                '{"a":1}{"b":2}',
                "null",
                5,
            )
        )
        call = {
            "id": dice.choice((f"call_{place}", "", None, 5)),
            "type": dice.choice(("function", "function", None, "custom")),
        }
        function = {"name": dice.choice(_NAMES), "arguments": arguments}
        if dice.random() < 0.2:
            return {"role": "assistant", "content": None, "function_call": function}
        return {
            "role": "assistant",
            "content": dice.choice((None, "", "x")),
            "tool_calls": [{**call, "function": function}],
        }

    def _result(self, place: int) -> dict[str, Any]:
        content = self.dice.choice(
            ("sunny", "", [{"type": "text", "text": "x"}], [{"type": "image_url"}], None, 5, [], {})
        )
        role = self.dice.choice(("tool", "tool", "function"))
        return {
            "role": role,
            "content": content,
            "tool_call_id": f"call_{place - 1}",
            "name": self.dice.choice(_NAMES),
        }

    def _said(self, place: int) -> dict[str, Any]:
        role = self.dice.choice(("user", "assistant", "system", "developer", "robot", 5))
        return {"role": role, "content": self.dice.choice(STRINGS)}

    def _thought(self, place: int) -> dict[str, Any]:
        name = self.dice.choice(("reasoning_content", "reasoning", "thinking"))
        part = {
            "type": "thinking",
            "thinking": self.dice.choice(("hm", [{"type": "text", "text": "hm"}], 5, [[]], None)),
        }
        content = self.dice.choice(("x", [part], [part, {"type": "text", "text": "x"}]))
        return {
            "role": "assistant",
            "content": content,
            name: self.dice.choice(("hm", "", None, 5, [])),
        }

    def _tool(self) -> dict[str, Any]:
        dice = self.dice
        function: dict[str, Any] = {
            "name": dice.choice(_NAMES[:2] * 6 + _NAMES),
            "parameters": self.schema(),
        }
        if dice.random() < 0.4:
            function["strict"] = dice.choice((True, True, False, None, "yes"))
        return {
            "type": dice.choice(("function",) * 8 + ("custom", "", "web_search")),
            "function": function,
        }

    def _tool_choice(self) -> Any:
        names = [
            {"type": "function", "function": {"name": self.dice.choice(_NAMES[:2])}}
            for _ in range(2)
        ]
        allowed = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": self.dice.choice(("auto", "required", "x")), "tools": names},
        }
        return self.dice.choice(
            ("auto", "none", "required", "any", "x", names[0], allowed, {"type": "function"}, {}, 5)
        )

    def _response_format(self) -> Any:
        kind = self.dice.choice(
            ("text", "json_object", "json_schema", "json_schema", "json_schema", "regex", 5)
        )
        named = {
            "name": "x",
            "schema": self.schema(),
            "strict": self.dice.choice((True, False, None)),
        }
        return {"type": kind, "json_schema": named} if kind == "json_schema" else {"type": kind}

    def _form(self) -> Any:
        return self.dice.choice((self.schema(), "a+", ["a", "b"], True, 'start: "x"', 5, None))

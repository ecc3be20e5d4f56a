"""Bodies of chat requests as no honest client sends them: each drawn from a seed, many of them nearly right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

_SCHEMA_WORDS = (
    "type properties required items anyOf oneOf allOf not enum const pattern format minimum maximum minLength maxLength minItems "
    "maxItems additionalProperties $ref $defs definitions default title description if then else patternProperties propertyNames "
    "uniqueItems multipleOf prefixItems dependentRequired contains exclusiveMinimum"
).split()
_NAMES = ["get_weather", "f", "", "two words", "x" * 300, "<tool_call>", "mcp__a__b", "ünï", "a.b", "\ud83d", "\x00", "{}"]
_STRINGS = ["", "x", "Hello", "<think>", "</tool_call>", "\ud83d", "\x00\x1b[31m", "☃" * 40, "null", "{", "a" * 300, "${x}"]
_NUMBERS = [0, -1, 1, 2, 7, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308, -1e308]


class BodyFuzzer:
    """Draws bodies, the same ones for the same seed."""

    def __init__(self, seed: int, *, model: str) -> None:
        self._dice, self._model = random.Random(seed), model

    def body(self) -> bytes:
        """One body. Most are JSON objects."""
        dice = self._dice
        fields = self._fields()
        for _ in range(dice.choice((0, 0, 0, 0, 1, 2))):
            fields = self._mutated(fields)
        raw = json.dumps(fields, ensure_ascii=dice.random() < 0.8).encode("utf-8", "surrogatepass")
        if dice.random() < 0.03:
            at = dice.randrange(len(raw) + 1)
            raw = raw[:at] + dice.choice((b"", b"\xff", b"NaN", b"}", b"[" * 500, b'"\\ud83d"')) + raw[at + dice.randrange(3) :]
        return raw

    def _fields(self) -> dict[str, Any]:
        dice = self._dice
        fields: dict[str, Any] = {"model": self._model, "max_tokens": dice.randint(1, 3), "messages": self._messages()}
        often = dice.choice((0.02, 0.04, 0.15))
        for name, draw in self._optional().items():
            if dice.random() < often:
                fields[name] = draw()
        return fields

    def _optional(self) -> dict[str, Callable[[], Any]]:
        pick = self._dice.choice
        return {
            "tools": lambda: [self._tool() for _ in range(pick((0, 1, 1, 2, 3)))],
            "functions": lambda: [self._tool()["function"] for _ in range(pick((0, 1, 2)))],
            "tool_choice": self._tool_choice,
            "function_call": lambda: pick(("auto", "none", {"name": pick(_NAMES)}, "required", 5)),
            "parallel_tool_calls": lambda: pick((True, False, 1, "no", None)),
            "response_format": self._response_format,
            "structured_outputs": lambda: {pick(("json", "regex", "choice", "grammar", "json_object", "other")): self._form()},
            "guided_json": self._schema,
            "guided_regex": lambda: pick(("a+", "(", "[a-z]{1,5}", "(a|b)*c", "a{1000}", "(?<=x)y", "", "^x$", "\\p{L}+")),
            "guided_choice": lambda: pick((["yes", "no"], [], [""], ["x"] * 3, [1], "yes", ["☃", '"'])),
            "guided_grammar": lambda: pick(('start: "x"', "start: /[0-9]+/", "nonsense", "start: start", "start: y", "")),
            "reasoning_effort": lambda: pick(("none", "low", "max", "huge", True, 5)),
            "enable_thinking": lambda: pick((True, False, "yes", 0)),
            "thinking": lambda: pick((True, "low", {"type": "enabled", "budget_tokens": pick(_NUMBERS)}, {"type": "x"}, [])),
            "think": lambda: pick((False, "high", {}, 5)),
            "reasoning": lambda: pick(({"effort": "low"}, {"max_tokens": pick(_NUMBERS)}, "low", {"enabled": 5})),
            "thinking_budget": lambda: pick(_NUMBERS),
            "chat_template_kwargs": lambda: {pick(("enable_thinking", "x", "messages", "tools", "")): self._anything(2)},
            "stream": lambda: pick((True, False, False, "true")),
            "stream_options": lambda: pick(({"include_usage": True}, {}, {"include_usage": 5}, [])),
            "n": lambda: pick((1, 2, 3, 0, 17, "2")),
            "logprobs": lambda: pick((True, False, 2)),
            "top_logprobs": lambda: pick((0, 2, 20, 21, -1)),
            "stop": lambda: pick(("x", ["x", "y"], [], [""], ["a"] * 20, 5, "\ud83d")),
            "temperature": lambda: pick((0, 1, 2, 2.1, -1, "1", 1e-320)),
            "seed": lambda: pick(_NUMBERS),
            "logit_bias": lambda: {pick(("5", "x", "-1", "99999999")): pick((1, -100, 101, "x"))},
            "continue_final_message": lambda: pick((True, False)),
            "add_generation_prompt": lambda: pick((True, False)),
            "echo": lambda: pick((True, False)),
            "holdfast": lambda: pick(({"explain": True}, {"explain": 5}, {"x": 1}, [])),
            "session_id": lambda: pick(("s", "", "a/b", "x" * 300, 5)),
            "max_completion_tokens": lambda: pick((1, 2, 0, "3")),
            "metadata": lambda: self._anything(3),
        }

    def _messages(self) -> list[Any]:
        dice = self._dice
        turns: list[dict[str, Any]] = [{"role": "user", "content": dice.choice(_STRINGS) or "x"}]
        for place in range(dice.choice((0, 0, 0, 0, 1, 3))):
            draw = dice.choice((self._call_turn, self._result, self._said, self._thought))
            turns.append(draw(place))
        return turns

    def _call_turn(self, place: int) -> dict[str, Any]:
        dice = self._dice
        arguments = dice.choice(('{"city": "Oslo"}', "{", "", "5", "[]", {"city": "Oslo"}, {}, None, '{"a":1}{"b":2}', "null", 5))
        call = {"id": dice.choice((f"call_{place}", "", None, 5)), "type": dice.choice(("function", "function", None, "custom"))}
        function = {"name": dice.choice(_NAMES), "arguments": arguments}
        if dice.random() < 0.2:
            return {"role": "assistant", "content": None, "function_call": function}
        return {"role": "assistant", "content": dice.choice((None, "", "x")), "tool_calls": [{**call, "function": function}]}

    def _result(self, place: int) -> dict[str, Any]:
        content = self._dice.choice(("sunny", "", [{"type": "text", "text": "x"}], [{"type": "image_url"}], None, 5, [], {}))
        role = self._dice.choice(("tool", "tool", "function"))
        return {"role": role, "content": content, "tool_call_id": f"call_{place - 1}", "name": self._dice.choice(_NAMES)}

    def _said(self, place: int) -> dict[str, Any]:
        role = self._dice.choice(("user", "assistant", "system", "developer", "robot", 5))
        return {"role": role, "content": self._dice.choice(_STRINGS)}

    def _thought(self, place: int) -> dict[str, Any]:
        name = self._dice.choice(("reasoning_content", "reasoning", "thinking"))
        part = {"type": "thinking", "thinking": self._dice.choice(("hm", [{"type": "text", "text": "hm"}], 5, [[]], None))}
        content = self._dice.choice(("x", [part], [part, {"type": "text", "text": "x"}]))
        return {"role": "assistant", "content": content, name: self._dice.choice(("hm", "", None, 5, []))}

    def _tool(self) -> dict[str, Any]:
        dice = self._dice
        function: dict[str, Any] = {"name": dice.choice(_NAMES[:2] * 6 + _NAMES), "parameters": self._schema()}
        if dice.random() < 0.4:
            function["strict"] = dice.choice((True, True, False, None, "yes"))
        return {"type": dice.choice(("function",) * 8 + ("custom", "", "web_search")), "function": function}

    def _tool_choice(self) -> Any:
        names = [{"type": "function", "function": {"name": self._dice.choice(_NAMES[:2])}} for _ in range(2)]
        allowed = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": self._dice.choice(("auto", "required", "x")), "tools": names},
        }
        return self._dice.choice(("auto", "none", "required", "any", "x", names[0], allowed, {"type": "function"}, {}, 5))

    def _response_format(self) -> Any:
        kind = self._dice.choice(("text", "json_object", "json_schema", "json_schema", "json_schema", "regex", 5))
        named = {"name": "x", "schema": self._schema(), "strict": self._dice.choice((True, False, None))}
        return {"type": kind, "json_schema": named} if kind == "json_schema" else {"type": kind}

    def _form(self) -> Any:
        return self._dice.choice((self._schema(), "a+", ["a", "b"], True, 'start: "x"', 5, None))

    def _schema(self, levels: int = 3) -> Any:
        """A JSON schema, or what looks like one."""
        dice = self._dice
        if dice.random() < 0.05:
            return self._anything(2)
        plain = [{"type": kind} for kind in ("string", "integer", "number", "boolean", "null")]
        odd: list[dict[str, Any]] = [
            {"enum": ["a", 1, None]},
            {"const": {"x": 1}},
            {"type": "string", "pattern": dice.choice(("^[a-z]+$", "(", "(?=x)y", "a{3}"))},
            {"type": "string", "format": dice.choice(("date-time", "uuid", "email", "martian"))},
            {"type": ["string", "null"]},
            {"type": "integer", "minimum": dice.choice(_NUMBERS), "maximum": dice.choice(_NUMBERS)},
            {"$ref": dice.choice(("#", "#/$defs/a", "#/nowhere", "http://example.org/x", "file:///etc/passwd"))},
            {dice.choice(_SCHEMA_WORDS): self._anything(1)},
            {"type": "martian"},
            {},
        ]
        if levels == 0 or dice.random() < 0.3:
            return dice.choice(plain * 3 + odd)
        inner = [self._schema(levels - 1) for _ in range(dice.randint(1, 3))]
        properties = {dice.choice(("city", "x", "y", "ü", "")): each for each in inner}
        return dice.choice(
            (
                {"type": "object", "properties": properties, "required": dice.sample([*properties], 1)},
                {"type": "object", "properties": properties, "additionalProperties": False},
                {"type": "array", "items": inner[0], "minItems": dice.choice((0, 1, 3, 10**9))},
                {dice.choice(("anyOf", "oneOf", "allOf")): inner},
                {"$defs": {"a": inner[0]}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}},
            )
        )

    def _anything(self, levels: int) -> Any:
        dice = self._dice
        leaf = dice.choice((*_STRINGS, *_NUMBERS, True, False, None))
        if levels == 0:
            return leaf
        return dice.choice(
            (leaf, [self._anything(levels - 1)] * dice.randint(0, 3), {dice.choice(_STRINGS): self._anything(levels - 1)})
        )

    def _mutated(self, value: Any) -> Any:
        """The value with something in it replaced, left out, wrapped or nested deeply."""
        dice = self._dice
        if isinstance(value, dict) and value and dice.random() < 0.85:
            key = dice.choice([*value])
            if dice.random() < 0.1:
                return {name: each for name, each in value.items() if name != key}
            return {**value, key: self._mutated(value[key])}
        if isinstance(value, list) and value and dice.random() < 0.85:
            at = dice.randrange(len(value))
            return [*value[:at], self._mutated(value[at]), *value[at + 1 :]]
        wrapped: Any = value
        for _ in range(dice.choice((1, 1, 1, 70, 250))):
            wrapped = [wrapped] if dice.random() < 0.5 else {"items": wrapped}
        return dice.choice((self._anything(1), self._anything(1), None, wrapped))

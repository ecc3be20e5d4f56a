"""Conversations that go on are rendered as they are when they are rendered whole, by templates that
are proved to allow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Template

from holdfast.errors import InvalidRequest
from holdfast.front.prompt.incremental_template import RenderedMessages, growing
from holdfast.front.prompt.jinja_environment import jinja_environment
from holdfast.front.prompt.template import ChatTemplate, load_template
from holdfast.models.demo import demo_folder
from holdfast.wire.requests import ChatPrompt
from tests.fakes.family_templates import FAMILY_TEMPLATES
from tests.fakes.toy_tokenizers import CHATML

NEIGHBOURS = """{%- if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>' }}{% endif %}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are an agent.{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
    {{- '\n' + message.content }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>{% endif %}
{%- else %}
    {%- set said = message.content %}{{ loop.index }}
    {%- if not loop.last %}{{ messages[loop.index].role }}{% endif %}
    {{- message.role }} of {{ messages[loop.index0 - 3].role }}: {{ said }}
    {%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{{ loop.last }}{% endfor %}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ messages | length }} {{ messages[-1].role }}<|im_start|>assistant{% endif %}"""
LOOP = "{%% for m in messages %%}%s{{ m.content }}{%% endfor %%}"
LOCAL = {
    "chatml": CHATML,
    "neighbours": NEIGHBOURS,
    "if there are any": "{% if messages and not tools %}{% endif %}" + LOOP % "",
}
NOT_LOCAL = {
    "the last question": "{% set last = messages[-1] %}" + LOOP % "{{ last.content }}",
    "how many": LOOP % "{{ messages | length }}",
    "how many are left": LOOP % "{{ loop.revindex }}",
    "two further on": LOOP % "{{ messages[loop.index0 + 2].role }}",
    "one that is counted by another loop": LOOP
    % "{% for c in m.content %}{{ messages[loop.index0].role }}{% endfor %}",
    "what is carried along": "{% set ns = namespace(n=0) %}"
    + LOOP % "{% set ns.n = ns.n + 1 %}{{ ns.n }}",
    "what has changed": LOOP % "{{ loop.changed(m.role) }}",
    "one of several in turn": "{% set c = cycler('a', 'b') %}" + LOOP % "{{ c.next() }}",
    "the date": LOOP % "{{ strftime_now('%Y') }}",
    "by lot": LOOP % "{{ ['a', 'b'] | random }}",
    "a part of them": "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
    "those of a kind": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
    "an end before the end": LOOP % "{% if m.role == 'tool' %}{% break %}{% endif %}",
    "all of it, stripped": "{% set text %}" + LOOP % "" + "{% endset %}{{ text | trim }}",
    "a macro that looks at the last": "{% macro last() %}{{ messages[-1].content }}{% endmacro %}"
    + LOOP % "{{ last() }}",
    "two loops": LOOP % "" + LOOP % "",
}
TEMPLATES: dict[str, ChatTemplate] = {
    **{
        name: ChatTemplate({"default": source}, special_tokens={}) for name, source in LOCAL.items()
    },
    **{
        name: FAMILY_TEMPLATES[name].template()
        for name in ("qwen3", "mistral_v3", "mistral_v13", "lfm2_drops", "gpt_oss", "deepseek_v3")
    },
}
if (bundled := load_template(demo_folder())) is not None:
    TEMPLATES["bundled"] = bundled

TEXTS = st.sampled_from(["hello", "", " a \n", "<think>", "{{ x }}", "\ue0f5", "é"])
ARGUMENTS = st.sampled_from(
    ['{"a": 1}', '{"a": true}', '{"a": 1.0}', '{"b": 2, "a": 1}', '{"a": 1, "b": 2}', "no json", ""]
)
TURNS = st.one_of(
    st.builds(lambda text: [{"role": "user", "content": text}], TEXTS),
    st.builds(lambda text, thought: [{"role": "assistant", "content": text, "reasoning_content": thought}], TEXTS, TEXTS),
    st.builds(lambda text: [{"role": "system", "content": text}], TEXTS),
    st.builds(
        lambda text, arguments, result: [
            {"role": "assistant", "content": text, "tool_calls": [{"id": "call00001", "function": arguments}]},
            {"role": "tool", "content": result, "tool_call_id": "call00001"},
        ],
        TEXTS, ARGUMENTS.map(lambda text: {"name": "f", "arguments": text}), TEXTS,
    ),
)  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "text",
        "parameters": {"type": "object", "properties": {}},
    },
}


def rendered(template: ChatTemplate, prompt: ChatPrompt, tenant: str | None) -> str:
    try:
        return template.render(prompt, tenant=tenant)
    except InvalidRequest as error:
        return f"refused: {error}"


@settings(max_examples=40)
@given(
    turns=st.lists(TURNS, min_size=5, max_size=12),
    other=st.lists(TURNS, max_size=2),
    tools=st.sampled_from([(), (TOOL,)]),
    options=st.sampled_from([{}, {"enable_thinking": False}, {"enable_thinking": 0}]),
)
def test_growing_and_edited_conversations_are_rendered_as_the_whole(
    turns: list[list[dict[str, Any]]],
    other: list[list[dict[str, Any]]],
    tools: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    question = {"role": "user", "content": "hello"}
    grown = [question, *([message for turn in turns for message in turn] * 2)]
    edited = [*grown[:6], *(message for turn in other for message in turn), *grown[7:]]
    for name, template in TEMPLATES.items():
        for messages in (grown[: len(grown) // 2], grown, grown[:-1], edited):
            prompt = ChatPrompt(messages=tuple(messages), tools=tools, template_options=options)
            assert rendered(template, prompt, "a") == rendered(template, prompt, None), name


@pytest.mark.parametrize(
    "source", [*LOCAL.values(), TEMPLATES["bundled"].sources["default"]], ids=[*LOCAL, "bundled"]
)
def test_templates_that_look_at_neighbours_only_may_grow(source: str) -> None:
    assert growing(jinja_environment(), source) is not None


@pytest.mark.parametrize("source", NOT_LOCAL.values(), ids=NOT_LOCAL)
def test_templates_that_look_further_are_rendered_whole(source: str) -> None:
    assert growing(jinja_environment(), source) is None


class NotingTemplate:
    """Knows how many messages it wrote each time."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self.written: list[int] = []

    def render(self, variables: Mapping[str, Any], **more: Any) -> str:
        """What the template gives."""
        self.written.append(len(more["holdfast_new"]))
        return self._template.render(variables, **more)


def test_only_what_is_new_is_rendered_for_each_tenant_apart() -> None:
    grown = growing(jinja_environment(), CHATML)
    assert grown is not None
    template, memory = NotingTemplate(grown), RenderedMessages()
    messages = [{"role": "user", "content": f"hello {number}"} for number in range(50)]
    for tenant, length in (("a", 40), ("a", 40), ("a", 50), ("b", 50)):
        memory.render(template, messages[:length], {"add_generation_prompt": True}, tenant=tenant)  # type: ignore[arg-type]
    # the first four always; what was the last one stands before another now
    assert template.written == [40, 4, 4 + 11, 50]


def test_the_longest_unused_are_forgotten_within_the_bound() -> None:
    grown = growing(jinja_environment(), CHATML)
    assert grown is not None
    memory = RenderedMessages(most_bytes=20_000)
    for start in range(0, 200, 20):
        messages = [
            {"role": "user", "content": f"hello {number}"} for number in range(start, start + 30)
        ]
        memory.render(grown, messages, {"add_generation_prompt": True}, tenant="")
        memory.check_invariants()


@given(
    value=st.sampled_from([{"a": 1}, {"items": 2}, {}, "text", ["x"], None]),
    name=st.sampled_from(
        ["a", "items", "b", "get", "__class__", "_x", "upper", "append", "pop", "format", "mro"]
    ),
)
def test_attributes_are_those_of_the_original_sandbox(value: Any, name: str) -> None:
    environment = jinja_environment()
    ours, theirs = (
        environment.getattr(value, name),
        super(type(environment), environment).getattr(value, name),
    )
    assert type(ours) is type(theirs)
    assert ours == theirs or callable(ours) or name.startswith("_")

"""Chat templates render as their models expect, and refuse with a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidRequest, ModelLoadError
from holdfast.front.prompt.template import ChatTemplate, load_template
from holdfast.front.prompt.template_worker import jinja_environment
from holdfast.front.request import ChatPrompt
from tests.fakes.toy_tokenizers import CHATML

PARTS_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}{% endfor %}{% "
    "endfor %}"
)
CALLS_AS_TEXT = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name + ':' + "
    "c.function.arguments }}"
    "{% endfor %}{% endfor %}"
)
CALLS_PRINTED = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments }}{% "
    "endfor %}{% endfor %}"
)
CALLS_AS_JSON = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments | "
    "tojson }}{% endfor %}{% endfor %}"
)
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "f", "arguments": '{"b": 1, "a": "é<"}'},
}


LISTED = "{{ tools | map(attribute='function') | tojson }}"


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens=special_tokens)


def chat(*messages: dict[str, Any], **options: Any) -> ChatPrompt:
    return ChatPrompt(messages=messages, **options)


USER = {"role": "user", "content": "Hi"}


def test_a_conversation_is_rendered_with_a_generation_prompt() -> None:
    assert (
        template(CHATML).render(chat(USER))
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_conversation_without_messages_is_refused_and_has_no_history() -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        template("text").render(chat())
    assert template("text").render_history(chat()) == ""


def test_the_last_message_can_be_continued() -> None:
    prompt = chat(USER, {"role": "assistant", "content": "I am "}, continue_last=True)
    assert template(CHATML).render(prompt).endswith("<|im_start|>assistant\nI am ")
    assert template(PARTS_ONLY).render(prompt).endswith("[assistant]I am ")


def test_only_assistant_text_can_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="assistant"):
        template(CHATML).render(chat(USER, continue_last=True))


def test_a_template_that_omits_the_continued_message_is_reported() -> None:
    with pytest.raises(InvalidRequest, match="leaves out"):
        template("{{ messages[0].content }}").render(
            chat(USER, {"role": "assistant", "content": "x"}, continue_last=True)
        )


def test_a_template_that_iterates_over_parts_gets_parts() -> None:
    assert template(PARTS_ONLY).render(chat(USER)) == "[user]Hi"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CALLS_AS_TEXT, 'f:{"b": 1, "a": "é<"}'),
        (CALLS_PRINTED, '{"b": 1, "a": "é<"}'),
        (CALLS_AS_JSON, '{"b": 1, "a": "é<"}'),
    ],
)
def test_call_arguments_are_json_once_in_every_template(source: str, expected: str) -> None:
    assistant = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert template(source).render(chat(USER, assistant)) == "Hi" + expected


def test_special_tokens_and_options_are_variables() -> None:
    source = (
        "{{ bos_token }}{{ messages[0].content }}{% if enable_thinking %} think{% endif %}{{ "
        "unheard_of }}"
    )
    assert (
        template(source, bos_token="<s>").render(
            chat(USER, template_options={"enable_thinking": True})
        )
        == "<s>Hi think"
    )


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_options_may_not_replace_the_rendered_variables(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        template(CHATML).render(chat(USER, template_options={name: []}))


def test_tools_reach_the_template_and_select_its_variant() -> None:
    sources = {"default": "plain{{ tools is none }}", "tool_use": "{{ tools | tojson }}"}
    both = ChatTemplate(sources, special_tokens={})
    assert both.render(chat(USER)) == "plainTrue"
    assert both.render(chat(USER, tools=({"type": "function"},))) == '[{"type": "function"}]'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 3 }}",
        "{{ messages[7].content.x.y }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ messages.clear() }}",
        "{{ 1 / 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_error_is_refused_with_its_reason(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses") as caught:
        template(source).render(chat(USER), field="input")
    assert caught.value.field == "input"


def test_text_quoted_by_a_template_is_not_logged() -> None:
    with pytest.raises(InvalidRequest, match="not this: Hi") as caught:
        template("{{ raise_exception('not this: ' + messages[0].content) }}").render(
            chat({"role": "user", "content": "Hi"})
        )
    assert caught.value.loggable == "the model's chat template refuses this conversation"


def test_a_single_text_part_renders_like_plain_text() -> None:
    for source in (CHATML, PARTS_ONLY):
        parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
        assert template(source).render(chat(parts)) == template(source).render(chat(USER))


def test_the_extensions_of_transformers_are_available() -> None:
    source = (
        "{% generation %}{{ strftime_now('%Y') | int > 2000 }}{% endgeneration %}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ {'b': 1, 'a': '<é'} | tojson(indent=None) }}{% set ns = namespace(x=1) %}{% set ns.x = "
        "2 %}{{ ns.x }}"
    )
    assert template(source).render(chat(USER)) == 'True01{"b": 1, "a": "<é"}2'


def test_a_broken_template_stops_the_load() -> None:
    with pytest.raises(ModelLoadError, match="line 1"):
        template("{% for %}")


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        suffix = "jinja" if isinstance(content, str) else "json"
        (folder / f"{name}.{suffix}").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    return folder


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert load_template(write(tmp_path, tokenizer_config={"bos_token": "<s>"})) is None


@pytest.mark.parametrize(
    "files",
    [
        {
            "tokenizer_config": {
                "chat_template": "A{{ bos_token }}",
                "bos_token": {"content": "<s>"},
            }
        },
        {
            "tokenizer_config": {
                "chat_template": [
                    {"name": "default", "template": "A<s>"},
                    {"name": "rag", "template": "B"},
                ]
            }
        },
        {"chat_template": {"chat_template": "A<s>"}},
        {"chat_template": "A<s>", "tokenizer_config": {"chat_template": "old"}},
        {
            "special_tokens_map": {"bos_token": "<s>"},
            "tokenizer_config": {"chat_template": "A{{ bos_token }}"},
        },
    ],
)
def test_a_template_is_found_in_every_location(tmp_path: Path, files: dict[str, Any]) -> None:
    found = load_template(write(tmp_path, **files))
    assert found is not None
    assert found.render(chat(USER)) == "A<s>"


def test_named_templates_may_be_in_a_separate_folder(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    found = load_template(write(tmp_path, chat_template="plain"))
    assert found is not None
    assert found.render(chat(USER, tools=({},))) == "with tools"


THINKING_DROPPED = (
    "{% for t in tools or [] %}[{{ t | tojson }}]\n{% endfor %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_branch_points_follow_the_system_prompt_and_last_message() -> None:
    system, tool = (
        {"role": "system", "content": "Be brief."},
        {"type": "function", "function": {"name": "f"}},
    )
    chats = template(THINKING_DROPPED)
    prompt = chat(
        system, USER, {"role": "assistant", "content": "<think>a</think>b"}, USER, tools=(tool,)
    )
    rendered = chats.render(prompt)
    first, last = chats.branch_points(prompt, rendered)
    assert rendered[:first].endswith("Be brief.<|im_end|>\n<|im_start|>user\n")
    assert rendered[last:] == "<|im_start|>assistant\n<think>\n"
    others = chat(system, {"role": "user", "content": "Other"}, tools=(tool,))
    assert chats.render(others).startswith(rendered[:first])
    after = chat(
        *prompt.messages, {"role": "assistant", "content": "<think>c</think>d"}, USER, tools=(tool,)
    )
    assert chats.render(after).startswith(rendered[:last])
    assert not chats.render(after).startswith(rendered)


def test_a_template_that_refuses_the_probes_lacks_branch_points() -> None:
    strict = template(
        "{% if messages | length < 3 or not add_generation_prompt %}{{ raise_exception('no') }}{% "
        "endif %}x"
    )
    prompt = chat(USER, {"role": "assistant", "content": "a"}, USER)
    assert strict.branch_points(prompt, strict.render(prompt)) == ()


def test_a_continued_message_is_not_a_branch_point() -> None:
    prompt = chat(USER, {"role": "assistant", "content": "I am"}, continue_last=True)
    rendered = template(CHATML).render(prompt)
    assert [rendered[:at] for at in template(CHATML).branch_points(prompt, rendered)] == [
        "<|im_start|>user\n"
    ]


ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ "
    "raise_exception('system first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
LAST_SYSTEM = (
    "{% set ns = namespace(s='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.s = m.content %}{% endif %}{% endfor %}"
    "[system]{{ ns.s }}{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content "
    "}}{% endfor %}"
)


@pytest.mark.parametrize("source", [ONE_SYSTEM, LAST_SYSTEM])
def test_no_system_message_is_lost_or_refused(source: str) -> None:
    said = (
        ("system", "A"),
        ("system", "B"),
        ("user", "C"),
        ("assistant", "D"),
        ("system", "E"),
        ("user", "F"),
    )
    prompt = ChatPrompt(
        messages=tuple({"role": role, "content": content} for role, content in said)
    )
    text = ChatTemplate({"default": source}, special_tokens={}).render(prompt)
    assert text == "[system]A\n\nB[user]C[assistant]D[user]E[user]F"


def test_filter_results_render_as_a_json_list() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    prompt = ChatPrompt(messages=({"role": "user", "content": "u"},), tools=(tool,))
    assert json.loads(template(LISTED).render(prompt)) == [tool["function"]]


@given(
    value=st.sampled_from([{"a": 1}, {"items": 2}, {}, "text", ["x"], None]),
    name=st.sampled_from(
        ["a", "items", "b", "get", "__class__", "_x", "upper", "append", "pop", "format", "mro"]
    ),
)
def test_attributes_follow_the_original_sandbox(value: Any, name: str) -> None:
    environment = jinja_environment()
    ours = environment.getattr(value, name)
    theirs = super(type(environment), environment).getattr(value, name)
    assert type(ours) is type(theirs)
    assert ours == theirs or callable(ours) or name.startswith("_")

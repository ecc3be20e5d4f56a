"""The syntax of a model's calls and thoughts is detected from its template and tokens, and used
only if proven.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from holdfast.front.output import ChoiceFinished, TextDelta, ToolArgumentsDelta
from holdfast.front.prompt.dialects import FoundDialect, find_dialect, prompt_opens_thought
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.request import ChatPrompt
from holdfast.front.toolcalls.call_format import Call
from holdfast.front.toolcalls.dialect import PLAIN, ReasoningFormat
from holdfast.front.toolcalls.families import FAMILIES as FORMATS
from tests.fakes.family_bundles import found_in
from tests.fakes.family_templates import FAMILY_TEMPLATES, FamilyTemplate, tokenizer_for
from tests.fakes.told_answers import by_tokens, told

FAMILIES = pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
THINK = (
    "{% if enable_thinking %}<think>{% elif enable_thinking is defined %}<think></think>{% endif %}"
)
THINKING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt "
    "%}[assistant]" + THINK + "{% endif %}"
)


def found(family: FamilyTemplate) -> FoundDialect:
    return found_in(family)[0]


def source_of(source: str, *tokens: str, **config: Any) -> FoundDialect:
    return find_dialect(
        ChatTemplate({"default": source}, special_tokens={}),
        tokenizer_for(source, *tokens),
        config=config,
    )


@FAMILIES
def test_each_family_is_detected_and_its_calls_round_trip(name: str) -> None:
    family = FAMILY_TEMPLATES[name]
    report = found(family).report
    assert (report.family, report.tools, report.proven, report.why) == (
        family.family,
        "template",
        True,
        "",
    )
    assert (report.calls_kept, report.parallel, report.ids) == (
        family.kept,
        family.parallel,
        family.ids,
    )


@FAMILIES
def test_each_familys_thoughts_and_opening_state_are_detected(name: str) -> None:
    family = FAMILY_TEMPLATES[name]
    thinking = found(family).report.thinking
    if not family.thought[0]:
        assert thinking is None
        return
    assert thinking is not None
    assert (thinking.start, thinking.end) == (family.thought[0].strip(), family.thought[1].strip())
    template, dialect = found(family).template, found(family).dialect
    assert template is not None
    for effort, options in thinking.efforts.items():
        prompt = ChatPrompt(messages=({"role": "user", "content": "u"},), template_options=options)
        opens = prompt_opens_thought(template, dialect, prompt, template.render(prompt))
        assert opens <= (effort not in ("off", "minimal") or family.family in ("hy3",)), effort


def test_thought_markers_assembled_by_the_template_are_detected() -> None:
    family = FAMILY_TEMPLATES["kimi_k3"]
    assert family.thought[0] not in family.source
    model = found(family)
    assert model.report.thinking is not None
    assert model.report.thinking.opened_by_prompt
    answer = "Hm.<|close|>think<|sep|><|open|>response<|sep|>Hello!<|close|>response<|sep|><|close|>message<|sep|>"
    assert told(model.dialect, [], answer, in_reasoning=True) == [("thought", "Hm."), "Hello!"]


@pytest.mark.parametrize(
    "opening", ["{{ think('') }}", "{% if thinking is not false %}{{ think('') }}{% endif %}", ""]
)
def test_thoughts_are_detected_from_the_templates_output(opening: str) -> None:
    parts = "{% macro think(end) %}{{ '<' + end + 'think>' }}{% endmacro %}"
    said = (
        "{% if m.reasoning_content %}{{ think('') }}{{ m.reasoning_content }}{{ think('/') }}{% "
        "endif %}{{ m.content }}"
    )
    source = (
        parts + "{% for m in messages %}[{{ m.role }}]" + said + "{% endfor %}[assistant]" + opening
    )
    assert source_of(source).dialect.reasoning == ReasoningFormat(start="<think>", end="</think>")


@FAMILIES
def test_conversations_with_many_calls_are_rendered_and_continued(name: str) -> None:
    template = found(FAMILY_TEMPLATES[name]).template
    assert template is not None
    calls = [
        {"id": f"toolu_{at}", "function": {"name": "f", "arguments": '{"at": 1'}} for at in range(3)
    ]
    results = [
        {
            "role": "tool",
            "tool_call_id": f"toolu_{at}",
            "content": [{"type": "text", "text": f"r{at}"}],
        }
        for at in (2, 0, 1)
    ]
    messages = (
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
    )
    text = template.render(
        ChatPrompt(messages=(*messages, {"role": "user", "content": "and?"}), tools=(TOOL,))
    )
    places = [text.index(f"r{at}") for at in range(3)]
    assert places == sorted(places)
    assert text.index("and?") > places[-1]


NO_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def test_a_template_without_tools_serves_them_in_text() -> None:
    found = source_of(NO_TOOLS)
    assert (found.report.family, found.report.tools, found.report.proven) == (
        "hermes",
        "text",
        True,
    )
    assert found.report.why == "the chat template shows no tools"
    assert found.template is not None
    assert '"name": "f"' in found.template.render(
        ChatPrompt(messages=({"role": "user", "content": "u"},), tools=(TOOL,))
    )


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31", "kimi_k2", "qwen3_coder"])
def test_a_named_syntax_is_used_if_the_template_lacks_tools(name: str, kept: bool) -> None:
    family = replace(FAMILY_TEMPLATES[name], tools="", kept=kept)
    model = found(family)
    report = model.report
    assert (report.family, report.tools, report.proven, report.calls_kept) == (
        family.family,
        "text",
        True,
        False,
    )
    assert report.why == "the chat template shows no tools"
    assert model.template is not None
    assert model.dialect.calls is not None
    made = {"id": "functions.f:0", "function": {"name": "f", "arguments": '{"at": "1"}'}}
    result = {"role": "tool", "tool_call_id": "functions.f:0", "content": "r1"}
    messages = (
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        result,
    )
    text = model.template.render(ChatPrompt(messages=messages, tools=(TOOL,)))
    call = model.dialect.calls.write([Call("f", {"at": "1"}, "functions.f:0")])
    before, _, behind = text.partition(call)
    assert '"name": "f"' in before
    assert model.dialect.calls.call_starts[0] in before  # an example
    assert "r1" in behind
    assert told(model.dialect, [TOOL], call) == [("f", {"at": "1"}, ())]


def test_calls_in_the_tokenizers_syntax_are_read_without_template_support() -> None:
    own = FORMATS["deepseek_v31"].calls
    found = source_of(NO_TOOLS, *own.markers)
    assert (found.report.family, found.report.tools) == ("hermes", "text")
    own_call = own.write([Call("f", {"at": "1"})])
    for call in (own_call, FORMATS["hermes"].calls.write([Call("f", {"at": "1"})])):
        assert told(found.dialect, [TOOL], call) == [("f", {"at": "1"}, ())]
    without = source_of(NO_TOOLS)
    assert told(without.dialect, [TOOL], own_call) == [own_call]


def test_a_template_that_spoils_arguments_is_not_trusted() -> None:
    spoiled = replace(
        FAMILY_TEMPLATES["qwen3"],
        call='<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson | upper }}}\n</tool_call>',
    )
    report = found(spoiled).report
    assert (report.tools, report.proven) == ("text", True)
    assert report.why.startswith("hermes: the arguments of find_places were read back as")


def test_a_template_that_omits_results_is_not_trusted() -> None:
    report = found(replace(FAMILY_TEMPLATES["qwen3"], result="")).report
    assert (report.tools, report.why) == (
        "text",
        "hermes: the template leaves out the results of tools",
    )


def test_an_unknown_syntax_is_replaced_by_one_in_text() -> None:
    report = found(
        FamilyTemplate(family="", call="CALL {{ c.name }} WITH {{ c.arguments | tojson }}")
    ).report
    assert (report.tools, report.family) == ("text", "hermes")
    assert report.why == "this model's calls match no known model family"


def test_the_tool_variant_of_a_template_decides() -> None:
    template = ChatTemplate(
        {"default": NO_TOOLS, "tool_use": FAMILY_TEMPLATES["glm47"].source}, special_tokens={}
    )
    tokenizer = tokenizer_for(FAMILY_TEMPLATES["glm47"].source)
    assert find_dialect(template, tokenizer, config={}).report.family == "glm47"


def test_the_tokenizer_configurations_hint_is_tried_first() -> None:
    family = FAMILY_TEMPLATES["glm45"]
    report = find_dialect(
        family.template(), family.tokenizer(), config={"tool_parser_type": "kimi_k2"}
    ).report
    assert (report.family, report.proven) == ("glm45", True)


def test_without_a_template_there_are_thoughts_but_not_tools() -> None:
    found = find_dialect(None, tokenizer_for("", "<think>", "</think>"), config={})
    assert found.report.tools == "none"
    assert found.dialect.reasoning is not None
    assert set(found.dialect.marker_ids) == {"<think>", "</think>"}
    assert find_dialect(None, tokenizer_for(""), config={}).dialect == PLAIN


def test_a_pair_of_thought_tokens_suffices_without_the_template() -> None:
    thinking = source_of(NO_TOOLS, "<think>", "</think>").report.thinking
    assert thinking is not None
    assert (thinking.start, thinking.end, thinking.opened_by_prompt, thinking.switch) == (
        "<think>",
        "</think>",
        False,
        (),
    )


@pytest.mark.parametrize(
    ("options", "opens"),
    [({}, False), ({"enable_thinking": True}, True), ({"enable_thinking": False}, False)],
)
@pytest.mark.parametrize("said", ["hello", "what does <think> mean?", "</think>"])
def test_the_generation_prompt_decides_whether_an_answer_begins_thinking(
    options: dict[str, Any], opens: bool, said: str
) -> None:
    found = source_of(THINKING)
    assert found.template is not None
    prompt = ChatPrompt(messages=({"role": "user", "content": said},), template_options=options)
    assert (
        prompt_opens_thought(found.template, found.dialect, prompt, found.template.render(prompt))
        is opens
    )


@pytest.mark.parametrize(
    ("begun", "opens"), [("Well,", False), ("<think>Hm", True), ("<think>Hm</think>So", False)]
)
def test_a_continued_answer_may_be_inside_its_own_thought(begun: str, opens: bool) -> None:
    found = source_of(THINKING)
    assert found.template is not None
    messages = ({"role": "user", "content": "u"}, {"role": "assistant", "content": begun})
    prompt = ChatPrompt(
        messages=messages, continue_last=True, template_options={"enable_thinking": True}
    )
    assert (
        prompt_opens_thought(found.template, found.dialect, prompt, found.template.render(prompt))
        is opens
    )


def test_meaningless_markers_are_dropped_if_they_are_tokens() -> None:
    assert source_of(NO_TOOLS, "<response>", "</response>").dialect.dropped_markers == (
        "<response>",
        "</response>",
    )
    assert source_of(NO_TOOLS).dialect.dropped_markers == ()


@pytest.mark.parametrize(
    ("wrote", "said"),
    [
        (
            "<think>\nHm.\n</think>\n<answer>\nYes, <b>3</b>.\n</answer>",
            [("thought", "Hm."), "Yes, <b>3</b>."],
        ),
        ("<answer>\nYes.\n</answer>\n", ["Yes."]),
        ("<answer>Yes.", ["Yes."]),
        (
            "<answer>\nWrite <answer> and </answer> around it.\n</answer>",
            ["Write <answer> and </answer> around it."],
        ),
        ("Write <answer>x</answer>", ["Write <answer>x</answer>"]),
        ("Yes.\n</answer>", ["Yes.\n</answer>"]),
        (
            '<answer>\nI look.\n</answer>\n<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>',
            ["I look.", ("f", {}, ())],
        ),
        (
            '<answer>\n<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>\n</answer>',
            [("f", {}, ())],
        ),
        ("<answer>\n</answer>", []),
    ],
)
def test_marks_around_answers_are_dropped_if_the_template_does(wrote: str, said: list[Any]) -> None:
    named = "{% if '<answer>' in m %}{{ m.split('<answer>')[-1].split('</answer>')[0] }}{% endif %}"
    family = replace(
        FAMILY_TEMPLATES["apriel"],
        before="{% set m = '' %}" + named,
        plain_markers=True,
        thought=("<think>\n", "\n</think>\n"),
    )
    dialect = found(family).dialect
    assert dialect.dropped_markers == ()
    for at in ((), range(0, len(wrote), 3), range(len(wrote))):
        assert told(dialect, [TOOL], wrote, at=at) == said
    assert "".join(
        str(part)
        for part in told(found(replace(family, before="")).dialect, [], "<answer>Yes.</answer>")
    ) == ("<answer>Yes.</answer>")


def test_call_prefixes_in_the_prompt_are_left_out() -> None:
    family = FamilyTemplate(
        family="functionary_v32",
        call=">>>{{ c.name }}\n{{ c.arguments | tojson }}",
        opening=">>>",
        plain_markers=True,
    )
    found, _ = found_in(family)
    assert (found.report.family, found.report.proven) == ("functionary_v32", True)
    assert found.template is not None
    assert found.template.render(ChatPrompt(messages=({"role": "user", "content": "u"},))).endswith(
        "<|im_start|>assistant\n"
    )


ARGUMENTS: dict[str, Any] = {"path": 'a "b" <c>\nü', "at": {"lines": [1, 2], "deep": {"on": True}}}
FILES: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "open_file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "at": {"type": "object"}},
            "required": ["path"],
        },
    },
}


@FAMILIES
def test_each_familys_output_is_read_token_by_token(name: str) -> None:
    family = FAMILY_TEMPLATES[name]
    tokenizer, dialect = found_in(family)[1], found(family).dialect
    assert dialect.calls is not None
    wrote = "\n".join(
        dialect.calls.write([Call("open_file", ARGUMENTS, "functions.open_file:0")])
        for _ in range(1 + family.parallel)
    )
    token_ids = tokenizer.encode(wrote, add_special_tokens=False)
    events = by_tokens(tokenizer, dialect, [FILES], wrote)
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolArgumentsDelta):
            arguments[event.call] = arguments.get(event.call, "") + event.text
    assert [json.loads(text) for text in arguments.values()] == [ARGUMENTS] * (1 + family.parallel)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)).strip() == ""
    assert [event.finish_reason for event in events if isinstance(event, ChoiceFinished)] == [
        "tool_calls"
    ]
    assert [
        token_id
        for event in events
        if not isinstance(event, ChoiceFinished)
        for token_id in event.token_ids
    ] == token_ids


# Markers to which a vocabulary adds a suffix.

TAGS = ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value", "think")


def with_suffix(text: str, suffix: str) -> str:
    for tag in TAGS:
        text = text.replace(f"<{tag}>", f"<{tag}{suffix}>").replace(
            f"</{tag}>", f"</{tag}{suffix}>"
        )
    return text


@pytest.mark.parametrize("suffix", ["", ":opensource", ":v2"])
def test_all_markers_of_a_family_may_have_a_suffix(suffix: str) -> None:
    plain = FAMILY_TEMPLATES["hy3"]
    model = replace(
        plain,
        calls=(with_suffix(plain.calls[0], suffix), with_suffix(plain.calls[1], suffix)),
        call=with_suffix(plain.call, suffix),
        thought=(f"<think{suffix}>", f"</think{suffix}>"),
        opening=with_suffix(plain.opening, suffix),
    )
    found = find_dialect(model.template(), model.tokenizer(), config={})
    assert (found.report.family, found.report.proven, found.report.why) == ("hy3", True, "")
    assert found.dialect.calls is not None
    assert found.dialect.calls.call_starts == (f"<tool_calls{suffix}>", f"<tool_call{suffix}>")
    assert found.dialect.reasoning == ReasoningFormat(
        start=f"<think{suffix}>", end=f"</think{suffix}>"
    )
    assert f"<tool_call{suffix}>" in found.dialect.marker_ids

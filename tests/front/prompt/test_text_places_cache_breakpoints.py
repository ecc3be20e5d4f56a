"""Cache breakpoints of a conversation are located in its prompt: in characters and in tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config import LimitsSettings
from holdfast.front.prompt.canonical import CanonicalForm, FirstForms
from holdfast.front.prompt.prepare import Prepared, prepare
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.text_places import breakpoint_places
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.request import CacheBreakpoint, ChatPrompt, GenerationRequest
from tests.fakes.scripted_client import model_info
from tests.fakes.toy_tokenizers import CHATML

TOOLS_BEHIND_SYSTEM = (
    "{% if messages[0].role == 'system' %}<s>{{ messages[0].content }}"
    "{% for t in tools or [] %}\n{{ t | tojson }}{% endfor %}</s>{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role "
    "}}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LENGTHS_TOLD = TOOLS_BEHIND_SYSTEM.replace(
    "{{ m.content | trim }}", "{{ m.content | length }} {{ m.content }}"
)
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi \n"}
ANSWER, RESULT = (
    {"role": "assistant", "content": "I look."},
    {"role": "tool", "tool_call_id": "c", "content": " found it "},
)
CALLING = {**ANSWER, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
TOOL = {"type": "function", "function": {"name": "f"}}


def beginnings(
    source: str, *messages: dict[str, Any], at: list[tuple[int, int]], **options: Any
) -> list[str]:
    """The text of the prompt up to each of its breakpoints."""
    template = ChatTemplate({"default": source}, special_tokens={})
    breakpoints = tuple(CacheBreakpoint(messages=messages, parts=parts) for messages, parts in at)
    asked = ChatPrompt(messages=messages, tools=(TOOL,), cache_breakpoints=breakpoints, **options)
    shown, _ = CanonicalForm(forms=FirstForms()).of(asked)
    text = template.render(shown)
    return [
        text[:place]
        for place in breakpoint_places(asked, shown, text, template=template, guard=str)
    ]


def test_a_breakpoint_after_a_message_follows_its_text() -> None:
    found = beginnings(TOOLS_BEHIND_SYSTEM, SYSTEM, USER, CALLING, RESULT, at=[(2, 0), (4, 0)])
    assert found[0].endswith("</s><user>Hi")
    assert found[1].endswith("<tool>found it")


def test_a_system_prompts_breakpoint_includes_tools_written_after_it() -> None:
    block = '<s>Be brief.{"type": "function", "function": {"name": "f"}}</s><user>'
    assert beginnings(TOOLS_BEHIND_SYSTEM, SYSTEM, USER, at=[(0, 0), (1, 0)]) == [block, block]


def test_a_breakpoint_after_an_answer_precedes_the_next_text() -> None:
    found = beginnings(TOOLS_BEHIND_SYSTEM, SYSTEM, USER, ANSWER, USER, at=[(3, 0)])
    assert found[0].endswith("I look.</assistant><user>")


def test_a_continued_answer_is_kept_whole() -> None:
    (found,) = beginnings(
        TOOLS_BEHIND_SYSTEM, SYSTEM, USER, ANSWER, at=[(3, 0)], continue_last=True
    )
    assert found.endswith("<assistant>I look.")


def test_a_breakpoint_may_follow_a_part_of_a_message() -> None:
    said = {
        "role": "user",
        "content": [
            {"type": "text", "text": "a book"},
            "a chapter",
            {"type": "text", "text": "why?"},
        ],
    }
    found = beginnings(TOOLS_BEHIND_SYSTEM, SYSTEM, said, at=[(1, 1), (1, 2), (1, 3)])
    assert [text.rpartition("<user>")[2] for text in found] == [
        "a book",
        "a book\na chapter",
        "a book\na chapter\nwhy?",
    ]


def test_omitted_parts_of_the_system_prompt_shift_nothing() -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    system = {
        "role": "system",
        "content": [
            header,
            {"type": "text", "text": "You help."},
            {"type": "text", "text": "Today"},
        ],
    }
    found = beginnings(TOOLS_BEHIND_SYSTEM, system, USER, at=[(0, 1), (0, 2)])
    assert found == ["<s>", "<s>You help."]


def test_templates_affected_by_marks_render_the_prefix_alone() -> None:
    found = beginnings(LENGTHS_TOLD, SYSTEM, USER, CALLING, RESULT, at=[(0, 0), (2, 0), (4, 0)])
    assert found[0].endswith("</s>")
    assert found[1].endswith("</user>")
    assert found[2].endswith("<tool>10  found it </tool>")


def test_a_conversation_without_breakpoints_is_rendered_once() -> None:
    class OnceRendered(ChatTemplate):
        def render(
            self, prompt: ChatPrompt, *, field: str = "messages", tenant: str | None = None
        ) -> str:
            raise AssertionError("rendered again")

    template = OnceRendered({"default": CHATML}, special_tokens={})
    assert (
        breakpoint_places(
            ChatPrompt(messages=(USER,)),
            ChatPrompt(messages=(USER,)),
            "",
            template=template,
            guard=str,
        )
        == ()
    )


def ready(bundle: TokenizerBundle, *breakpoints: CacheBreakpoint) -> Prepared:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"})
    prompt = ChatPrompt(messages=messages, cache_breakpoints=breakpoints)
    request = GenerationRequest(request_id="r", model="m", prompt=prompt)
    return prepare(request, bundle, info=model_info(), limits=LimitsSettings())


def test_breakpoints_are_counted_in_tokens_of_the_prompt(bundle: TokenizerBundle) -> None:
    prepared = ready(
        bundle, CacheBreakpoint(messages=1, seconds=3600.0), CacheBreakpoint(messages=2)
    )
    (sequence,) = prepared.sequences
    system, last = prepared.breakpoints
    decode = bundle.tokenizer.decode
    shown = [
        decode(sequence.prompt_token_ids[: marked.tokens], skip_special_tokens=False)
        for marked in (system, last)
    ]
    assert shown[0].endswith("Be brief.<|im_end|>\n<|im_start|>user\n")
    assert shown[1].endswith("<|im_start|>user\nhello")
    assert (system.seconds, last.seconds) == (3600.0, 300.0)
    assert sequence.branch_points == (system.tokens, last.tokens)


def test_breakpoints_at_one_position_keep_the_longer_time(bundle: TokenizerBundle) -> None:
    prepared = ready(
        bundle, CacheBreakpoint(messages=0, seconds=3600.0), CacheBreakpoint(messages=1)
    )
    assert [marked.seconds for marked in prepared.breakpoints] == [3600.0]


@pytest.mark.parametrize("prompt", ["a text", (1, 2, 3)])
def test_only_conversations_have_breakpoints(prompt: Any, bundle: TokenizerBundle) -> None:
    request = GenerationRequest(request_id="r", model="m", prompt=prompt)
    assert prepare(request, bundle, info=model_info(), limits=LimitsSettings()).breakpoints == ()


@settings(max_examples=40)
@given(
    texts=st.lists(st.text("ab \n", max_size=4), min_size=1, max_size=5),
    at=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=4),
)
def test_breakpoints_are_in_order_and_within_the_prompt(
    texts: list[str], at: list[tuple[int, int]]
) -> None:
    messages = [
        {"role": "user" if place % 2 == 0 else "assistant", "content": [text, text]}
        for place, text in enumerate(texts)
    ]
    found = beginnings(CHATML, *messages, at=sorted(at))
    assert [len(text) for text in found if text] == sorted(len(text) for text in found if text)

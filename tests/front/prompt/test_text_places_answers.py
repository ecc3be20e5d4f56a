"""Finding answers in the output of templates by several makers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.text_places import AnswerFrame, find_frame
from tests.fakes import toy_tokenizers

LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content "
    "}}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ {'content': m.content, 'id': m.tool_call_id} | "
    "tojson }}[/TOOL_RESULTS]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
OPENED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think></think>{% endif "
    "%}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
COUNTED = toy_tokenizers.CHATML.replace(
    "{%- for m", "{%- set ns = namespace(n=0) %}{%- for m"
).replace("{% endfor %}", "{% set ns.n = ns.n + 1 %}{% endfor %}")
COUNTED = COUNTED.replace(
    "'\\n' + m.content", "'\\n' ~ ('<' ~ ns.n ~ '>' if m.role == 'assistant' else '') ~ m.content"
)
COUNTED = COUNTED.replace("assistant\n{% endif", "assistant\n<{{ ns.n }}>{% endif")


@pytest.mark.parametrize(
    ("source", "ends", "headers"),
    [
        (toy_tokenizers.CHATML, ["<|im_end|>"], ("<|im_start|>assistant",)),
        (COUNTED, ["<|im_end|>"], ("<|im_start|>assistant",)),
        (LLAMA, ["<|eot_id|>"], ("<|start_header_id|>assistant<|end_header_id|>",)),
        (MISTRAL, ["</s>"], ("[/INST]", '"}[/TOOL_RESULTS]')),
        (OPENED, ["<|user|>", "<|tool|>"], ("<|assistant|>",)),
        ("{{ messages[0].content }}", ["</s>"], ()),
    ],
    ids=["chatml", "chatml with numbers", "llama", "mistral", "opened thought", "no frame"],
)
def test_the_texts_around_answers_are_found(
    source: str, ends: list[str], headers: tuple[str, ...]
) -> None:
    template = ChatTemplate({"default": source}, special_tokens={})
    assert find_frame(template, ends=ends, thought=("<think>", "</think>")).headers == headers


CHATML = AnswerFrame(headers=("<|im_start|>assistant",), ends=("<|im_end|>", "<|endoftext|>"))


def test_an_answer_lies_between_header_and_end() -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>assistant\n<think>\n"
    ((span,),) = CHATML.candidates(text)
    assert text[span.start : span.end] == "\nyes"
    assert CHATML.opening(text) == "\n<think>\n"
    assert CHATML.opening("<|im_start|>user\nhi<|im_end|>") is None
    assert CHATML.opening(text + "x" * 1000) is None


def test_consecutive_assistant_messages_may_be_one_answer() -> None:
    frame = AnswerFrame(headers=("<|start|>assistant",), ends=("<|end|>", "<|call|>"))
    text = "<|start|>assistant<|a|>why<|end|><|start|>assistant<|c|>f<|call|><|start|>tool<|end|>"
    found = [
        [text[span.start : span.end] for span in candidates]
        for candidates in frame.candidates(text)
    ]
    assert found == [["<|a|>why<|end|><|start|>assistant<|c|>f", "<|a|>why"], ["<|c|>f"]]


@given(
    text=st.lists(
        st.sampled_from(["<|im_start|>assistant", "<|im_end|>", "<|endoftext|>", "a", "\n"]),
        max_size=40,
    ).map("".join)
)
def test_candidates_contain_no_ends_or_headers_of_others(text: str) -> None:
    for candidates in CHATML.candidates(text):
        shortest = text[candidates[-1].start : candidates[-1].end]
        assert not any(mark in shortest for mark in (*CHATML.headers, *CHATML.ends))
        assert text[: candidates[0].start].endswith(CHATML.headers)
        assert all(text[span.end :].startswith(CHATML.ends) for span in candidates)
        assert len(candidates) <= 4

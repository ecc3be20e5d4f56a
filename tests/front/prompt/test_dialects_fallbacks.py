"""Markers with a suffix of the vocabulary's own, and models of no known family that say themselves
how they are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.front.prompt.dialects import find_dialect
from holdfast.front.toolcalls.dialect import ReasoningFormat
from tests.fakes.family_templates import FAMILY_TEMPLATES, FamilyTemplate, tokenizer_for

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
    assert found.dialect.calls.openers == (f"<tool_calls{suffix}>", f"<tool_call{suffix}>")
    assert found.dialect.reasoning == ReasoningFormat(
        start=f"<think{suffix}>", end=f"</think{suffix}>"
    )
    assert f"<tool_call{suffix}>" in found.dialect.marker_ids


UNKNOWN = FamilyTemplate(
    family="",
    call="<do {{ c.name }}>{% for k, v in c.arguments | items %}<with {{ k }}>{{ v if v is string else v | tojson }}</with>"
    "{% endfor %}</do>",
    thought=("<muse>", "</muse>"),
)
SAYS: dict[str, Any] = {
    "version": 1,
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<muse>", "close": "</muse>"},
        "tool_calls": {
            "open_pattern": r"\s*<do (?P<name>[^>]+)>",
            "close": "</do>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<with (?P<key>[^>]+)>(?P<value>.*?)</with>"},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": "<|im_end|>"},
    },
}


def test_a_model_of_no_known_family_is_read_as_it_says() -> None:
    found = find_dialect(UNKNOWN.template(), tokenizer_for(""), config={"response_template": SAYS})
    assert (found.report.family, found.report.tools, found.report.proven) == (
        "response_template",
        "template",
        True,
    )
    assert found.dialect.reasoning == ReasoningFormat(start="<muse>", end="</muse>")


def test_what_is_said_wrongly_is_not_believed() -> None:
    wrong = {**SAYS, "fields": {"tool_calls": {**SAYS["fields"]["tool_calls"], "close": "</done>"}}}
    found = find_dialect(UNKNOWN.template(), tokenizer_for(""), config={"response_template": wrong})
    assert (found.report.family, found.report.tools) == ("hermes", "text")

"""Markers to which a vocabulary adds a suffix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.front.prompt.dialects import find_dialect
from holdfast.front.toolcalls.dialect import ReasoningFormat
from tests.fakes.family_templates import FAMILY_TEMPLATES

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

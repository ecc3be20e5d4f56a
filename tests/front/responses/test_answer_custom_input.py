from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.responses.answer import CustomInput


def decoded(*fragments: str) -> tuple[str, str]:
    """The output while fragments arrived, and at the end."""
    reader = CustomInput()
    return "".join([reader.more(fragment) for fragment in fragments]), reader.rest()


def mended(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@given(st.text(st.characters(categories=("L", "Z", "Cs", "So", "Cc"))), st.booleans(), st.data())
def test_the_pieces_join_to_the_text_wherever_split(
    text: str, is_ascii: bool, data: st.DataObject
) -> None:
    said = json.dumps({"input": text}, ensure_ascii=is_ascii)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=6)))
    got = decoded(
        *(said[start:end] for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True))
    )
    assert got == (mended(text), "")


@given(st.text(max_size=20), st.integers(1, 4))
def test_escapes_are_streamed_except_a_trailing_backslash(text: str, width: int) -> None:
    reader, said = CustomInput(), json.dumps({"input": text})
    got = ""
    for start in range(0, len(said), width):
        got += reader.more(said[start : start + width])
        so_far = said[: start + width].removeprefix('{"input": "')
        assert len(got) >= len(mended(text)) - (len(said) - start - width) - 12 or not so_far


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"why": "x", "input": "a"}', "a"),
        ('{ "input" :"a", "why": 1}', "a"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "line\nline"}', "line\nline"),
        ("{}", "{}"),
        ("[]", "[]"),
        ("not JSON", "not JSON"),
        (r'{"input": "\ud83d\ud83d\ude00"}', "\ufffd😀"),
        (r'{"input": "\ud83d"}', "\ufffd"),
        (r'{"input": "\\ud83d"}', r"\ud83d"),
        ('{"input": ""}', ""),
    ],
)
def test_calls_in_other_forms_are_read_too(arguments: str, text: str) -> None:
    assert "".join(decoded(arguments)) == text
    assert "".join(decoded(*arguments)) == text


def test_a_cut_call_keeps_the_received_input() -> None:
    assert decoded('{"input": "abc\\u00')[0] == "abc"
    assert decoded('{"in') == ("", '{"in')

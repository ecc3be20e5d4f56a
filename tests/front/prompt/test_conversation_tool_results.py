"""Each result follows its own call in any order of messages, and each prompt begins with the one
before.
"""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.front.prompt.conversation import ToolHabits, with_habits
from tests.fakes.family_bundles import OF_EACH_HABIT, bundle_of
from tests.fakes.family_templates import FAMILY_TEMPLATES
from tests.fakes.mismatched_results import (
    FIRST,
    QUESTION,
    SAME,
    SECOND,
    SORTED,
    STEER,
    A,
    answer,
    result,
    text_of,
)

FAMILIES = pytest.mark.parametrize("name", OF_EACH_HABIT)


def test_each_kind_of_habits_is_among_the_families() -> None:
    tried, every = (
        {str(bundle_of(name).template._habits) for name in names}  # type: ignore[union-attr]
        for names in (OF_EACH_HABIT, FAMILY_TEMPLATES)
    )
    assert tried == every


@FAMILIES
def test_each_result_follows_its_call(name: str) -> None:
    for case, (sent, expected) in SAME.items():
        assert text_of(bundle_of(name), sent) == text_of(bundle_of(name), expected), case


@FAMILIES
def test_a_result_of_an_unknown_call_moves_no_other(name: str) -> None:
    strange = result("call_z", "strange8204")
    for place in (2, 3, 4):
        text = text_of(bundle_of(name), [*SORTED[:place], strange, *SORTED[place:], STEER])
        places = [text.rindex(each) for each in (FIRST, SECOND, "strange8204", "steer7391")]
        assert places == sorted(places)
        before = text_of(bundle_of(name), SORTED)
        common = len(before) - before.index(SECOND)
        assert text[: len(before) - common] == before[:-common]
    for messages in ([QUESTION, strange, STEER], [strange, QUESTION]):
        assert "strange8204" in text_of(bundle_of(name), messages)


@FAMILIES
def test_prompts_of_a_disordered_conversation_extend_each_other(name: str) -> None:
    """A result that comes after the next answer changes nothing before that answer."""
    conversation = [
        *SORTED[:2],
        SORTED[3],
        answer(text="one"),
        result(A, FIRST),
        STEER,
        answer("call_c"),
        STEER,
        answer(text="two"),
        result("call_c", "third8204"),
    ]
    ends = [3, 6, 8, 10]
    texts = [text_of(bundle_of(name), conversation[:end]) for end in ends]
    for (end, before), after in zip(zip(ends, texts, strict=True), texts[1:], strict=False):
        history = before.rpartition(conversation[end - 1]["content"])
        assert after.startswith(history[0] + history[1])
    assert all(each in texts[-1] for each in (FIRST, SECOND, "third8204"))


class CountedCall(dict[str, Any]):
    """A call that counts its reads."""

    looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        CountedCall.looks += 1
        return super().get(key, default)


def test_thousands_of_results_are_matched_in_linear_time() -> None:
    count = 500
    function = {"name": "f", "arguments": {}}
    calls = [CountedCall(id=f"c{n}", function=dict(function)) for n in range(count)]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": str(n)} for n in range(count)]
    ready = with_habits(
        [{"role": "assistant", "content": "", "tool_calls": calls}, *reversed(results)],
        ToolHabits(),
    )
    assert [each["content"] for each in ready[1:]] == [str(n) for n in range(count)]
    assert CountedCall.looks <= 10 * count

from __future__ import annotations

import re
from pathlib import Path

import pytest

from demo_model.judge import fault
from holdfast import LLM
from tools.demo_chat import TURNS, conversation, said_until

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "getting-started" / "demo-chat.md"
WRITTEN = re.findall(
    r"^\*\*\d+\. You:\*\* (.*?)\n\n```text\n(.*?)\n```$",
    DOCUMENT.read_text(),
    re.MULTILINE | re.DOTALL,
)


def test_the_documented_first_conversation_has_forty_turns() -> None:
    assert len(TURNS) == 40
    assert [question for question, _ in WRITTEN] == [turn.text for turn in TURNS]


def test_every_answer_in_the_documents_follows_its_rule() -> None:
    for number, (turn, (_, answer)) in enumerate(zip(TURNS, WRITTEN, strict=True)):
        assert (
            fault(
                turn.kind,
                said_until(number),
                answer,
                expected=turn.expected,
                tokens=len(answer) // 4,
                ended=True,
            )
            == ""
        )


@pytest.mark.slow  # forty answers, each after the whole conversation
def test_the_bundled_model_still_gives_that_conversation() -> None:
    with LLM() as llm:
        faults = {
            turn.opening.text: f"{turn.answer!r}: {turn.fault}"
            for turn in conversation(llm)
            if turn.fault
        }
    assert faults == {}

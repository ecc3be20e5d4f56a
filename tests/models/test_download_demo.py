from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from demo_model.judge import MOST_TOKENS, fault
from demo_model.openings import HELD_OUT, SHOWN, Opening
from holdfast import LLM
from holdfast.errors import ModelLoadError
from holdfast.models.download import DEMO_ID, DEMO_IDS, demo_folder, is_demo


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as made:
        yield made


def fault_of(llm: LLM, opening: Opening) -> str:
    """The fault of the answer to an opening, with the answer; empty if it is right."""
    messages = [{"role": "user", "content": opening.text}]
    answer = llm.chat(messages, max_tokens=MOST_TOKENS + 1)  # no temperature: the default
    wrong = fault(
        opening.kind,
        opening.text,
        answer.text,
        expected=opening.expected,
        tokens=answer.completion_tokens,
        ended=answer.finish_reason == "stop",
    )
    return wrong and f"{answer.text!r}: {wrong}"


@pytest.mark.parametrize(
    "opening",
    [*SHOWN[:4], *(pytest.param(opening, marks=pytest.mark.slow) for opening in SHOWN[4:])],
    ids=lambda opening: opening.text,
)
def test_typical_first_words_get_a_sensible_answer(llm: LLM, opening: Opening) -> None:
    assert fault_of(llm, opening) == ""


@pytest.mark.slow  # a hundred answers
def test_unseen_openings_get_sensible_answers(llm: LLM) -> None:
    faults = {opening.text: wrong for opening in HELD_OUT if (wrong := fault_of(llm, opening))}
    assert len(faults) <= 5, faults


@pytest.mark.parametrize(
    "beginning",
    [
        *("The code of", "Once upon a time", "Today I"),
        *(pytest.param(text, marks=pytest.mark.slow) for text in ("The", "Dear", "My name is")),
    ],
)
def test_raw_text_is_continued_in_words_and_ends(llm: LLM, beginning: str) -> None:
    answer = llm.generate(beginning, max_tokens=400)
    words = answer.text.lower().split()
    lines = re.split(r"(?<=\.)\s|\n", answer.text.strip())
    assert answer.finish_reason == "stop"
    assert len(words) >= 1
    assert not any(
        first == second == third
        for first, second, third in zip(words, words[1:], words[2:], strict=False)
    )
    assert len(set(lines)) == len(lines), "a sentence or line comes twice"


def test_only_bundled_ids_name_a_bundled_model() -> None:
    assert all(is_demo(name) for name in (*DEMO_IDS, ""))
    assert not is_demo("holdfast-demo-other")
    assert DEMO_IDS[0] == DEMO_ID
    assert all((demo_folder(name) / "config.json").is_file() for name in DEMO_IDS)
    with pytest.raises(ModelLoadError, match="is not a bundled model"):
        demo_folder("kelp")


def test_a_raw_list_of_notes_ends_by_itself(llm: LLM) -> None:
    assert llm.generate("Notes:", max_tokens=200).finish_reason == "stop"

"""Asks a model questions whose author has not seen its training data, and counts the right answers.

`python demo_model/ask_strangers.py [MODEL_FOLDER] [--wrong] [--only WORD]`

The questions are in `strangers/`: three kinds of notes with a question each, and questions that the
notes do not answer. Every note is asked about in four forms. The model is asked through Holdfast,
greedily. Do not train on these questions, and do not write training data with them in mind.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from holdfast import LLM

FOLDER = Path(__file__).parent / "strangers"
FORMS = ("system", "message", "among ten", "told before")
MOST_TOKENS = 128
SYSTEM_LEADS = ("Notes:", "You are a helpful assistant. These are the user's notes:", "My notes:")
MESSAGE_LEADS = ("Here are my notes:", "Notes:", "I wrote this down:")
ADMISSION = re.compile(
    r"no (such )?(note|information|answer|mention|record)|not (know|sure|say|said|mention|told|in "
    r"(the|your|my|any)|certain)"
    r"|n't (know|have|find|say|see|mention|tell|been told)|unknown|nothing (about|on|in)|none of "
    r"(the|your|my)"
    r"|unable to|not able|not understand|have no\b|not "
    r"(given|stated|noted|written|there)|can't|cannot",
    re.IGNORECASE,
)
NUMBER = re.compile(r"\d+(?:[.:/]\d+)*")

Message = dict[str, str]
Judge = Callable[[str], bool]


class Question(NamedTuple):
    """A conversation and the judge of its answer."""

    set_name: str
    form: str
    messages: list[Message]
    is_right: Judge
    wanted: str


def entries(name: str) -> list[Any]:
    found: list[Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return found


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def states(value: str, other_notes: list[str]) -> Judge:
    """Accept an answer with the value, but not inside a longer word or number, that does not copy
    the other notes.
    """
    end = r"(?![\d]|[.,:]\d)" if value[-1].isdigit() else ""
    pattern = re.compile(rf"(?<![\w]){re.escape(value.casefold())}{end}")

    def is_right(answer: str) -> bool:
        plain_numbers = re.sub(r"(?<=\d),(?=\d{3}\b)", "", answer)
        copied = any(note.rstrip(".") in answer for note in other_notes)
        return pattern.search(plain_numbers.casefold()) is not None and not copied

    return is_right


def admits(messages: list[Message]) -> Judge:
    """Accept an answer that admits not to know and invents no number."""
    given = set(NUMBER.findall(" ".join(message["content"] for message in messages)))
    return lambda answer: (
        bool(ADMISSION.search(answer)) and not (set(NUMBER.findall(answer)) - given)
    )


def reminder(note: str, index: int) -> str:
    """A note as told in a conversation."""
    if index % 2:
        return f"Please remember this: {note}"
    first, _, rest = note.partition(" ")
    is_lower = first in ("The", "A", "Our", "We", "My", "At", "Old", "Within")
    return f"Note that {first.lower() if is_lower else first} {rest}"


def conversation_of(
    form: str, note: str | None, question: str, *, notes: list[str], index: int
) -> list[Message]:
    """The question in this form, with other notes from different places of the set, and with the
    note at a place that depends on its index.
    """
    count = {"told before": 2, "among ten": 10}.get(form, 4)
    known = [notes[(index + 1 + 5 * step) % len(notes)] for step in range(count)]
    if note is not None:
        known.insert(index % (count + 1), note)
    if form == "told before":
        messages: list[Message] = []
        for place, told in enumerate(known):
            messages.append(said("user", reminder(told, index + place)))
            messages.append(said("assistant", "OK, I have noted that."))
        return [*messages, said("user", question)]
    leads = MESSAGE_LEADS if form == "message" else SYSTEM_LEADS
    listed = "\n".join([leads[index % len(leads)], *(f"- {note}" for note in known)])
    if form == "message":
        return [said("user", f"{listed}\n\n{question}")]
    return [said("system", listed), said("user", question)]


def about_notes() -> Iterator[Question]:
    """Questions in every form that notes answer, and those that no note answers."""
    everyday = [fact["note"] for fact in entries("everyday_notes")]
    for name in ("everyday_notes", "team_notes", "formal_notes", "no_note", "note_says_less"):
        facts = entries(name)
        is_answered = name.endswith("_notes")
        notes = [fact["note"] for fact in facts] if is_answered else everyday
        for index, fact in enumerate(facts):
            note = fact.get("note")
            for form in FORMS:
                talk = conversation_of(form, note, fact["question"], notes=notes, index=index)
                if is_answered:
                    judge = states(fact["value"], [other for other in notes if other != note])
                    yield Question(name, form, talk, judge, fact["value"])
                else:
                    yield Question(name, form, talk, admits(talk), "(not known)")


def shown(question: Question, answer: str) -> str:
    """A wrongly answered question, for the terminal."""
    asked = [message["content"] for message in question.messages if message["role"] == "user"]
    last = asked[-1].rsplit("\n\n", 1)[-1]
    head = f"[{question.set_name}, {question.form}] {last!r}"
    return f"{head}\n    wanted: {question.wanted}\n    answer: {answer!r}"


def table(asked: Counter[tuple[str, str]], right: Counter[tuple[str, str]]) -> str:
    """Percentages by set and form, with the number of questions."""
    lines = []
    for name in dict.fromkeys(name for name, _ in asked):
        keys = [key for key in asked if key[0] == name]
        cells = [f"{key[1]} {100 * right[key] / asked[key]:.0f} %" for key in keys]
        total = sum(asked[key] for key in keys)
        share = 100 * sum(right[key] for key in keys) / total
        lines.append(f"{name:15} {share:5.1f} % of {total:3}   ({', '.join(cells)})")
    return "\n".join(lines)


def kind_of_mistake(question: Question, answer: str) -> str:
    if admits(question.messages)(answer):
        return "refused"
    told = "\n".join(message["content"] for message in question.messages)
    return "another note" if answer.strip() in told else "something else"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a model folder; left out: the bundled model")
    parser.add_argument("--wrong", action="store_true", help="print the wrong answers")
    parser.add_argument("--only", default="", help="only sets whose name has this in it")
    arguments = parser.parse_args()
    asked, right, mistakes = Counter(), Counter(), Counter()
    with LLM(arguments.model, settings={"store.folder": "off"}) as llm:
        for question in about_notes():
            if arguments.only not in question.set_name:
                continue
            answer = llm.chat(question.messages, temperature=0, max_tokens=MOST_TOKENS).text.strip()
            asked[question.set_name, question.form] += 1
            if question.is_right(answer):
                right[question.set_name, question.form] += 1
                continue
            mistakes[question.set_name, kind_of_mistake(question, answer)] += 1
            if arguments.wrong:
                print(shown(question, answer), flush=True)
    kinds = [f"{name}: {kind} {n}" for (name, kind), n in sorted(mistakes.items())]
    print(table(asked, right), f"\nMistakes: {', '.join(kinds)}", sep="\n")


if __name__ == "__main__":
    main()

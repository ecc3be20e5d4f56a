"""Asks a model questions whose author has not seen its training data, and counts the right answers.

`python demo_model/ask_strangers.py [MODEL_FOLDER] [--wrong] [--only WORD]`

The questions are in `strangers/`: three kinds of notes with a question each, questions that the
notes do not answer, results of tools, sums, and small talk for a person to judge. Every note is
asked about in four forms. The model is asked through Holdfast, greedily. Do not train on these
questions, and do not write training data with them in mind.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast import LLM

FOLDER = Path(__file__).parent / "strangers"
NOTE_SETS = ("everyday_notes", "team_notes", "formal_notes")
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

Message = dict[str, Any]
Judge = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A conversation and the judge of its answer."""

    set_name: str
    form: str
    messages: list[Message]
    is_right: Judge
    wanted: str
    tools: list[dict[str, Any]] = field(default_factory=list)


def entries(name: str) -> list[Any]:
    """The entries of a set."""
    found: list[Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def holds(text: str, value: str) -> bool:
    """Whether a text contains a value, but not inside a longer word or number."""
    end = r"(?![\d]|[.,:]\d)" if value[-1].isdigit() else ""
    plain_numbers = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    return (
        re.search(rf"(?<![\w]){re.escape(value.casefold())}{end}", plain_numbers.casefold())
        is not None
    )


def states(value: str, other_notes: list[str]) -> Judge:
    """Accept an answer with the value that does not copy the other notes."""

    def is_right(answer: str) -> bool:
        copied = any(note.rstrip(".") in answer for note in other_notes)
        return holds(answer, value) and not copied

    return is_right


def admits(conversation: list[Message]) -> Judge:
    """Accept an answer that admits not to know and invents no number."""
    given = " ".join(message["content"] for message in conversation)

    def is_right(answer: str) -> bool:
        invented = set(NUMBER.findall(answer)) - set(NUMBER.findall(given))
        return ADMISSION.search(answer) is not None and not invented

    return is_right


def others(notes: list[str], index: int, count: int) -> list[str]:
    """Other notes from different places of a set."""
    return [notes[(index + 1 + 5 * step) % len(notes)] for step in range(count)]


def mixed(note: str | None, other_notes: list[str], index: int) -> list[str]:
    """Insert the note among the others, at a place that depends on its index."""
    if note is None:
        return other_notes
    place = index % (len(other_notes) + 1)
    return [*other_notes[:place], note, *other_notes[place:]]


def listed(lead: str, notes: list[str]) -> str:
    """Notes as a list below a line of introduction."""
    return "\n".join([lead, *(f"- {note}" for note in notes)])


def reminder(note: str, index: int) -> str:
    """A note as told in a conversation."""
    if index % 2:
        return f"Please remember this: {note}"
    first, _, rest = note.partition(" ")
    lowered = (
        first.lower() if first in ("The", "A", "Our", "We", "My", "At", "Old", "Within") else first
    )
    return f"Note that {lowered} {rest}"


def conversation_of(
    form: str, note: str | None, question: str, *, notes: list[str], index: int
) -> list[Message]:
    """The question in this form. notes: those of the whole set, from which the others are taken."""
    if form == "told before":
        messages: list[Message] = []
        for place, told in enumerate(mixed(note, others(notes, index, 2), index)):
            messages.append({"role": "user", "content": reminder(told, index + place)})
            messages.append({"role": "assistant", "content": "OK, I have noted that."})
        return [*messages, {"role": "user", "content": question}]
    known = mixed(note, others(notes, index, 10 if form == "among ten" else 4), index)
    if form == "message":
        lead = MESSAGE_LEADS[index % len(MESSAGE_LEADS)]
        return [{"role": "user", "content": f"{listed(lead, known)}\n\n{question}"}]
    lead = SYSTEM_LEADS[index % len(SYSTEM_LEADS)]
    return [
        {"role": "system", "content": listed(lead, known)},
        {"role": "user", "content": question},
    ]


def answered_by_notes() -> Iterator[Question]:
    """Questions about three sets of notes in every form."""
    for set_name in NOTE_SETS:
        facts = entries(set_name)
        notes = [fact["note"] for fact in facts]
        for index, fact in enumerate(facts):
            for form in FORMS:
                messages = conversation_of(
                    form, fact["note"], fact["question"], notes=notes, index=index
                )
                judge = states(fact["value"], [note for note in notes if note != fact["note"]])
                yield Question(
                    set_name=set_name,
                    form=form,
                    messages=messages,
                    is_right=judge,
                    wanted=fact["value"],
                )


def not_answered_by_notes() -> Iterator[Question]:
    """Questions that no note answers."""
    everyday = [fact["note"] for fact in entries("everyday_notes")]
    for set_name in ("no_note", "note_says_less"):
        for index, entry in enumerate(entries(set_name)):
            for form in FORMS:
                messages = conversation_of(
                    form, entry.get("note"), entry["question"], notes=everyday, index=index
                )
                yield Question(
                    set_name=set_name,
                    form=form,
                    messages=messages,
                    is_right=admits(messages),
                    wanted="(not known)",
                )


def tool_results() -> Iterator[Question]:
    """Conversations that end with a tool result."""
    for index, entry in enumerate(entries("tool_results")):
        for case in entry["cases"]:
            call = {
                "id": f"call_{index}",
                "type": "function",
                "function": {
                    "name": entry["tool"]["function"]["name"],
                    "arguments": json.dumps(case["arguments"]),
                },
            }
            messages: list[Message] = [
                {"role": "user", "content": case["question"]},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": case["result"]},
            ]
            yield Question(
                set_name="tool_results",
                form=case["format"],
                messages=messages,
                is_right=states(case["value"], []),
                wanted=case["value"],
                tools=[entry["tool"]],
            )


def sums() -> Iterator[Question]:
    """Sums; an honest "I cannot" is right, too."""
    for entry in entries("sums"):
        messages = [{"role": "user", "content": entry["question"]}]
        value, honest = states(entry["value"], []), admits(messages)

        def is_right(answer: str, value: Judge = value, honest: Judge = honest) -> bool:
            return value(answer) or honest(answer)

        yield Question(
            set_name="sums",
            form="alone",
            messages=messages,
            is_right=is_right,
            wanted=entry["value"],
        )


def answer_of(llm: LLM, messages: list[Message], tools: list[dict[str, Any]]) -> str:
    """The text of a greedy answer, with a note for each call."""
    options: dict[str, Any] = {"tools": tools} if tools else {}
    completion = llm.chat(messages, temperature=0, max_tokens=MOST_TOKENS, **options)
    calls = "".join(f" [calls {call.name}]" for call in completion.tool_calls)
    return completion.text.strip() + calls


def shown(question: Question, answer: str) -> str:
    """A wrongly answered question, for the terminal."""
    asked = [message["content"] for message in question.messages if message["role"] == "user"]
    last = asked[-1].rsplit("\n\n", 1)[-1]
    return (
        f"[{question.set_name}, {question.form}] {last!r}\n    wanted: {question.wanted}\n    "
        f"answer: {answer!r}"
    )


def table(asked: Counter[tuple[str, str]], right: Counter[tuple[str, str]]) -> str:
    """Percentages by set and form, with the number of questions."""
    lines = []
    for set_name in dict.fromkeys(name for name, _ in asked):
        forms = [form for name, form in asked if name == set_name]
        cells = [
            f"{form} {100 * right[set_name, form] / asked[set_name, form]:.0f} %" for form in forms
        ]
        total = sum(asked[set_name, form] for form in forms)
        share = 100 * sum(right[set_name, form] for form in forms) / total
        lines.append(f"{set_name:15} {share:5.1f} % of {total:3}   ({', '.join(cells)})")
    return "\n".join(lines)


def kind_of_mistake(question: Question, answer: str) -> str:
    """The kind of a wrong answer."""
    if admits(question.messages)(answer):
        return "refused"
    told = "\n".join(message["content"] for message in question.messages)
    return "another note" if answer.strip() in told else "something else"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a model folder; left out: the bundled model")
    parser.add_argument(
        "--wrong", action="store_true", help="print the questions that were answered wrongly"
    )
    parser.add_argument(
        "--only", default="", help="only sets whose name has this in it, such as notes or talk"
    )
    arguments = parser.parse_args()
    everything = [*answered_by_notes(), *not_answered_by_notes(), *tool_results(), *sums()]
    questions = [question for question in everything if arguments.only in question.set_name]
    asked: Counter[tuple[str, str]] = Counter()
    right: Counter[tuple[str, str]] = Counter()
    mistakes: Counter[tuple[str, str]] = Counter()
    with LLM(arguments.model, settings={"store.folder": "off"}) as llm:
        for question in questions:
            answer = answer_of(llm, question.messages, question.tools)
            asked[question.set_name, question.form] += 1
            if question.is_right(answer):
                right[question.set_name, question.form] += 1
                continue
            mistakes[question.set_name, kind_of_mistake(question, answer)] += 1
            if arguments.wrong:
                print(shown(question, answer), flush=True)
        if asked:
            print(table(asked, right))
            print(
                "\nMistakes:",
                ", ".join(
                    f"{name}: {kind} {count}" for (name, kind), count in sorted(mistakes.items())
                ),
            )
        if arguments.only in "small_talk":
            print("\nSmall talk, for a person to judge:")
            for line in entries("small_talk"):
                print(f"  {line!r:42} {answer_of(llm, [{'role': 'user', 'content': line}], [])!r}")


if __name__ == "__main__":
    main()

"""Holds a first conversation of forty turns with the bundled model, greedily, and judges each turn.

`python -m tools.demo_chat` prints docs/getting-started/demo-chat.md; `--turns` prints verdicts
instead. Exit code 1 if a turn breaks its rule.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from demo_model.judge import MOST_TOKENS, fault
from demo_model.openings import Opening
from holdfast import LLM

TURNS = (
    Opening("greeting", "hi"),
    Opening("who", "who are you?"),
    Opening("able", "what can you do"),
    Opening("wellbeing", "how are you?"),
    Opening("beyond", "what's the weather"),
    Opening("beyond", "write a poem"),
    Opening("help", "help"),
    Opening("exact", "My name is Nora.", "Noted: My name is Nora."),
    Opening("exact", "The code of the shed is 4711.", "Noted: The code of the shed is 4711."),
    Opening("exact", "Please note: The meeting is on Friday.", "Noted: The meeting is on Friday."),
    Opening("note", "what is the code of the shed?", "4711"),
    Opening("thanks", "thanks"),
    Opening("note", "What is my name?", "Nora"),
    Opening("note", "When is the meeting?", "Friday"),
    Opening("sum", "what is 2+3", "5"),
    Opening("sum", "47 + 38", "85"),
    Opening("count", "How many words are in this list: lamp, rope, kettle?", "3"),
    Opening("nod", "ok"),
    Opening("joke", "tell me a joke"),
    Opening("nod", "haha"),
    Opening("unknown", "who is the president of Brazil?"),
    Opening("unknown", "Translate 'good morning' into German."),
    Opening("exact", "Repeat exactly: the lamp is in the attic", "the lamp is in the attic"),
    Opening(
        "exact",
        "Replace Tom with Mia: Tom lives in Rome. The bag is red.",
        "Mia lives in Rome. The bag is red.",
    ),
    Opening("exact", "Write as JSON: name Nora, city Oslo", '{"name": "Nora", "city": "Oslo"}'),
    Opening("exact", "Count from 1 to 10.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
    Opening("who", "are you a robot?"),
    Opening("praise", "you are great"),
    Opening("unknown", "asdf"),
    Opening("unknown", "Wie ist das Wetter heute?"),
    Opening(
        "exact",
        "Please note: The code of the shed is 9024.",
        "Noted: The code of the shed is 9024.",
    ),
    Opening("note", "What is the code of the shed?", "9024"),
    Opening("insult", "you are stupid"),
    Opening("nod", "never mind"),
    Opening("check", "are you there?"),
    Opening("who", "what is holdfast?"),
    Opening("note", "do you know my name?", "Nora"),
    Opening("unknown", "Where does Ada live?"),
    Opening("thanks", "Thank you very much!"),
    Opening("goodbye", "bye"),
)
"""Messages, the class of the answer, and the text that it must contain, if that is certain."""

HEAD = """# Talk with the bundled model

This page shows forty turns of one conversation with `holdfast-demo`, without a system prompt and at temperature 0.
`make demo-chat` generates this page; a test checks every answer.

With this model of three million parameters, you can try the server without a download. The model knows only what you
tell it, and says so if it does not know an answer. Before sums and counts, it reasons between `<think>` marks.
[The model card](../../src/holdfast/models/bundled/holdfast-demo/README.md) lists measurements of its quality.
"""


@dataclass(frozen=True)
class Turn:
    """A turn with its answer and reasoning. fault: empty if the answer is right."""

    opening: Opening
    answer: str
    fault: str


def said_until(number: int) -> str:
    """Everything the user has said up to this turn, since answers may repeat it."""
    return "\n".join(opening.text for opening in TURNS[: number + 1])


def conversation(llm: LLM) -> Iterator[Turn]:
    """Hold the conversation with the model's own answers."""
    messages: list[dict[str, str]] = []
    for number, opening in enumerate(TURNS):
        messages.append({"role": "user", "content": opening.text})
        answer = llm.chat(messages, temperature=0, max_tokens=MOST_TOKENS + 1)
        messages.append({"role": "assistant", "content": answer.text})
        thought = f"<think>\n{answer.reasoning.strip()}\n</think>\n\n" if answer.reasoning else ""
        wrong = fault(
            opening.kind,
            said_until(number),
            answer.text,
            expected=opening.expected,
            tokens=answer.completion_tokens,
            ended=answer.finish_reason == "stop",
        )
        yield Turn(opening, thought + answer.text, wrong)


def as_document(turns: list[Turn]) -> str:
    """The transcript in Markdown."""
    parts = [HEAD]
    for number, turn in enumerate(turns, 1):
        parts.append(f"**{number}. You:** {turn.opening.text}\n\n```text\n{turn.answer}\n```\n")
    return "\n".join(parts)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="another model than the bundled one")
    parser.add_argument("--turns", action="store_true", help="show each turn with its verdict")
    arguments = parser.parse_args()
    with LLM(arguments.model) as llm:
        turns = list(conversation(llm))
    if arguments.turns:
        for turn in turns:
            print(
                f"{turn.opening.text!r}\n    {turn.answer!r} "
                f"{turn.fault and 'WRONG: ' + turn.fault}"
            )
    else:
        print(as_document(turns), end="")
    raise SystemExit(1 if any(turn.fault for turn in turns) else 0)


if __name__ == "__main__":
    main()

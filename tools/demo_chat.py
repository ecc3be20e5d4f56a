"""Holds a first conversation of forty turns with the bundled model, greedily, and judges each turn.

`python -m tools.demo_chat` prints docs/getting-started/demo-chat.md; `--turns` prints verdicts
instead. Exit code 1 if a turn breaks its rule.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from demo_model.judge import MOST_TOKENS, fault
from demo_model.openings import TURNS, Opening
from holdfast import LLM

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

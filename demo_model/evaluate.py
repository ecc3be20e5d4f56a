"""Ask a bundled model held-out questions, greedily, through mlx-lm in float32; prints a Markdown
table.

`python evaluate.py MODEL_FOLDER [--count 100] [--draft DRAFT_FOLDER] [--only notes]`; exits with 1
where a row is below its bar.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

with contextlib.suppress(OSError):  # a fast BLAS, where Debian's is there; before mlx is imported
    ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)

import agent_questions
import mlx.core as mx
from conversation import render
from mlx.utils import tree_map
from mlx_lm import batch_generate, load
from questions import Question
from questions import rows as first_rows

END = 2
MOST_TOKENS = 400


class Model:
    """A model folder, loaded as mlx-lm loads it, then widened to float32."""

    def __init__(self, folder: Path) -> None:
        self.network, self.tokenizer = load(str(folder))[:2]
        self.network.update(
            tree_map(lambda value: value.astype(mx.float32), self.network.parameters())
        )

    def prompt(self, question: Question) -> list[int]:
        """The prompt by the template of the folder, which must be the one of the training."""
        conversation = question.conversation
        switch = (
            {}
            if conversation.enable_thinking is None
            else {"enable_thinking": conversation.enable_thinking}
        )
        text = self.tokenizer.apply_chat_template(
            conversation.messages,
            tools=conversation.tools,
            tokenize=False,
            add_generation_prompt=True,
            **switch,
        )
        if text != render(conversation, add_generation_prompt=True):
            raise SystemExit("the template of the folder renders other text than the training saw")
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        """The greedy answers' tokens, without the end token; batches hold prompts of near lengths."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        chosen = [prompts[index] for index in order]
        response = batch_generate(
            self.network, self.tokenizer, chosen, max_tokens=MOST_TOKENS, return_token_ids=True
        )
        return [answer for _, answer in sorted(zip(order, response.token_ids, strict=True))]

    def agreement(self, prompt: list[int], answer: list[int]) -> int:
        """How many tokens of another model's answer (and its end) this model would have written in
        their places.
        """
        whole = [*answer, END]
        logits = self.network(mx.array([prompt + whole[:-1]]))
        guesses = mx.argmax(logits[0, len(prompt) - 1 :], axis=-1).tolist()
        return sum(guess == token for guess, token in zip(guesses, whole, strict=True))


def evaluate(model: Model, draft: Model | None, count: int, only: str, show: int) -> bool:
    """Print the table; whether all rows reach their bars."""
    print(
        f"| held-out questions ({count} each) | prompt tokens, mean | right | bar |"
        + (" draft agrees |" if draft else "")
    )
    print("|---|---|---|---|" + ("---|" if draft else ""))
    good = True
    for row in (*first_rows(), *agent_questions.rows()):
        if only not in row.name:
            continue
        rng = Random(f"held out: {row.name}")
        right = length = agreed = written = 0
        wrong: list[tuple[str, str]] = []
        questions = [row.make(rng) for _ in range(count)]
        prompts = [model.prompt(question) for question in questions]
        for question, prompt, answer in zip(
            questions, prompts, model.answers(prompts), strict=True
        ):
            text = model.tokenizer.decode(answer)
            length += len(prompt)
            if question.right(text):
                right += 1
            else:
                wrong.append(
                    (
                        question.conversation.messages[-1]["content"][-200:],
                        f"{text!r} instead of {question.expected!r}",
                    )
                )
            if draft:
                agreed += draft.agreement(prompt, answer)
                written += len(answer) + 1
        good &= row.bar is None or right >= row.bar * count
        cells: list[Any] = [
            row.name,
            round(length / count),
            f"{right / count:.1%}",
            "" if row.bar is None else f"{row.bar:.0%}",
        ]
        print(
            "| "
            + " | ".join(map(str, cells))
            + " |"
            + (f" {agreed / written:.1%} |" if draft else ""),
            flush=True,
        )
        for asked, told in wrong[:show]:
            print(f"    {asked!r}\n        {told}", file=sys.stderr, flush=True)
    return good


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--draft", type=Path, help="a draft model: how often it writes the same next token"
    )
    parser.add_argument("--only", default="", help="only the rows whose names hold this")
    parser.add_argument(
        "--show", type=int, default=0, help="show so many wrong answers of each row"
    )
    arguments = parser.parse_args()
    started = time.time()
    draft = Model(arguments.draft) if arguments.draft else None
    good = evaluate(Model(arguments.folder), draft, arguments.count, arguments.only, arguments.show)
    print(
        f"\n{time.time() - started:.0f} seconds; {'all bars reached' if good else 'BELOW THE BAR'}"
    )
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()

"""Ask a model the openings through Holdfast itself and judge its answers: `python ask_openings.py
MODEL_FOLDER`.

Greedily, or with `--temperature 1` once for each of `--seeds`. Needs Holdfast's own environment;
exits with 1 below 95 of 100 or 9 of 9.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from judge import MOST_TOKENS, fault
from openings import HELD_OUT, SHOWN, Opening

from holdfast import LLM

BAR = 95


def judged(
    llm: LLM, openings: tuple[Opening, ...], temperature: float, seed: int
) -> list[tuple[Opening, str, str]]:
    """Each opening with its answer and what is wrong with it."""
    found = []
    for opening in openings:
        answer = llm.chat(
            [{"role": "user", "content": opening.text}],
            temperature=temperature,
            seed=seed,
            max_tokens=MOST_TOKENS + 1,
        )
        reason = fault(
            opening.kind,
            opening.text,
            answer.text,
            expected=opening.expected,
            tokens=answer.completion_tokens,
            ended=answer.finish_reason == "stop",
        )
        found.append((opening, answer.text, reason))
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--counts", action="store_true", help="no texts, only how many of each class are wrong"
    )
    arguments = parser.parse_args()
    good = True
    with LLM(str(arguments.folder)) as llm:
        for seed in arguments.seeds:
            for name, openings in (("shown", SHOWN), ("held out", HELD_OUT)):
                found = judged(llm, openings, arguments.temperature, seed)
                right = sum(not reason for _, _, reason in found)
                print(
                    f"{name}, temperature {arguments.temperature}, seed {seed}: {right} of "
                    f"{len(openings)}"
                )
                good &= right >= (BAR if openings is HELD_OUT else len(openings))
                wrong = Counter(opening.kind for opening, _, reason in found if reason)
                asked = Counter(opening.kind for opening, _, _ in found)
                print(
                    "   ",
                    ", ".join(
                        f"{kind} {asked[kind] - wrong[kind]}/{asked[kind]}" for kind in asked
                    ),
                )
                for opening, answer, reason in [] if arguments.counts else found:
                    print(
                        f"{'ok   ' if not reason else 'WRONG'} {opening.text[:60]!r}\n      "
                        f"{answer!r} {reason}"
                    )
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()

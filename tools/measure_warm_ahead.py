"""What reading ahead gains a next turn, and what it costs who comes meanwhile: the same
conversations with and without it.

    python -m tools.measure_warm_ahead [--turns 5] [--thought 500] [--answer 200]

The model is scripted: it thinks so many tokens before each answer, and its chat template leaves out
the thoughts of earlier
turns. Each setting has a server of its own, without a store. Then the bundled model reads ahead,
and others come at random
instants: how much longer they wait than at rest, and how long its steps are.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from holdfast import LLM
from holdfast.library.in_process import BlockingEventStream
from holdfast.wire.commands import ReadAhead, SequenceRequest
from holdfast.wire.events import TokensGenerated
from holdfast.wire.requests import SamplingParams, TokenIds
from tests.fakes.server_process import ServerProcess
from tests.fakes.thinking_model import write_thinking

CHAT = "/v1/chat/completions"
PAUSE_SECONDS = 1.5  # of a person who reads the answer


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--thought", type=int, default=500)
    parser.add_argument("--answer", type=int, default=200)
    parser.add_argument("--arrivals", type=int, default=30)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_thinking(
            Path(folder),
            turns=given.turns,
            thought_tokens=given.thought,
            answer_tokens=given.answer,
        )
        said = {
            choice: conversation(model, choice, turns=given.turns) for choice in ("off", "auto")
        }
    same = [turn["said"] for turn in said["off"]] == [turn["said"] for turn in said["auto"]]
    for choice, turns in said.items():
        later = turns[1:]
        for name in ("read_tokens", "read_ahead_tokens", "first_ms"):
            print(f"warm_ahead={choice:5} {name:18}", *(f"{turn[name]:8.1f}" for turn in later))
    read = {
        choice: sum(turn["read_tokens"] for turn in turns[1:]) for choice, turns in said.items()
    }
    first = {
        choice: statistics.median(turn["first_ms"] for turn in turns[1:])
        for choice, turns in said.items()
    }
    print(f"completion tokens of each turn: {[turn['completion_tokens'] for turn in said['off']]}")
    print(
        f"tokens read at the next turns: {read['off']} without, {read['auto']} with: "
        f"{read['auto'] / read['off'] - 1:+.1%}"
    )
    print(f"first token, median: {first['off']:.1f} ms without, {first['auto']:.1f} ms with")
    print(f"answers are {'the same' if same else 'DIFFERENT'}")
    show_waits(given.arrivals)
    return 0 if same else 1


def conversation(model: Path, choice: str, *, turns: int) -> list[dict[str, Any]]:
    """The figures of each turn."""
    server = ServerProcess(
        str(model), "--name", "scripted", "--store", "off", "--set", f"model.warm_ahead={choice}"
    )
    try:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=120) as client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "Where is it? " * 20}]
            figures = []
            for turn in range(turns):
                figures.append(ask(client, messages))
                messages += [
                    {"role": "assistant", "content": figures[-1]["said"]},
                    {"role": "user", "content": f"And what is number {turn}?"},
                ]
                time.sleep(PAUSE_SECONDS)
            return figures
    finally:
        server.stop()


def show_waits(arrivals: int) -> None:
    """First tokens of short requests, at rest and while something long is read ahead."""
    choose = random.Random(5)
    with LLM() as llm:
        client, vocab_size = llm._client, llm.info.vocab_size

        def submit(name: str, tokens: int, **more: Any) -> BlockingEventStream:
            prompt = TokenIds.of(choose.randrange(vocab_size) for _ in range(tokens))
            sampling = SamplingParams(temperature=0.0, seed=0)
            return client.submit(
                SequenceRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, **more)
            )

        def first_ms(name: str) -> float:
            began = time.perf_counter()
            stream = submit(name, 100, max_tokens=1)
            next(event for event in stream if isinstance(event, TokensGenerated))
            taken = time.perf_counter() - began
            stream.close()
            return 1000 * taken

        for number in range(5):
            first_ms(f"before{number}")
        rest, met, steps = [], [], []
        for number in range(arrivals):
            rest.append(first_ms(f"rest{number}"))
            before = llm.statistics().step_seconds
            ahead = submit(
                f"ahead{number}", 3000, max_tokens=0, read_ahead=ReadAhead(known_tokens=0)
            )
            time.sleep(choose.uniform(0.1, 0.4))
            after = llm.statistics().step_seconds
            if (
                before is not None
                and after is not None
                and (count := sum(after.counts) - sum(before.counts))
            ):
                steps.append(1000 * (after.total - before.total) / count)
            met.append(first_ms(f"met{number}"))
            ahead.close()
    quiet = statistics.median(rest)
    extra = sorted(each - quiet for each in met)
    print(
        f"first token at rest, median: {quiet:.1f} ms; while something is read ahead: "
        f"{statistics.median(met):.1f} ms"
    )
    print(f"so {statistics.median(extra):.1f} ms more, at most {extra[-1]:.1f}")
    print(
        f"a step of what is read ahead: {statistics.mean(steps):.1f} ms, of the slowest read "
        f"{max(steps):.1f}"
    )


def ask(client: httpx.Client, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One turn."""
    body = {
        "model": "scripted",
        "messages": messages,
        "temperature": 0,
        "holdfast": {"explain": True},
    }
    answer = client.post(CHAT, json=body).raise_for_status().json()
    explained = answer["holdfast"]
    return {
        "said": answer["choices"][0]["message"]["content"],
        "completion_tokens": answer["usage"]["completion_tokens"],
        "read_tokens": explained["read_tokens"],
        "read_ahead_tokens": explained.get("read_ahead_tokens", 0),
        "first_ms": 1000 * (explained["seconds"]["queue"] + explained["seconds"]["prefill"]),
    }


if __name__ == "__main__":
    sys.exit(main())

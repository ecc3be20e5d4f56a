"""Kills the worker of a server at random instants while streams run, and compares every answer with
an undisturbed one.

python -m tools.chaos --kills 25 --kind sigkill --kind sigstop --seed 3

python -m tools.chaos --model qwen3_next --kills 20 (a tiny random model, by architecture)

python -m tools.chaos --streams kinds --kills 20 (tool call, grammar, reasoning, stop strings)

Exit code 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from tests.fakes.server_process import ServerProcess, until
from tests.fakes.told_streams import OF_EVERY_KIND, Asked, answer_to, completion

KINDS = ("sigkill", "sigsegv", "sigabrt", "sigstop")
STREAMS = 8
# each kill happens within this time after a new token
SPAN_SECONDS = 2.0
PLAIN_TOKENS = 256  # ordinary tokens of the tiny models

_pause = threading.Event()  # never set


@dataclass(slots=True)
class Reader:
    """Sends the same request repeatedly and counts events."""

    url: str
    asked: Asked
    expected: str
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    events: int = 0

    def run(self, is_over: threading.Event) -> None:
        """Send requests until `is_over`; the last answer is read to its end."""
        while not is_over.is_set():
            try:
                answer = answer_to(self.url, self.asked, on_event=self._note)
            except Exception as error:  # any error that a client sees counts
                answer = f"{type(error).__name__}: {error}"
            self.answers += 1
            if answer != self.expected:
                self.wrong.append(answer)

    def _note(self) -> None:
        self.events += 1


def streams_of(kind: str, rng: random.Random) -> tuple[Asked, ...]:
    """The concurrent requests."""
    if kind == "kinds":
        return OF_EVERY_KIND
    common = [rng.randrange(PLAIN_TOKENS) for _ in range(150)]
    asked = []
    for index in range(STREAMS):
        prompt = (common if index % 4 else []) + [
            rng.randrange(PLAIN_TOKENS) for _ in range(rng.randint(20, 300))
        ]
        options = {"temperature": 0.8, "top_p": 0.95, "seed": index} if index % 2 else {}
        asked.append(
            completion(
                f"{'seeded' if index % 2 else 'greedy'} {index}", prompt, max_tokens=400, **options
            )
        )
    return tuple(asked)


def model_arguments(model: str, folder: Path) -> list[str]:
    """The server's model argument: none for the bundled model, a folder, or a tiny random model."""
    if model == "bundled":
        return []
    if Path(model).is_dir():
        return [model]
    from tests.fakes.tiny_models import write_tiny  # needs MLX

    return [str(write_tiny(folder / "model", model))]


def wait_for_next(server: ServerProcess, old: int) -> int:
    """Wait for the next worker; returns its process id."""
    served: list[int] = []

    def is_served() -> bool:
        model = server.model()
        if model["state"] == "ready" and model["pid"] not in (None, old):
            served.append(model["pid"])
        return bool(served)

    until(is_served, "the next worker serves")
    return served[0]


def kill_again_and_again(
    server: ServerProcess, readers: Sequence[Reader], kinds: Sequence[str], rng: random.Random
) -> None:
    """Kill the worker once per entry of `kinds`, at random instants after a new token."""
    pid = int(server.model()["pid"])
    for kind in kinds:
        before = sum(reader.events for reader in readers)
        until(
            lambda before=before: sum(reader.events for reader in readers) > before, "a new token"
        )  # type: ignore[misc]
        _pause.wait(rng.uniform(0.0, SPAN_SECONDS))
        psutil.Process(pid).send_signal(getattr(signal, kind.upper()))
        pid = wait_for_next(server, pid)


def report(readers: Sequence[Reader]) -> bool:
    """Print the results; returns whether every answer was right."""
    for reader in readers:
        print(
            f"  {reader.asked.name:16} {reader.answers:4} answers, {len(reader.wrong)} not as "
            "undisturbed"
        )
        for wrong in reader.wrong[:2]:
            print(f"    expected {reader.expected[:300]}\n    got      {wrong[:300]}")
    is_true = not any(reader.wrong for reader in readers)
    print(f"every answer as undisturbed: {is_true}")
    return is_true


def run_chaos(
    *, model: str, streams: str, kinds: Sequence[str], seed: int, arguments: Sequence[str] = ()
) -> bool:
    """Kill the workers of one server. Returns whether every answer was right."""
    rng = random.Random(seed)
    asked = streams_of(streams, rng)
    with tempfile.TemporaryDirectory() as folder:
        store = ("--store", f"{folder}/store")
        server = ServerProcess(
            *model_arguments(model, Path(folder)), "--name", "demo", *store, *arguments
        )
        try:
            server.wait_ready()
            with ThreadPoolExecutor(len(asked)) as threads:
                expected = list(threads.map(partial(answer_to, server.url), asked))
                readers = [
                    Reader(server.url, each, answer)
                    for each, answer in zip(asked, expected, strict=True)
                ]
                is_over = threading.Event()
                running = [threads.submit(reader.run, is_over) for reader in readers]
                try:
                    kill_again_and_again(server, readers, kinds, rng)
                finally:
                    is_over.set()
                for each in running:
                    each.result()
            is_true = report(readers)
        finally:
            server.stop()
    if not is_true:
        print(server.log()[-4000:])
    return is_true


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--kind",
        action="append",
        choices=KINDS,
        help="of deaths; several are taken in turn; default: all",
    )
    parser.add_argument(
        "--model",
        default="bundled",
        help="bundled, a folder, or the name of a tiny architecture of the tests",
    )
    parser.add_argument("--streams", choices=("plain", "kinds"), default="plain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("arguments", nargs="*", help="for the server, behind --")
    given = parser.parse_args(argv)
    kinds = given.kind or KINDS
    is_true = run_chaos(
        model=given.model,
        streams=given.streams,
        kinds=[kinds[index % len(kinds)] for index in range(given.kills)],
        seed=given.seed,
        arguments=given.arguments,
    )
    return 0 if is_true else 1


if __name__ == "__main__":
    sys.exit(main())

"""Takes the documentation's pictures of the page: `python -m tools.page_pictures docs/pictures`.

A real server serves a model with scripted answers, so that the pictures are alike each time.
Before, some agents use the server, and its history is filled with invented answers of the last
hour. Needs Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Page

from holdfast.front.telemetry.history import Cell, PerformanceHistory
from holdfast.front.telemetry.history_file import write_history
from tests.fakes.browser import Visitor, running_browser, visiting
from tests.fakes.scripted_model import write_scripted
from tests.fakes.server_process import ServerProcess, running_server, unused_port

ROOT = Path(__file__).resolve().parents[1]
NAME = "harbour-8b"
QUESTION = "When does the ferry leave on Monday, and how do I find its pier in the timetable file?"
ANSWER = """<think>
The user wants to know two things: the time on Monday, and how to read the pier from the timetable. I \
answer with a table and a few lines of Python.
</think>

The first ferry leaves at **7:15**. On Mondays there are three:

| departure | pier | arrives |
|---|---|---|
| 7:15 | 3 | 8:05 |
| 12:00 | 3 | 12:50 |
| 18:30 | 1 | 19:20 |

To find the pier in the file:

```python
import csv

with open("timetable.csv") as file:
    piers = {row["departure"]: row["pier"] for row in csv.DictReader(file)}
print(piers["7:15"])
```

The file is written anew each **Sunday night**, so look again after that.
"""
LONG = " ".join(f"step{number}" for number in range(3000))
WIDTH = 1280  # pixels
STORE_NAME = "~/.cache/holdfast/store"
_ANSWERED_TOKENS = 24  # of the agents' answers, which are not shown


def agent_prompt(agent: str, day: str) -> str:
    """A system prompt of several thousand tokens, the same for all agents except its last lines."""
    common = (ROOT / "CONTRIBUTING.md").read_text()
    return f"You are a coding agent.\n\n{common}\nToday is {day}.\nYour name is {agent}.\n"


def write_made_up_history(state: Path, *, port: int) -> None:
    """Write answers of the last hour for the next server."""
    now = [time.time() - 3600]
    history = PerformanceHistory(clock=lambda: now[0])
    for number in range(700):
        now[0] += 5
        wave = 1 + 0.4 * math.sin(number / 60) + 0.3 * math.sin(number * 1.7)
        cell = Cell(answers=1, prompt_tokens=9000, cached_tokens=8300, generated_tokens=300)
        for phase, seconds in (("queue", 0.02), ("lookup", 0.001), ("restore", 0.01)):
            cell.add_duration(phase, seconds * wave)
        cell.add_duration("prefill", 0.5 * wave)
        cell.add_duration("first_token", 0.6 * wave)
        cell.add_duration("gap", 0.02 * wave)
        cell.speed.add(50 / wave)
        history.add(NAME, cell)
    file = state / "holdfast" / "performance" / f"server-{port}.history"
    file.parent.mkdir(parents=True)
    write_history(file, history.serialize())


class Stage:
    """A server with some traffic."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.client = httpx.Client(base_url=server.url, timeout=300)

    def ask(self, session: str, messages: Sequence[dict[str, str]], *, tokens: int) -> str:
        """Send one turn of a session; returns the answer."""
        body = {"messages": list(messages), "max_tokens": tokens, "temperature": 0}
        headers = {"X-Session-ID": session, "User-Agent": session}
        answer = self.client.post("/v1/chat/completions", json=body, headers=headers)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])

    def play(self, session: str, system: str, questions: Sequence[str]) -> None:
        """Hold a conversation."""
        messages = [{"role": "system", "content": system}]
        for question in questions:
            messages.append({"role": "user", "content": question})
            said = self.ask(session, messages, tokens=_ANSWERED_TOKENS)
            messages.append({"role": "assistant", "content": said})

    def prepare(self) -> None:
        """Let agents with a common prefix use the server."""
        source = (ROOT / "src/holdfast/worker/prefix/tree.py").read_text()
        texts = [source[place : place + 1200] for place in range(0, len(source), 1200)]
        monday = agent_prompt("planner", "Monday")
        self.play("planner", monday, ["Plan the change.", texts[2] + texts[3], "Go on."])
        for number in range(3):
            own = ["".join(texts[4 + 2 * number : 6 + number]), "Write a test for it."]
            self.play(f"coder-{number + 1}", monday, [texts[4], *own, *texts[number : 2 * number]])
        self.play("reviewer", agent_prompt("reviewer", "Monday"), [texts[-2], texts[2] + texts[7]])
        self.play("planner", agent_prompt("planner", "Tuesday"), ["Plan the change."])
        for day in ("Monday", "Tuesday"):  # at the start of the prompt, so that it misses the cache
            self.play("tester", f"Today is {day}.\n{monday}", ["Test the change."])
        model = {"params": {"model": NAME}}
        self.client.patch("/v1/sessions/planner", json={"pinned": True}, **model)
        metadata = {"metadata": {"name": "Review of the prefix tree"}}
        self.client.patch("/v1/sessions/reviewer", json=metadata, **model)

    @contextlib.contextmanager
    def busy(self, requests: int) -> Iterator[None]:
        """Keep this many long answers running."""
        ended = threading.Event()
        threads = [
            threading.Thread(target=self._generate, args=(f"coder-{number + 1}", ended))
            for number in range(requests)
        ]
        threads.append(threading.Thread(target=self._ask_often, args=(ended,)))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()

    def _ask_often(self, ended: threading.Event) -> None:
        """Send short questions, so that some steps prefill."""
        number = 0
        while not ended.wait(0.05):
            number += 1
            messages = [{"role": "user", "content": f"Question {number}: {LONG[:400]}?"}]
            self.ask("asker", messages, tokens=8)

    def _generate(self, session: str, ended: threading.Event) -> None:
        messages = [
            {"role": "system", "content": agent_prompt("planner", "Monday")},
            {"role": "user", "content": f"Carry out the plan of {session}."},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Now."},
        ]
        body: dict[str, Any] = {"messages": messages, "stream": True, "model": NAME}
        headers = {"X-Session-ID": session}
        with self.client.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as answer:
            for _ in answer.iter_lines():
                if ended.is_set():
                    return


def take(page: Page, path: Path) -> None:
    """Write a screenshot without cursors and moving parts."""
    page.evaluate("document.activeElement?.blur()")
    page.mouse.move(0, 0)
    page.screenshot(path=path, animations="disabled", caret="hide")


def show_chat(visitor: Visitor, stage: Stage) -> None:
    """Have a question answered."""
    visitor.ask(QUESTION)
    visitor.until_answered()
    visitor.page.evaluate("scrollTo(0, 0)")


def show_memory(visitor: Visitor, stage: Stage) -> None:
    """Show the cache, with a fixed name instead of the temporary store folder."""
    page = visitor.view("Memory")
    page.get_by_role("tree").wait_for()
    page.get_by_text("blocks with").wait_for()
    page.evaluate(
        "(name) => { document.querySelector('main p code').textContent = name; }", STORE_NAME
    )


def show_now(visitor: Visitor, stage: Stage) -> None:
    """Show running requests."""
    page = visitor.view("Now")
    page.get_by_text("writing").first.wait_for()
    page.get_by_role("region", name=f"Steps of {NAME}").wait_for()
    page.wait_for_timeout(4000)  # some history for the plot


def show_performance(visitor: Visitor, stage: Stage) -> None:
    """Show the performance of the answers."""
    page = visitor.view("Performance")
    page.locator("line-plot canvas").first.wait_for()


# name, preparation, height in pixels, dark mode
PICTURES: tuple[tuple[str, Callable[[Visitor, Stage], None], int, bool], ...] = (
    ("page-memory", show_memory, 1180, False),
    ("page-chat", show_chat, 940, False),
    ("page-now", show_now, 880, True),
    ("page-performance", show_performance, 1200, False),
)


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    os.environ["HOLDFAST_KERNELS"] = "0"  # with kernels, answers end too early for the pictures
    with tempfile.TemporaryDirectory() as scratch, running_browser() as browser:
        os.environ["XDG_STATE_HOME"] = scratch
        port = unused_port()
        write_made_up_history(Path(scratch), port=port)
        model = write_scripted(Path(scratch) / NAME, (ANSWER, LONG))
        options = ("--name", NAME, "--store", f"{scratch}/store", "--speculation", "off")
        with running_server(str(model), *options, port=port) as server:
            stage = Stage(server)
            stage.prepare()
            for name, show, height, is_dark in PICTURES:
                is_busy = stage.busy(4) if show is show_now else contextlib.nullcontext()
                window = visiting(browser, server.url, width=WIDTH, height=height, is_dark=is_dark)
                with is_busy, window as visitor:
                    visitor.open()
                    show(visitor, stage)
                    take(visitor.page, folder / f"{name}.png")


if __name__ == "__main__":
    main()

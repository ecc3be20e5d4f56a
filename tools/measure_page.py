"""Measures the page with much to show: `python -m tools.measure_page`.

A server has 10,000 cached blocks, 50 sessions and 100 requests under way, and the browser a
conversation of 100,000 tokens. For each view: the time until it is shown, and the longest task of
the browser's main thread. Then the front's processor time, without a page and with three of them.
Needs Chromium.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from playwright.sync_api import Browser, Page

from tests.fakes.browser import running_browser, visiting
from tests.fakes.page_script import LONG
from tests.fakes.scripted_model import write_scripted
from tests.fakes.server_process import ServerProcess, running_server

MODEL = "scripted"
SESSIONS = 50
BLOCKS = 10_000
REQUESTS = 100
CONVERSATION_TOKENS = 100_000
_TOKENS_PER_WORD = 2.5  # of the text below, by this model's tokenizer
_TURNS = 120
_PROMPTS_AT_ONCE = 25
_WATCH_SECONDS = 20.0
# when the view is there, with something that only its data can show
SHOWN = {
    "Chat": "document.querySelectorAll('markdown-text').length > 2",
    "Now": f"document.querySelectorAll('tbody tr').length >= {REQUESTS}",
    "Memory": "document.querySelectorAll('[role=treeitem]').length > 50",
    "Models": "document.querySelector('main .card')",
    "Connect": "document.querySelector('main .card')",
}
PATHS = {"Chat": "/", **{view: f"/page/{view.lower()}" for view in SHOWN if view != "Chat"}}
# records long tasks, and when a condition becomes true
_OBSERVER = """
window.tasks = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) tasks.push(Math.round(entry.duration));
}).observe({ type: 'longtask', buffered: true });
window.shownAt = null;
const look = () => {
  if (CONDITION) window.shownAt = performance.now();
  else requestAnimationFrame(look);
};
addEventListener('DOMContentLoaded', look);
"""


def fill(server: ServerProcess) -> None:
    """Send prompts until the cache has enough blocks: 50 agents, whose conversations fork."""

    def play(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=600) as client:
            head = f"You are agent {number} of a large crew, which counts boats. " * 20
            chain = head
            for start in range(0, BLOCKS // SESSIONS, _PROMPTS_AT_ONCE):
                prompts = []
                for turn in range(start, start + _PROMPTS_AT_ONCE):
                    prompts.append(f"{chain} Turn {turn}: {number} boats, {turn * 7} birds.")
                    if turn % 5 == 0:
                        chain = prompts[-1]
                body = {"model": MODEL, "prompt": prompts, "max_tokens": 1}
                headers = {"X-Session-ID": f"agent-{number}"}
                client.post("/v1/completions", json=body, headers=headers).raise_for_status()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(play, range(SESSIONS)))


@contextmanager
def requests_under_way(server: ServerProcess) -> Iterator[None]:
    """Have requests run, and others wait, until the end."""
    clients = [httpx.Client(base_url=server.url, timeout=600) for _ in range(REQUESTS)]

    def ask(client: httpx.Client) -> None:
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Say many words."}],
            "max_tokens": 60_000,
            "ignore_eos": True,
        }
        try:
            client.post("/v1/chat/completions", json=body)
        except httpx.HTTPError:
            return  # the client is closed at the end

    threads = [threading.Thread(target=ask, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    try:
        while len(_listed(server)) < REQUESTS:
            time.sleep(0.2)
        yield
    finally:
        for request in _listed(server):
            httpx.delete(f"{server.url}/admin/requests/{request['id']}")
        for thread in threads:
            thread.join()


def _listed(server: ServerProcess) -> list[dict[str, Any]]:
    listed = httpx.get(f"{server.url}/admin/requests", timeout=60).json()["requests"]
    return [request for request in listed if request["model"]]


def conversation() -> dict[str, Any]:
    """A long conversation, as the page stores it."""
    words = int(CONVERSATION_TOKENS / _TURNS / _TOKENS_PER_WORD)
    code = "```python\nfor boat in boats:\n    count(boat)\n```"
    turns: list[dict[str, Any]] = []
    for place in range(_TURNS):
        parent = turns[-1]["id"] if turns else None
        base = {"id": f"t{place}", "conversation": "long", "parent": parent, "created": place}
        chosen = f"t{place + 1}" if place < _TURNS - 1 else None
        if place % 2 == 0:
            turns.append({**base, "role": "user", "chosen": chosen, "text": f"Question {place}?"})
            continue
        sentences = [f"In **line {line}** of {place}, see `boat_{line}`:" for line in range(9)]
        filler = " ".join(f"word{number}" for number in range(2 * words // 9))
        text = "\n\n".join(f"{each} {filler}\n\n- one\n- two\n\n{code}" for each in sentences)
        answer = {
            "model": MODEL, "status": "completed", "responseId": "", "seen": 9, "error": "",
            "items": [{"type": "message", "content": [{"type": "output_text", "text": text}]}],
            "began": 0, "firstAt": 1, "lastAt": 2, "isRejoined": False, "usage": None, "cache": None,
        }  # fmt: skip
        turns.append({**base, "role": "assistant", "chosen": chosen, "answer": answer})
    return {
        "conversation": {
            "id": "long",
            "title": "A long conversation",
            "changed": 1,
            "chosen": "t0",
            "settings": {
                "model": MODEL,
                "instructions": "",
                "temperature": None,
                "maxTokens": None,
            },
        },
        "turns": turns,
    }


_STORE = """async ({ conversation, turns }) => {
  const stored = await import('/page/files/conversations.js');
  await stored.change(conversation.id, () => ({ conversation, changed: turns }));
}"""


def tokens_of(server: ServerProcess, text: str) -> int:
    """The number of tokens of a text for the model."""
    answer = httpx.post(f"{server.url}/tokenize", json={"model": MODEL, "prompt": text}, timeout=60)
    return int(answer.json()["count"])


def measure_views(browser: Browser, server: ServerProcess) -> list[dict[str, Any]]:
    """Open each view in a new page, scroll through it, and report times in milliseconds."""
    found = []
    whole = conversation()
    text = "".join(
        turn["answer"]["items"][0]["content"][0]["text"] for turn in whole["turns"][1::2]
    )
    print(f"conversation: {tokens_of(server, text):,} tokens, {len(text):,} characters")
    for view, condition in SHOWN.items():
        with visiting(browser, server.url) as visitor:
            page = visitor.open("/page/connect")
            page.evaluate(_STORE, whole)
            page.add_init_script(_OBSERVER.replace("CONDITION", condition))
            query = "?conversation=long" if view == "Chat" else ""
            page.goto(f"{server.url}{PATHS[view]}{query}")
            page.wait_for_function("() => window.shownAt !== null")
            shown = page.evaluate("window.shownAt")
            page.wait_for_timeout(3000)
            _scroll_through(page)
            tasks = page.evaluate("tasks")
            found.append(
                {
                    "view": view,
                    "shown_ms": round(shown),
                    "longest_task_ms": max(tasks, default=0),
                    "tasks_over_50_ms": len(tasks),
                }
            )
            print(json.dumps(found[-1]))
    return found


def _scroll_through(page: Page) -> None:
    for _ in range(15):
        page.mouse.wheel(0, 3000)
        page.wait_for_timeout(100)


def cache_of(server: ServerProcess) -> dict[str, Any]:
    """What the cache of the only model contains."""
    (found,) = httpx.get(f"{server.url}/admin/cache", timeout=60).json()["models"]
    return dict(found)


def front_share(process: psutil.Process, seconds: float = _WATCH_SECONDS) -> float:
    """The front's processor time in percent of a core."""
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return 100 * (sum(process.cpu_times()[:2]) - before) / seconds


def measure_front(browser: Browser, server: ServerProcess) -> dict[str, float]:
    """The front's processor time without pages, with three of them, and after they were closed."""
    process = psutil.Process(server.process.pid)
    shares = {"no page": front_share(process)}
    with ExitStack() as pages:
        for path in ("/page/now", "/page/memory", "/page/models"):
            visitor = pages.enter_context(visiting(browser, server.url))
            visitor.open(path)
        time.sleep(3)
        # each page in a window of its own, as if all were visible
        shares["three pages"] = front_share(process)
    time.sleep(3)
    shares["closed again"] = front_share(process)
    return {name: round(share, 2) for name, share in shares.items()}


def _timed(what: str, work: Callable[[], None]) -> None:
    began = time.perf_counter()
    work()
    print(f"{what}: {time.perf_counter() - began:.1f} s")


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--keep", metavar="FOLDER", help="keep model and store here, to begin sooner"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, running_browser() as browser:
        scratch = arguments.keep or temporary
        model = Path(scratch) / "model"
        if not model.exists():
            write_scripted(model, (LONG,))
        options = ("--name", MODEL, "--store", f"{scratch}/store", "--speculation", "off")
        queue = ("--set", "scheduler.max_queued=500", "--set", "store.ram_bytes=32MiB")
        with running_server(str(model), *options, *queue) as server:
            if cache_of(server)["blocks"] < BLOCKS:
                _timed("filled", lambda: fill(server))
            cached = cache_of(server)
            print(f"blocks: {cached['blocks']:,}, parts shown: {len(cached['parts'])}")
            with requests_under_way(server):
                measure_views(browser, server)
                print("front, with requests:", measure_front(browser, server))
            time.sleep(5)
            print("front, without requests:", measure_front(browser, server))


if __name__ == "__main__":
    main()

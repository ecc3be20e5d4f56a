"""Traces what tools/house.py counts: chat requests, blocks, images and drafts in a real server."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import httpx

from tests.fakes.images import data_url, png
from tests.fakes.server_process import ServerProcess
from tests.fakes.vision_models import write_vision_model

ROOT = Path(__file__).resolve().parents[1]


class Call(NamedTuple):
    """A function, the classes of the objects that it handled, and how often it was called so."""

    side: str  # front or worker
    function: str
    handled: frozenset[str]
    times: int


Run = list[Call]
# the layout is set, since which one is fastest depends on the machine's other load
MODELS = """
[models.plain]
id = "holdfast-demo"
layout = "rows"
speculation = "off"
[models.drafting]
id = "holdfast-demo"
layout = "rows"
[models.seeing]
path = "{folder}/seeing"
layout = "rows"
speculation = "off"
"""


class Server:
    """A server whose processes record their calls; see tools/house_hook.py."""

    def __init__(self, folder: Path) -> None:
        """folder: for its models and its store. Returns when it is ready."""
        shutil.copy(Path(__file__).with_name("house_hook.py"), folder / "sitecustomize.py")
        write_vision_model(folder / "seeing", "qwen2_5_vl")
        (folder / "models.toml").write_text(MODELS.format(folder=folder))
        self._door = socket.create_server(("127.0.0.1", 0))
        self._door.setblocking(False)
        self._links: list[tuple[int, str, TextIO]] = []  # process, side, connection
        environ = {
            "PYTHONPATH": f"{folder}:{ROOT / 'src'}",
            "HOUSE_PORT": str(self._door.getsockname()[1]),
            "HOUSE_PACKAGE": f"{ROOT}/src/holdfast/",
        }
        options = ("--models", f"{folder}/models.toml", "--store", f"{folder}/store")
        self._process = ServerProcess(*options, environ=environ)
        self._process.wait_ready()
        self._http = httpx.Client(base_url=self._process.url, timeout=600)

    def ask(self, model: str, *messages: Any, **body: Any) -> None:
        """Send a chat request and read the answer."""
        asked = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 8, **body}
        self._http.post("/v1/chat/completions", json=asked).raise_for_status()

    def unload(self, model: str) -> None:
        """End the worker of a model."""
        self._http.post(f"/admin/models/{model}/unload").raise_for_status()

    def traced(self, model: str, *messages: Any, seconds: float = 0.3, **body: Any) -> Run:
        """The calls of a chat request, without those in workers of other models.

        seconds: how long to trace after the answer, since blocks are stored then.
        """
        models = self._http.get("/health").json()["models"]
        others = {each["pid"] for each in models if each["id"] != model}
        self._mark("start")
        self.ask(model, *messages, **body)
        time.sleep(seconds)
        return [call for pid, call in self._mark("stop") if pid not in others]

    def _mark(self, word: str) -> list[tuple[int, Call]]:
        """Tell all processes to start or to stop; returns what they recorded, with their ids."""
        self._accept()
        calls: list[tuple[int, Call]] = []
        for link in tuple(self._links):
            pid, side, lines = link
            try:
                lines.write(f"{word}\n")
                lines.flush()
                recorded = json.loads(lines.readline())
            except (OSError, ValueError):  # the process has ended
                self._links.remove(link)
            else:
                calls += [
                    (pid, Call(side, function, frozenset(handled), times))
                    for function, handled, times in recorded
                ]
        return calls

    def _accept(self) -> None:
        """Take the connections of new processes."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._door.accept()
                connection.setblocking(True)
                lines = connection.makefile("rw")
                pid, *command = json.loads(lines.readline())
                is_worker = any(part.startswith("holdfast.worker") for part in command)
                self._links.append((pid, "worker" if is_worker else "front", lines))

    def close(self) -> None:
        """End the server."""
        self._http.close()
        self._process.stop()
        self._door.close()


def said(text: str, *images: int) -> dict[str, Any]:
    """A message of the user with images of these seeds."""
    urls = [data_url(png(seed, size=(64, 48))) for seed in images]
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": text}, *shown]}


def journeys(server: Server) -> dict[str, list[Run]]:
    """Several runs of each journey."""
    # as long as prompts that are remembered for the next turn
    talk = (said("a note. " * 550), {"role": "assistant", "content": "Noted."}, said("Go on."))
    server.ask("plain", *talk)
    chat = [server.traced("plain", *talk, stream=True) for _ in range(5)]
    # loading this model takes the longest
    loading = threading.Thread(target=server.ask, args=("seeing", said("What is it?", 1)))
    loading.start()
    stored = server.traced("plain", said("another note. " * 100), seconds=2)
    server.unload("plain")
    server.ask("plain", said("Hello."))
    restored = server.traced("plain", said("another note. " * 100))
    copy = said("Repeat exactly: Ada lives in Paris. Tom is 41 years old. Mia works as a baker.")
    server.ask("drafting", copy, max_tokens=40)
    draft = [server.traced("drafting", copy, max_tokens=40) for _ in range(3)]
    loading.join()
    image = [server.traced("seeing", said("What is it?", seed)) for seed in (2, 3)]
    return {"chat": chat, "block": [stored + restored], "image": image, "draft": draft}

"""Traces one real request through both processes and prints its calls: from the HTTP handler to the
device, and from the results of a step to bytes in a file.

    python -m tools.trace_request

Starts a real server on the bundled model, with a profile hook in the front and in its worker (a
`sitecustomize.py` on their path; the product does not know it). A chain is the stack when its last
function is called, outermost function first, functions of Holdfast only. The request is not streamed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOOK = """
import json, os, sys, threading

FOLDER = os.environ["TRACED_CALLS"]
PACKAGE = os.sep + "holdfast" + os.sep
ENDS = {
    ("sugar/socket.py", "Socket.send"),
    ("worker/engine/engine.py", "Engine.dispatch"),
    ("worker/engine/engine.py", "Engine.open"),
    ("worker/prefix/cache.py", "PrefixCache.lookup"),
        ("store/store.py", "BlockStore.put")}

def chain(frame):
    calls = []
    while frame is not None:
        code = frame.f_code
        if PACKAGE in code.co_filename and not code.co_name.startswith("<"):
            calls.append(code.co_filename.rpartition(PACKAGE)[2] + " " + code.co_qualname)
        frame = frame.f_back
    return calls[::-1]

def write(end, frame):
    with open(os.path.join(FOLDER, f"{os.getpid()}.jsonl"), "a") as file:
        file.write(json.dumps({"end": end, "thread": threading.current_thread().name, "calls": chain(frame)}) + "\\n")

def hook(frame, event, argument):
    code = frame.f_code
    if event == "call" and (code.co_name in ("send", "dispatch", "open", "put", "lookup")):
        name = code.co_filename.replace(os.sep, "/")
        for file, qualified in ENDS:
            if code.co_qualname == qualified and name.endswith(file):
                write(qualified, frame)
    elif event == "c_call" and argument.__name__ in ("write", "writev") and PACKAGE + "store" in code.co_filename:
        write("bytes", frame)

sys.setprofile(hook)
threading.setprofile(hook)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The calls from one place to another. first: a part of the name of the outermost one."""

    title: str
    end: str
    first: str
    most: int


MOST_BEFORE_FIRST_TOKEN = 12  # functions of the worker, those shared by several chains once
CHAINS = (
    Chain(title="front: handler to the link", end="Socket.send", first="front/", most=8),
    Chain(
        title="worker: arrival to PrefixCache.lookup",
        end="PrefixCache.lookup",
        first="WorkerLoop.",
        most=6,
    ),
    Chain(title="worker: admission to Engine.open", end="Engine.open", first="WorkerLoop.", most=5),
    Chain(
        title="worker: loop to Engine.dispatch", end="Engine.dispatch", first="WorkerLoop.", most=4
    ),
    Chain(
        title="device thread: step's results to the store's queue",
        end="BlockStore.put",
        first="worker/prefix/",
        most=4,
    ),
    # The writer takes blocks in its loop, and between two syncs of what it publishes: counted from
    # where it takes one.
    Chain(title="store's writer: queue to bytes", end="bytes", first="IoThread._write", most=6),
)


def trace(folder: Path) -> list[dict[str, object]]:
    """Serve one request of 600 tokens with the hook in place; returns what the hook recorded."""
    calls, store = folder / "calls", folder / "store"
    calls.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(folder), "TRACED_CALLS": str(calls)}
    command = [
        sys.executable,
        "-m",
        "holdfast.cli.main",
        "serve",
        "--port",
        "0",
        "--store",
        str(store),
    ]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if "is ready at " in line)
        url = line.split("is ready at ")[1].split()[0].rstrip("/")
        body = {
            "model": "holdfast-demo",
            "max_tokens": 8,
            "messages": [{"role": "user", "content": "a note. " * 300}],
        }
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()
    finally:
        server.terminate()
        server.communicate()
    return [
        json.loads(line)
        for file in calls.iterdir()
        for line in file.read_text(encoding="utf-8").splitlines()
    ]


def chain_of(records: list[dict[str, object]], chain: Chain) -> list[str]:
    """The longest recorded chain, from its first call on."""
    best: list[str] = []
    for record in records:
        calls = record["calls"]
        assert isinstance(calls, list)
        first = next((index for index, call in enumerate(calls) if chain.first in call), None)
        if record["end"] == chain.end and first is not None and len(calls) - first > len(best):
            best = calls[first:]
    return best


def main() -> int:
    """Print the chains; returns 1 if one was not recorded or is too long."""
    with tempfile.TemporaryDirectory() as folder:
        records = trace(Path(folder))
    is_well = True
    before_first_token: set[str] = set()
    for chain in CHAINS:
        calls = chain_of(records, chain)
        if chain.title.startswith("worker: "):
            before_first_token.update(calls)
        is_well = is_well and 0 < len(calls) <= chain.most
        sys.stdout.write(f"{chain.title}: {len(calls)} calls, at most {chain.most}\n")
        sys.stdout.writelines(f"    {call}\n" for call in calls)
    is_well = is_well and len(before_first_token) <= MOST_BEFORE_FIRST_TOKEN
    sys.stdout.write(
        f"worker: {len(before_first_token)} functions before the first token, at most "
        f"{MOST_BEFORE_FIRST_TOKEN}\n"
    )
    return int(not is_well)


if __name__ == "__main__":
    sys.exit(main())

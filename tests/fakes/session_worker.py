"""A worker with sessions on a tiny model, its commands and its answers."""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

from holdfast.store.block import StoredBlock
from holdfast.wire.commands import Command
from holdfast.wire.sessions import OperationName, SessionAnswer, SessionCommand, SessionInfo
from holdfast.worker.sessions.session_file import Manifest, SessionFile
from tests.fakes.caching_worker import CONTEXT_TOKENS, CachingWorker, greedy, random_prompt
from tests.fakes.script_inbox import ScriptInbox

# parks nothing unless told to, so that pinned, evicted and exported tokens are in blocks
worker = partial(CachingWorker, most_parked_bytes=0)


def prompt(seed: str, tokens: int = 300) -> tuple[int, ...]:
    return random_prompt(tokens, seed)


def ask(
    operation: OperationName,
    call_id: str = "c",
    session_id: str = "s",
    *,
    tenant: str = "",
    **more: Any,
) -> SessionCommand:
    """A command about the session `s`."""
    return SessionCommand(
        operation=operation, call_id=call_id, tenant=tenant, session_id=session_id, **more
    )


def serve(subject: CachingWorker, *commands: Command) -> ScriptInbox:
    """One command after another, each after the one before has ended."""
    return subject.serve([[command] for command in commands], in_turn=True)


def answer(inbox: ScriptInbox, call_id: str) -> SessionAnswer:
    (found,) = [
        event
        for event in inbox.events
        if isinstance(event, SessionAnswer) and event.call_id == call_id
    ]
    return found


def info(inbox: ScriptInbox, call_id: str) -> SessionInfo:
    found = answer(inbox, call_id)
    assert found.failure is None, found.message
    (session,) = found.sessions
    return session


def ended(subject: CachingWorker) -> list[SessionAnswer]:
    """The answers of all transfers, without a loop around them."""
    answers: list[SessionAnswer] = []
    while subject.sessions.is_busy:
        answers += subject.sessions.maintain()
    return answers


def taken_apart(path: Path) -> tuple[Manifest, list[StoredBlock]]:
    """A session's file."""
    file = SessionFile(path, most_tokens=CONTEXT_TOKENS)
    blocks = [file.block(key) for key, _ in file.manifest.blocks]
    file.close()
    return file.manifest, blocks


def exported(
    folder: Path, name: str = "llama", *, tokens: int = 300
) -> tuple[Manifest, list[StoredBlock]]:
    """A session that has read the prompt `first`, as a file `whole`, and its parts."""
    path = folder / "whole"
    path.write_bytes(_session_file(name, tokens))
    return taken_apart(path)


@cache
def _session_file(name: str, tokens: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session"
        serve(
            worker(name),
            greedy("1", prompt("first", tokens), session_id="s"),
            ask("export", path=str(path)),
        )
        return path.read_bytes()

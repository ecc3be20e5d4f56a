"""A small stand-in for the Hugging Face Hub: the requests of huggingface_hub for a snapshot, over
HTTP on loopback.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import constants

from holdfast.models.download import demo_folder

_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/?]+))?")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/?]+)")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class HubState:
    """The Hub's contents, its behaviour, and its requests."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, set[str]] = field(default_factory=dict)  # besides main
    commits: dict[str, str] = field(default_factory=dict)  # of main, if it is not the first
    gated: set[str] = field(default_factory=set)
    token: str = ""  # needed for everything if set
    failing_status: int = 0  # answered to everything if set
    # file → bytes after which its next transfer breaks off
    cut_after_bytes: dict[str, int] = field(default_factory=dict)
    cuts_each_after: int = 0  # if not 0, every transfer breaks off after this many bytes
    sends_nothing: bool = False  # transfers break off before the first byte
    resets: bool = False  # whether a transfer that breaks off ends with a reset
    ignores_ranges: bool = False
    etags: dict[str, str] = field(default_factory=dict)  # file → what is sent as its ETag
    linked_etags: dict[str, str] = field(default_factory=dict)
    commit_headers: dict[str, str] = field(
        default_factory=dict
    )  # file → what is sent as its commit
    info: dict[str, object] = field(
        default_factory=dict
    )  # changes to the model's description; None: left out
    tree: object = None  # sent instead of the list of files
    lfs_files: set[str] = field(default_factory=set)  # are told with their SHA-256, as weights are
    surplus: dict[str, bytes] = field(default_factory=dict)  # file → sent after its announced end
    damaged_files: set[str] = field(default_factory=set)  # arrive with one other byte
    failing_files: set[str] = field(default_factory=set)  # are announced but cannot be fetched
    # the answers to the next requests for contents of files, and for their descriptions
    passing_failures: list[int] = field(default_factory=list)
    passing_failures_of_heads: list[int] = field(default_factory=list)
    # files wait until this is set
    sends_files: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)  # "GET /path" or "GET /path bytes=7-"
    endpoint: str = ""
    prefix: str = ""  # of all paths

    def __post_init__(self) -> None:
        self.sends_files.set()

    def commit(self, repository: str, revision: str) -> str:
        """The commit that the revision names; empty if there is none."""
        commit = self.commits.get(repository) or hashlib.sha1(repository.encode()).hexdigest()
        known = {"main", commit, *self.revisions.get(repository, ())}
        return commit if revision in known else ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # otherwise, each body waits for the acknowledgement of its headers
    disable_nagle_algorithm = True
    state: ClassVar[HubState]

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        return

    def _answer(self) -> None:
        path = self.path.partition("?")[0].removeprefix(self.state.prefix)
        self.state.requests.append(
            " ".join([self.command, path, *filter(None, [self.headers.get("Range")])])
        )
        match = _TREE.fullmatch(path) or _INFO.fullmatch(path) or _FILE.fullmatch(path)
        repository = match["repo"] if match else ""
        revision = (match["revision"] or "main") if match else ""
        if self.state.failing_status:
            self._send(self.state.failing_status)
        elif self.state.token and self.headers.get("Authorization") != f"Bearer {self.state.token}":
            self._send(
                401,
                headers={
                    "X-Error-Code": "RepoNotFound",
                    "X-Error-Message": "Invalid username or password.",
                },
            )
        elif match is None or repository not in self.state.repositories:
            self._send(404, headers={"X-Error-Code": "RepoNotFound"})
        elif repository in self.state.gated:
            self._send(403, headers={"X-Error-Code": "GatedRepo"})
        elif not (commit := self.state.commit(repository, revision)):
            self._send(404, headers={"X-Error-Code": "RevisionNotFound"})
        elif match.re is _TREE:
            self._send_json(self.state.tree or self._tree(repository))
        elif match.re is _INFO:
            known = {"id": repository, "modelId": repository, "sha": commit, "siblings": []}
            info = {**known, "tags": [], **self.state.info}
            self._send_json({name: value for name, value in info.items() if value is not None})
        else:
            self._send_file(repository, match["file"], commit)

    def _tree(self, repository: str) -> list[dict[str, object]]:
        files = self.state.repositories[repository]
        return [
            {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
            for name, content in files.items()
        ]

    def _send_file(self, repository: str, name: str, commit: str) -> None:
        if self.command == "GET":
            self.state.sends_files.wait()
        content = self.state.repositories[repository].get(name)
        if content is None:
            self._send(404, headers={"X-Error-Code": "EntryNotFound"})
            return
        failures = (
            self.state.passing_failures
            if self.command == "GET"
            else self.state.passing_failures_of_heads
        )
        if failures:
            self._send(failures.pop(0))
            return
        if name in self.state.failing_files and self.command == "GET":
            self._send(503)
            return
        etag = (
            hashlib.sha256(content).hexdigest() if name in self.state.lfs_files else _oid(content)
        )
        if name in self.state.damaged_files:
            content = bytes([content[0] ^ 1]) + content[1:]
        headers = {
            "ETag": f'"{self.state.etags.get(name, etag)}"',
            "X-Repo-Commit": self.state.commit_headers.get(name, commit),
            "Accept-Ranges": "bytes",
        }
        if name in self.state.linked_etags:
            headers["X-Linked-Etag"] = f'"{self.state.linked_etags[name]}"'
        if self.command == "GET":
            content += self.state.surplus.get(name, b"")
        start, status = 0, 200
        whole_bytes = len(content)
        wanted = "" if self.state.ignores_ranges else self.headers.get("Range") or ""
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted):
            start, status = int(asked[1]), 206
            content = content[: int(asked[2]) + 1] if asked[2] else content
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{whole_bytes}"
        cut = None
        if self.command == "GET":
            cut = self.state.cut_after_bytes.pop(name, self.state.cuts_each_after or None)
            if cut is not None and cut >= len(content) - start:
                cut = None
            cut = 0 if self.state.sends_nothing else cut
        self._send(status, content[start:], headers=headers, cut=cut)

    def _send_json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), headers={"Content-Type": "application/json"})

    def _send(
        self,
        status: int,
        body: bytes = b"",
        *,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            if self.state.resets:
                off = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, off)


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def hub_in_place(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[HubState]:
    """A Hub used by huggingface_hub in this process, with an empty cache in that folder."""
    monkeypatch.setattr("holdfast.models.hub_transfer._RETRY_SECONDS", 0.001)
    with running_hub() as state:
        # The library reads its variables once, when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", state.endpoint)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            state.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_CACHE", str(cache))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield state


def add_demo(state: HubState, hub_id: str) -> None:
    """Add the bundled model to a Hub, under another id."""
    state.repositories[hub_id] = {
        file.name: file.read_bytes() for file in demo_folder().iterdir() if file.is_file()
    }
    state.lfs_files = {"model.safetensors"}


@contextmanager
def running_hub() -> Iterator[HubState]:
    """A Hub on a free loopback port for the duration of the block."""
    state = HubState()
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""Starts and ends servers on free loopback ports, each with a log."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.worker.cpu.kernels.build import SWITCH
from holdfast_bench.contenders import Contender
from holdfast_bench.load import Client, Target, user
from holdfast_bench.models import BenchModel
from holdfast_bench.process_tree import TreeUse, end_tree, folder_bytes, tree_use
from holdfast_bench.wire import ServerUnreachable, get_json

_POLL_SECONDS = 0.04
_END_SECONDS = 10.0
_LOG_LINES_SHOWN = 5


class ServerFailed(HoldfastError):
    """A server did not start, or ended."""


@dataclass(slots=True)
class RunningServer:
    """A running server. ready_seconds: from the start of its process to the end of its first
    answer.
    """

    contender: Contender
    target: Target
    store: Path
    process: subprocess.Popen[bytes] | None = None
    listening_seconds: float = 0.0
    ready_seconds: float = 0.0
    client: Client = field(init=False)
    # conversations of scenarios, by case
    conversations: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.client = Client(self.target)

    def use(self) -> TreeUse | None:
        """Resources of its processes; None if the benchmark did not start it."""
        return tree_use(self.process.pid) if self.process is not None else None

    def store_bytes(self) -> int:
        """Bytes of its store."""
        return folder_bytes(self.store)

    def stop(self, *, kill: bool = False) -> None:
        """End it with all its children. A server at a URL is left alone."""
        if self.process is not None:
            end_tree(self.process.pid, patience_seconds=_END_SECONDS, kill=kill)
            self.process.wait(_END_SECONDS)


class ServerStarter:
    """Starts servers for one model. Their logs and stores are in `folder`."""

    def __init__(
        self,
        folder: Path,
        model: BenchModel,
        *,
        threads: int = 0,
        start_seconds: float = 180.0,
        request_seconds: float = 300.0,
    ) -> None:
        self._folder, self._model, self.threads = folder, model, threads
        self._start_seconds, self._request_seconds = start_seconds, request_seconds
        self.model_folder = model.folder

    async def start(self, contender: Contender) -> RunningServer:
        """Start the server, or connect to its URL, and wait for its first answer.

        Raises ServerFailed.
        """
        store = self._folder / f"store-{contender.label}"
        store.mkdir(parents=True, exist_ok=True)
        if not contender.is_ours_to_start:
            return await self._connect(contender, contender.url, store, process=None)
        port = free_port()
        command = contender.filled_command(model=self._model.folder, port=port, store=store)
        with self._log(contender).open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=self._environment(),
            )
        try:
            return await self._connect(
                contender, f"http://127.0.0.1:{port}", store, process=process
            )
        except BaseException:
            end_tree(process.pid, patience_seconds=_END_SECONDS, kill=True)
            raise

    async def _connect(
        self,
        contender: Contender,
        url: str,
        store: Path,
        *,
        process: subprocess.Popen[bytes] | None,
    ) -> RunningServer:
        began = time.perf_counter()
        deadline = began + self._start_seconds
        model_id = await self._model_id(contender, url, process, deadline)
        listening = time.perf_counter() - began
        target = Target(
            base_url=url,
            model=model_id,
            api_key=contender.api_key,
            timeout_seconds=self._request_seconds,
            goes_on=self._model.is_endless,
        )
        server = RunningServer(
            contender=contender,
            target=target,
            store=store,
            process=process,
            listening_seconds=listening,
        )
        while True:
            self._check(contender, process, deadline)
            answer = await server.client.ask(user("Hello", max_tokens=1))
            if answer.is_good:
                server.ready_seconds = time.perf_counter() - began
                return server
            if process is None and answer.status not in (0, 503):
                raise ServerFailed(f"{contender.label} answers with {answer.error}")
            await asyncio.sleep(_POLL_SECONDS)

    async def _model_id(
        self,
        contender: Contender,
        url: str,
        process: subprocess.Popen[bytes] | None,
        deadline: float,
    ) -> str:
        while True:
            self._check(contender, process, deadline)
            try:
                status, body = await get_json(f"{url}/v1/models", api_key=contender.api_key)
            except ServerUnreachable:
                if process is None:
                    raise
                await asyncio.sleep(_POLL_SECONDS)
                continue
            served = body.get("data") if isinstance(body, dict) else None
            if status == 200 and (contender.model_id or served):
                return contender.model_id or str(served[0]["id"] if served else "")
            if process is None:
                raise ServerFailed(
                    f"{url}/v1/models answers with status {status} and without a model"
                )
            await asyncio.sleep(_POLL_SECONDS)

    def _check(
        self, contender: Contender, process: subprocess.Popen[bytes] | None, deadline: float
    ) -> None:
        if process is not None and process.poll() is not None:
            raise ServerFailed(
                f"{contender.label} ended with code {process.returncode} while starting: "
                f"{self._last_lines(contender)}"
            )
        if time.perf_counter() > deadline:
            raise ServerFailed(
                f"{contender.label} did not answer within {self._start_seconds:.0f} s: "
                f"{self._last_lines(contender)}"
            )

    def _log(self, contender: Contender) -> Path:
        return self._folder / f"{contender.label}.log"

    def _last_lines(self, contender: Contender) -> str:
        log = self._log(contender)
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return " | ".join(lines[-_LOG_LINES_SHOWN:])

    def _environment(self) -> dict[str, str]:
        """The environment of servers: no settings for Holdfast except its kernels, and no access to
        the Hub.
        """
        environment = {
            name: value
            for name, value in os.environ.items()
            if name == SWITCH or not name.startswith("HOLDFAST_")
        }
        environment |= {
            "XDG_CONFIG_HOME": str(self._folder),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment["HOLDFAST_STORE_FOLDER"] = "off"  # unless the command has a store
        if paths := environment.get("PYTHONPATH"):
            environment["PYTHONPATH"] = os.pathsep.join(
                str(Path(path).resolve()) for path in paths.split(os.pathsep)
            )
        if self.threads:
            environment |= dict.fromkeys(
                ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads)
            )
        return environment


def free_port() -> int:
    """A free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

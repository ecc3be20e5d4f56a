"""Starts, measures and ends servers on free loopback ports, each with a log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from holdfast.errors import HoldfastError
from holdfast.worker.cpu.kernels.build import SWITCH
from holdfast_bench.contenders import Contender
from holdfast_bench.load import Client, Target, user
from holdfast_bench.models import BenchModel
from holdfast_bench.wire import ServerUnreachable, get_json

_POLL_SECONDS = 0.04
_SAMPLING_SECONDS = 0.25
_START_SECONDS = 180.0
_END_SECONDS = 10.0
_LOG_LINES_SHOWN = 5
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class ServerFailed(HoldfastError):
    """A server did not start, or ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Resources of a server's processes. Shared memory is counted once on Linux."""

    processes: int = 0
    resident_bytes: int = 0
    cpu_seconds: float = 0.0


@dataclass(slots=True)
class RunningServer:
    """A running server; without a process if the benchmark did not start it.

    ready_seconds: from the start of its process to the end of its first answer.
    """

    contender: Contender
    client: Client
    store: Path
    process: subprocess.Popen[bytes] | None = None
    listening_seconds: float = 0.0
    ready_seconds: float = 0.0
    # conversations of scenarios, by case
    conversations: dict[str, Any] = field(default_factory=dict)

    def use(self) -> Use:
        """Resources of its processes; zeros if it was not started here, or has ended."""
        count, resident, cpu = 0, 0, 0.0
        for process in self._processes():
            with contextlib.suppress(*_GONE):
                times = process.cpu_times()
                resident += _resident_bytes(process)
                cpu += times.user + times.system
                count += 1
        return Use(processes=count, resident_bytes=resident, cpu_seconds=cpu)

    def store_bytes(self) -> int:
        """Bytes of its store."""
        total = 0
        for file in self.store.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # files may disappear while it runs
                total += file.stat().st_size if file.is_file() else 0
        return total

    async def cached_bytes(self) -> int | None:
        """KV that the prefix cache keeps in RAM, according to /health; None if it does not say."""
        status, body = await get_json(f"{self.client.target.base_url}/health")
        models = body.get("models") if status == 200 and isinstance(body, dict) else None
        memory = models[0].get("memory") if models and isinstance(models[0], dict) else None
        return int(memory["ram_bytes"]) if memory else None

    @contextlib.asynccontextmanager
    async def sampled_memory(self) -> AsyncIterator[list[int]]:
        """Sample the resident bytes regularly, and once more at the end."""
        seen = [self.use().resident_bytes]

        async def watch() -> None:
            while True:
                await asyncio.sleep(_SAMPLING_SECONDS)
                seen.append(self.use().resident_bytes)

        watching = asyncio.create_task(watch())
        try:
            yield seen
        finally:
            watching.cancel()
            seen.append(self.use().resident_bytes)

    def stop(self, *, kill: bool = False) -> None:
        """End it with all its children, and kill them if they still run after a while.

        kill: without terminating it first.
        """
        if self.process is None:
            return
        processes = list(self._processes())
        if not kill and processes:
            with contextlib.suppress(*_GONE):
                processes[0].terminate()
            _, processes = psutil.wait_procs(processes, timeout=_END_SECONDS)
        for process in processes:
            with contextlib.suppress(*_GONE):
                process.kill()
        psutil.wait_procs(processes, timeout=_END_SECONDS)
        self.process.wait(_END_SECONDS)

    def _processes(self) -> Iterator[psutil.Process]:
        if self.process is None:
            return
        try:
            root = psutil.Process(self.process.pid)
            children = root.children(recursive=True)
        except _GONE:
            return
        yield root
        yield from children


def _resident_bytes(process: psutil.Process) -> int:
    try:
        full = process.memory_full_info()
    except (*_GONE, NotImplementedError):
        return int(process.memory_info().rss)
    return int(getattr(full, "pss", 0) or full.rss)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStarter:
    """Starts servers for one model. Their logs and stores are in `folder`."""

    folder: Path
    model: BenchModel
    threads: int = 0
    request_seconds: float = 300.0

    async def start(self, contender: Contender) -> RunningServer:
        """Start the server, or connect to its URL, and wait for its first answer.

        Raises ServerFailed, ServerUnreachable.
        """
        store = self.folder / f"store-{contender.label}"
        store.mkdir(parents=True, exist_ok=True)
        url, process = contender.url, None
        began = time.perf_counter()
        if contender.is_ours_to_start:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            command = contender.filled_command(model=self.model.folder, port=port, store=store)
            with self._log(contender).open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    env=self._environment(),
                )
        target = Target(
            base_url=url,
            model=contender.model_id,
            timeout_seconds=self.request_seconds,
            goes_on=self.model.is_endless,
        )
        server = RunningServer(contender, Client(target), store, process)
        try:
            await self._wait(server, began)
        except BaseException:
            server.stop(kill=True)
            raise
        return server

    async def _wait(self, server: RunningServer, began: float) -> None:
        """Wait for the server's models and for its first answer."""
        target = server.client.target
        while not server.listening_seconds:
            self._check(server, began)
            try:
                status, body = await get_json(f"{target.base_url}/v1/models")
            except ServerUnreachable:
                if server.process is None:
                    raise
                status, body = 0, None
            served = body.get("data") if status == 200 and isinstance(body, dict) else None
            if served or (status == 200 and target.model):
                model = target.model or str(served[0]["id"] if served else "")
                server.client.target = replace(target, model=model)
                server.listening_seconds = time.perf_counter() - began
            elif server.process is None:
                raise ServerFailed(f"{target.base_url}/v1/models has no model; status {status}")
            else:
                await asyncio.sleep(_POLL_SECONDS)
        while not (answer := await server.client.ask(user("Hello", max_tokens=1))).is_good:
            self._check(server, began)
            if server.process is None:
                raise ServerFailed(f"{server.contender.label} answers with {answer.error}")
            await asyncio.sleep(_POLL_SECONDS)
        server.ready_seconds = time.perf_counter() - began

    def _check(self, server: RunningServer, began: float) -> None:
        """Raise ServerFailed if the server has ended or takes too long."""
        label, problem = server.contender.label, ""
        if server.process is not None and server.process.poll() is not None:
            problem = f"ended with code {server.process.returncode} while starting"
        elif time.perf_counter() > began + _START_SECONDS:
            problem = f"did not answer within {_START_SECONDS:.0f} s"
        if problem:
            log = self._log(server.contender)
            lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            raise ServerFailed(f"{label} {problem}: {' | '.join(lines[-_LOG_LINES_SHOWN:])}")

    def _log(self, contender: Contender) -> Path:
        return self.folder / f"{contender.label}.log"

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
            "XDG_CONFIG_HOME": str(self.folder),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HOLDFAST_STORE_FOLDER": "off",  # unless the command has a store
        }
        if paths := environment.get("PYTHONPATH"):
            environment["PYTHONPATH"] = os.pathsep.join(
                map(os.path.abspath, paths.split(os.pathsep))
            )
        if self.threads:
            environment |= dict.fromkeys(_THREADS, str(self.threads))
        return environment


def free_port() -> int:
    """A free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

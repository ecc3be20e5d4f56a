"""Conditions in which people run a server: a busy machine, a slow disk, a read-only
home folder, a proxy in front.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from holdfast.files import compiled_code_folder, kernels_folder
from holdfast.front.fleet.worker_files import machine_subfolder
from tests.fakes.volumes import read_only

BUSY_PROCESSES = 12
_BUSY = "while True: pass"
# These headers belong to one connection, not to the message (RFC 9110, section 7.6.1).
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}


@contextlib.contextmanager
def busy(processes: int = BUSY_PROCESSES) -> Iterator[None]:
    """Keep this many other processes busy during the block."""
    started = [subprocess.Popen([sys.executable, "-S", "-c", _BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


_SLOW_CALLS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

/* Delays the calls that wait for a disk, on files beneath SLOW_FOLDER. */
enum { FILES = 65536 };
static char is_slow[FILES];

static void wait_ms(long ms) {
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}
static int is_beneath(const char *path) {
    const char *folder = getenv("SLOW_FOLDER");
    return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}
static void wait_for_file(int file, long ms) {
    if (file >= 0 && file < FILES && is_slow[file]) wait_ms(ms);
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        int slow = is_beneath(path); \
        if (slow) wait_ms(5); \
        int file = REAL(name)(path, flags, mode); \
        if (file >= 0 && file < FILES) is_slow[file] = slow; \
        return file; \
    }
int open64(const char *, int, ...);
OPEN(open)
OPEN(open64)
ssize_t pread64(int, void *, size_t, off_t);
ssize_t pwrite64(int, const void *, size_t, off_t);
ssize_t read(int, void *, size_t);
ssize_t write(int, const void *, size_t);
int fsync(int);
int fdatasync(int);
int rename(const char *, const char *);
ssize_t read(int file, void *at, size_t size) {
    wait_for_file(file, 10);
    return REAL(read)(file, at, size);
}
ssize_t write(int file, const void *at, size_t size) {
    wait_for_file(file, 10);
    return REAL(write)(file, at, size);
}
ssize_t pread64(int file, void *at, size_t size, off_t start) {
    wait_for_file(file, 10);
    return REAL(pread64)(file, at, size, start);
}
ssize_t pwrite64(int file, const void *at, size_t size, off_t start) {
    wait_for_file(file, 10);
    return REAL(pwrite64)(file, at, size, start);
}
int fsync(int file) {
    wait_for_file(file, 100);
    return REAL(fsync)(file);
}
int fdatasync(int file) {
    wait_for_file(file, 100);
    return REAL(fdatasync)(file);
}
int rename(const char *from, const char *to) {
    if (is_beneath(from)) wait_ms(10);
    return REAL(rename)(from, to);
}
"""


@cache
def _slow_calls() -> str:
    """The compiled library, built once per process."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("a slow disk needs Linux and a C compiler")
    folder = Path(tempfile.mkdtemp(prefix="holdfast-slow-disk-"))
    (folder / "slow.c").write_text(_SLOW_CALLS)
    library = folder / "slow.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", library, folder / "slow.c", "-ldl"],
        check=True,
    )
    return str(library)


def slow_disk(folder: Path) -> dict[str, str]:
    """Environment variables that make the disk below `folder` as slow as an old hard disk: 10 ms to
    read or write, 100 ms to sync.
    """
    return {"LD_PRELOAD": _slow_calls(), "SLOW_FOLDER": str(folder)}


def link_compiled(home: Path) -> None:
    """Share compiled kernels and MLX code with servers in a new home, since compiling takes
    seconds.
    """
    caches = home / ".cache" / "holdfast"
    (caches / "compiled").mkdir(mode=0o700, parents=True)
    if (kernels := kernels_folder(os.environ)).is_dir():
        (caches / "kernels").symlink_to(kernels)
    compiled = machine_subfolder(Path(compiled_code_folder(os.environ)))
    machine_subfolder(caches / "compiled").symlink_to(compiled.resolve())


@contextlib.contextmanager
def read_only_home(folder: Path) -> Iterator[dict[str, str]]:
    """Environment variables for a read-only home folder that contains compiled kernels and code."""
    caches = folder / ".cache" / "holdfast"
    caches.mkdir(parents=True)
    for compiled in (kernels_folder(os.environ), Path(compiled_code_folder(os.environ))):
        if compiled.is_dir():
            shutil.copytree(compiled, caches / compiled.name)
    nowhere = dict.fromkeys(("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"), "")
    with read_only(folder):
        yield {"HOME": str(folder), **nowhere}


class _Proxy:
    """A reverse proxy that forwards streams unbuffered, like nginx with buffering off."""

    def __init__(self, target: str) -> None:
        self._client = httpx.AsyncClient(base_url=target, timeout=180)
        methods = ["GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS"]
        app = Starlette(routes=[Route("/{path:path}", self._forward, methods=methods)])
        self._server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
        )
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._is_serving = threading.Event()
        self._thread.start()
        assert self._is_serving.wait(60)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    async def _serve(self) -> None:
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0)
        self._is_serving.set()
        await serving
        await self._client.aclose()

    async def _forward(self, request: Request) -> Response:
        headers = [
            (name, value)
            for name, value in request.headers.items()
            if name not in {*_HOP_BY_HOP, "host"}
        ]
        headers += [
            ("x-forwarded-for", request.client.host if request.client else "unknown"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", request.headers["host"]),
            ("via", "1.1 proxy"),
        ]
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        sent = self._client.build_request(
            request.method, url, headers=headers, content=await request.body()
        )
        answer = await self._client.send(sent, stream=True)

        async def passed_on() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(answer.aiter_raw()) as pieces:
                async for piece in pieces:
                    yield piece
            await answer.aclose()

        kept = {name: value for name, value in answer.headers.items() if name not in _HOP_BY_HOP}
        return StreamingResponse(passed_on(), status_code=answer.status_code, headers=kept)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)


@contextlib.contextmanager
def proxy_before(url: str) -> Iterator[str]:
    """The address of a reverse proxy in front of a server."""
    proxy = _Proxy(url)
    try:
        yield proxy.url
    finally:
        proxy.close()

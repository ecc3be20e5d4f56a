"""Every feature under every condition: the answers must equal those of a server without keys on an
idle machine.

Each pair of a feature in FEATURES and a condition in CONDITIONS is a test.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from holdfast.front.server.access import named_key, write_keys
from holdfast.models.download import demo_folder
from holdfast.worker.engine import seams
from tests.fakes.adapters import write_adapter
from tests.fakes.conditions import busy, proxy_before, read_only_home, slow_disk
from tests.fakes.features import FEATURES, Caller, Kept
from tests.fakes.server_process import ServerProcess
from tests.fakes.vision_models import write_vision_model

KEY = "the key of alice"
HOST = "box.example"


class MatrixServer:
    """A server with the models of the matrix; it can be restarted."""

    def __init__(
        self, root: Path, name: str, models: Path, *arguments: str, **environ: str
    ) -> None:
        store = root / name / "store"
        self._arguments = ("--models", str(models), "--store", str(store), *arguments)
        self._environ = environ
        self.server = self._started(port=0)

    def _started(self, port: int) -> ServerProcess:
        server = ServerProcess(*self._arguments, port=port, environ=self._environ)
        server.wait_ready()
        return server

    def restart(self) -> None:
        """Stop the server cleanly, and start it again on its port."""
        self.stop()
        self.server = self._started(int(self.server.url.rpartition(":")[2]))

    def stop(self) -> None:
        assert self.server.stop() == 0, self.server.log()


def written_models(folder: Path) -> Path:
    """A `models.toml` with the bundled model, an adapter for it, and one that sees images."""
    folder.mkdir()
    model, _ = seams.mlx_lm_utils().load_model(demo_folder())
    write_adapter(folder / "sql", model, seed=0, scale=16.0)
    write_vision_model(folder / "seeing", "qwen2_5_vl")
    file = folder / "models.toml"
    file.write_text(
        '[models.demo]\nid = "holdfast-demo"\nadapters = { sql = "sql" }\npin = true\n'
        '[models.seeing]\npath = "seeing"\npin = true\n'
    )
    return file


class MatrixServers:
    """The servers of the matrix, each started on first use."""

    def __init__(self, root: Path, stack: contextlib.ExitStack) -> None:
        self._root = root
        self._stack = stack
        self._expected: dict[str, Any] = {}

    @cached_property
    def models(self) -> Path:
        return written_models(self._root / "models")

    def _place(self, name: str, *arguments: str, **environ: str) -> MatrixServer:
        place = MatrixServer(self._root, name, self.models, *arguments, **environ)
        self._stack.callback(place.stop)
        return place

    @cached_property
    def open(self) -> MatrixServer:
        """Without keys."""
        return self._place("open")

    @cached_property
    def keyed(self) -> MatrixServer:
        """With named keys, reachable from other hosts."""
        keys = self._root / "keys.json"
        alice = named_key("alice", KEY, is_admin=False, priority="interactive", max_requests=None)
        write_keys(keys, [alice])
        return self._place(
            "keyed",
            "--host",
            "0.0.0.0",
            "--allowed-hosts",
            HOST,
            "--set",
            f"server.keys_file={keys}",
        )

    @cached_property
    def slow(self) -> MatrixServer:
        """With a store on a slow disk."""
        return self._place("slow", **slow_disk(self._root / "slow"))

    @cached_property
    def homeless(self) -> MatrixServer:
        """In a home folder that cannot be written."""
        environ = self._stack.enter_context(read_only_home(self._root / "home"))
        return self._place("homeless", **environ)

    @cached_property
    def proxy(self) -> str:
        """The URL of a proxy in front of the server without keys."""
        return self._stack.enter_context(proxy_before(self.open.server.url))

    @cached_property
    def beside_busy_processes(self) -> Mapping[str, Future[Any]]:
        """What each feature returns beside 12 busy processes. All are tried at the same time, since
        each alone would take several seconds.
        """
        caller = Caller(url=self.open.server.url)
        with busy(), ThreadPoolExecutor(len(FEATURES)) as pool:
            return {name: pool.submit(feature, caller) for name, feature in FEATURES.items()}

    def expected(self, feature: str) -> Any:
        """What a feature returns on an idle machine, without a key."""
        if feature not in self._expected:
            self._expected[feature] = FEATURES[feature](Caller(url=self.open.server.url))
        return self._expected[feature]


def _other_host(places: MatrixServers) -> Caller:
    """By a name other than the machine's own, from a non-loopback address if there is one."""
    port = places.keyed.server.url.rpartition(":")[2]
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
    headers = {"host": f"{HOST}:{port}", "authorization": f"Bearer {KEY}"}
    return Caller(url=f"http://{address}:{port}", headers=headers)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Which server is asked, how, and whether other processes compete for the processor."""

    caller: Callable[[MatrixServers], Caller]
    is_busy: bool = False
    place: str = "open"  # of MatrixServers


def _plain(places: MatrixServers) -> Caller:
    return Caller(url=places.open.server.url)


CONDITIONS = {
    "nothing else": Condition(caller=_plain),
    "an API key": Condition(
        caller=lambda places: Caller(
            url=places.keyed.server.url.replace("0.0.0.0", "127.0.0.1"), headers={"x-api-key": KEY}
        ),
        place="keyed",
    ),
    "another host's name": Condition(caller=_other_host, place="keyed"),
    "a cache salt": Condition(caller=lambda places: replace(_plain(places), salt="of one chat")),
    "a tenant header": Condition(
        caller=lambda places: replace(_plain(places), headers={"X-Holdfast-Tenant": "one"})
    ),
    "a proxy in front": Condition(caller=lambda places: Caller(url=places.proxy)),
    "a busy machine": Condition(caller=_plain, is_busy=True),
    "a slow disk": Condition(
        caller=lambda places: Caller(url=places.slow.server.url), place="slow"
    ),
    "a read-only home": Condition(
        caller=lambda places: Caller(url=places.homeless.server.url),
        place="homeless",
    ),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MatrixServers]:
    with contextlib.ExitStack() as stack:
        yield MatrixServers(tmp_path_factory.mktemp("conditions"), stack)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_feature_works_in_every_condition(
    places: MatrixServers, condition: str, feature: str
) -> None:
    expected = places.expected(feature)
    asked = CONDITIONS[condition]
    if asked.is_busy:
        assert places.beside_busy_processes[feature].result() == expected
    else:
        assert FEATURES[feature](asked.caller(places)) == expected


def test_streams_equal_whole_answers(places: MatrixServers) -> None:
    assert places.expected("streams") == places.expected("chat")


@pytest.mark.parametrize("name", ["open", "keyed", "slow", "homeless"])
def test_a_restart_loses_nothing_in_any_condition(places: MatrixServers, name: str) -> None:
    place: MatrixServer = getattr(places, name)
    callers = [
        condition.caller(places) for condition in CONDITIONS.values() if condition.place == name
    ]
    kept = [Kept.by(caller) for caller in callers]
    place.restart()
    for caller, before in zip(callers, kept, strict=True):
        before.check(caller)

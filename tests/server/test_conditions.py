"""Every feature under every condition: the answers equal those of a server without keys on an idle
machine.

Each pair of a feature in FEATURES and a condition in CONDITIONS is a test. `make test` runs a
quarter of the features for every condition but the busy machine, whose processes would delay all
other tests; `make slow` runs the other pairs.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from holdfast.front.server.access import named_key, write_keys
from holdfast.models.download import demo_folder
from holdfast.worker.engine import mlx_lm_hooks
from tests.fakes.adapters import write_adapter
from tests.fakes.conditions import busy, proxy_before, read_only_home, slow_disk
from tests.fakes.features import FEATURES, Caller, Kept
from tests.fakes.server_process import ServerProcess
from tests.fakes.vision_models import write_vision_model

KEY = "the key of alice"
HOST = "box.example"
DAILY_SHARE = 4  # `make test` runs every fourth pair without busy processes


def written_models(folder: Path) -> Path:
    """A `models.toml` with the bundled model, an adapter for it, and one that sees images."""
    folder.mkdir()
    model, _ = mlx_lm_hooks.mlx_lm_utils().load_model(demo_folder())
    write_adapter(folder / "sql", model, seed=0, scale=16.0)
    write_vision_model(folder / "seeing", "qwen2_5_vl")
    file = folder / "models.toml"
    file.write_text(
        '[models.demo]\nid = "holdfast-demo"\nadapters = { sql = "sql" }\npin = true\n'
        '[models.seeing]\npath = "seeing"\n'
    )
    return file


def stop(server: ServerProcess) -> None:
    assert server.stop() == 0, server.log()


class MatrixServers:
    """The servers of the matrix, each started at its first use."""

    def __init__(self, root: Path, stack: contextlib.ExitStack) -> None:
        self._root = root
        self._stack = stack
        self._expected: dict[str, Any] = {}
        self._beside_busy_processes: dict[str, Future[Any]] = {}

    @cached_property
    def models(self) -> Path:
        return written_models(self._root / "models")

    def _place(self, name: str, *arguments: str, **environ: str) -> ServerProcess:
        folders = ("--models", str(self.models), "--store", str(self._root / name / "store"))
        server = ServerProcess(*folders, *arguments, environ=environ)
        self._stack.callback(stop, server)
        server.wait_ready()
        return server

    @cached_property
    def open(self) -> ServerProcess:
        """Without keys."""
        return self._place("open")

    @cached_property
    def keyed(self) -> ServerProcess:
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
    def restricted(self) -> ServerProcess:
        """With a store on a slow disk and a home folder that is not writable."""
        home = self._stack.enter_context(read_only_home(self._root / "home"))
        return self._place("restricted", **home, **slow_disk(self._root / "restricted"))

    @cached_property
    def proxy(self) -> str:
        """The URL of a proxy in front of the server without keys."""
        return self._stack.enter_context(proxy_before(self.open.url))

    def beside_busy_processes(self, feature: str) -> Any:
        """The result of a feature next to busy processes. All features run together, since each
        alone would take several seconds.
        """
        if not self._beside_busy_processes:
            for name in FEATURES:
                self.expected(name)  # also loads all models, which would take long beside them
            caller = Caller(url=self.open.url)
            with busy(), ThreadPoolExecutor(len(FEATURES)) as pool:
                for name, use in FEATURES.items():
                    self._beside_busy_processes[name] = pool.submit(use, caller)
        return self._beside_busy_processes[feature].result()

    def expected(self, feature: str) -> Any:
        """The result of a feature on an idle machine, without a key."""
        if feature not in self._expected:
            self._expected[feature] = FEATURES[feature](Caller(url=self.open.url))
        return self._expected[feature]


def _other_host(places: MatrixServers) -> Caller:
    """Under a name other than the machine's own, from a non-loopback address if there is one."""
    port = places.keyed.url.rpartition(":")[2]
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
    headers = {"host": f"{HOST}:{port}", "authorization": f"Bearer {KEY}"}
    return Caller(url=f"http://{address}:{port}", headers=headers)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The server to ask, and how to ask it."""

    caller: Callable[[MatrixServers], Caller]
    place: str = "open"  # of MatrixServers


def _plain(places: MatrixServers) -> Caller:
    return Caller(url=places.open.url)


BUSY = "a busy machine"
CONDITIONS = {
    "nothing else": Condition(caller=_plain),
    "an API key": Condition(
        caller=lambda places: Caller(
            url=places.keyed.url.replace("0.0.0.0", "127.0.0.1"), headers={"x-api-key": KEY}
        ),
        place="keyed",
    ),
    "another host's name": Condition(caller=_other_host, place="keyed"),
    "a proxy in front": Condition(caller=lambda places: Caller(url=places.proxy)),
    "a tenant header": Condition(
        caller=lambda places: replace(_plain(places), headers={"X-Holdfast-Tenant": "one"})
    ),
    BUSY: Condition(caller=_plain),
    "a slow disk and a read-only home": Condition(
        caller=lambda places: Caller(url=places.restricted.url), place="restricted"
    ),
    "a cache salt": Condition(caller=lambda places: replace(_plain(places), salt="of one chat")),
}


def is_daily(condition: str, feature: str) -> bool:
    """Whether `make test` runs a pair: every fourth feature, with another first one for each
    condition, and none beside busy processes.
    """
    place = list(CONDITIONS).index(condition) + list(FEATURES).index(feature)
    return condition != BUSY and place % DAILY_SHARE == 0


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MatrixServers]:
    with contextlib.ExitStack() as stack:
        yield MatrixServers(tmp_path_factory.mktemp("conditions"), stack)


@pytest.mark.parametrize(
    ("condition", "feature"),
    [
        pytest.param(
            condition, feature, marks=() if is_daily(condition, feature) else pytest.mark.slow
        )
        for condition in CONDITIONS
        for feature in FEATURES
    ],
)
def test_features_work_in_every_condition(
    places: MatrixServers, condition: str, feature: str
) -> None:
    expected = places.expected(feature)
    if condition == BUSY:
        assert places.beside_busy_processes(feature) == expected
    else:
        assert FEATURES[feature](CONDITIONS[condition].caller(places)) == expected


def test_streams_equal_whole_answers(places: MatrixServers) -> None:
    assert places.expected("streams") == places.expected("chat")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["open", "keyed", "restricted"])
def test_a_restart_loses_nothing_in_any_condition(places: MatrixServers, name: str) -> None:
    server: ServerProcess = getattr(places, name)
    callers = [
        condition.caller(places) for condition in CONDITIONS.values() if condition.place == name
    ]
    kept = [Kept.by(caller) for caller in callers]
    server.restart()
    for caller, before in zip(callers, kept, strict=True):
        before.check(caller)

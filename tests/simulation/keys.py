"""The API keys of the simulated server: the file, its changes while the server runs, and which keys and
limits can be in force at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.front.run.front import reload_keys
from holdfast.front.server.access import KeyFile, named_key
from tests.simulation.actions import KeyChange, Turn

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

SERVER_KEY = "a-key-of-the-simulation"
SECRETS = {name: f"sk-holdfast-{name}" for name in ("alice", "bob", "ops")}  # of named keys
BROKEN_SECONDS = 0.5  # until a broken file is repaired
RETRY_SECONDS = 0.1  # until a server that starts gets the signal
ADDRESSES = {"alice": "10.0.0.1"}  # of clients with this key; others share one


@dataclass
class _State:
    """Valid keys, with the limit of each. The state may be in force from `begins_at` to `ends_at`."""

    limits: Mapping[str, int | None]
    begins_at: float
    ends_at: float = math.inf


class Keys:
    """The API keys of one world."""

    def __init__(self, simulation: Simulation, path: Path) -> None:
        self._simulation = simulation
        self._options = simulation.options
        self.path = path  # not on the simulated disk
        limits = {"alice": self._options["alice_requests"], "bob": None, "ops": None}
        self._is_whole = True  # the file
        self._states = [_State(limits, simulation.world.now)]
        if self._options["keys"]:
            self._write(limits)

    # -- the senders of requests

    def sender(self, key: str) -> str:
        """The identity that the server derives from a client's key: the name of a known key, "server"
        for the server's own key, "wrong", or "" if the server has no keys.
        """
        if not (self._options["keys"] or self._options["has_key"]):
            return ""
        if key == "wrong" or (key and self._options["keys"]):
            return key
        return "ops" if self._options["keys"] else "server"

    def headers(self, key: str) -> dict[str, str]:
        """The headers with a client's API key."""
        sender = self.sender(key)
        secret = {"server": SERVER_KEY, "wrong": "a-wrong-key"}.get(sender) or SECRETS.get(sender)
        return {"authorization": f"Bearer {secret}"} if secret else {}

    def address(self, key: str) -> str:
        """The address of clients with this key. Without named keys, all have the same."""
        here = "127.0.0.1"
        return ADDRESSES.get(key, here) if self._options["keys"] else here

    def holders(self, turn: Turn) -> Mapping[str, int]:
        """Whom limits on a request apply to, in the server's words, with the limits of the settings; 0:
        none.
        """
        names = {"": "", "server": "this API key"}
        sender = self.sender(turn.key)
        found = {f"the address {self.address(turn.key)}": self._options["address_requests"]}
        if sender:
            found[names.get(sender, f"the key {sender}")] = self._options["key_requests"]
        return found

    # -- what is in force

    def may_pass(self, key: str, *, since: float) -> bool:
        """Whether a request that was sent then may have a valid key."""
        sender = self.sender(key)
        if sender not in SECRETS:
            return sender != "wrong"
        return any(sender in each.limits for each in self._since(since))

    def may_fail(self, key: str, *, since: float) -> bool:
        """Whether the key of a request that was sent then may be invalid."""
        sender = self.sender(key)
        if sender not in SECRETS:
            return sender == "wrong"
        return any(sender not in each.limits for each in self._since(since))

    def limits(self, turn: Turn, *, since: float) -> Mapping[str, tuple[int, int]]:
        """The lowest and the highest limit of each holder that were in force since then; 0: none."""
        found = {}
        sender = self.sender(turn.key)
        for holder, usual in self.holders(turn).items():
            own = [usual]
            if holder == f"the key {sender}":
                states = [each for each in self._since(since) if sender in each.limits]
                limits = [each.limits[sender] for each in states]
                own = [usual if limit is None else limit for limit in limits]
            given = [limit for limit in own if limit]
            if given:
                found[holder] = (min(given), max(given) if len(given) == len(own) else 0)
        return found

    def _since(self, at: float) -> list[_State]:
        return [each for each in self._states if each.ends_at >= at]

    def replace(self) -> None:
        """Only the latest keys are in force from now on: the server has read the file, or has ended."""
        for state in self._states[:-1]:
            state.ends_at = min(state.ends_at, self._simulation.world.now)

    # -- the file

    def change(self, change: KeyChange) -> None:
        """Change the file, and let the server read it again."""
        limits = dict(self._states[-1].limits)
        if not self._options["keys"]:
            return
        match change.kind:
            case "remove":
                limits.pop(change.key, None)
            case "add":
                limits.setdefault(change.key, None)
            case "limit" if change.key in limits:
                limits[change.key] = change.limit
            case "limit":
                pass
            case kind:
                self._break(kind)
                self._hang_up()
                self._simulation.world.after(BROKEN_SECONDS, self._repair)
                return
        self._states.append(_State(limits, self._simulation.world.now))
        self._repair()

    def _break(self, kind: str) -> None:
        self._is_whole = False
        content = self.path.read_bytes() if self.path.exists() else b""
        match kind:
            case "half":
                self.path.write_bytes(content[: len(content) // 2])
            case "damaged":
                self.path.write_bytes(b'{"format": 1}')
            case "readable" if content:
                self.path.chmod(0o644)
            case "gone":
                self.path.unlink(missing_ok=True)

    def _repair(self) -> None:
        """Write the file, and let the server read it."""
        self._write(self._states[-1].limits)
        self._is_whole = True
        self._hang_up()

    def _hang_up(self) -> None:
        """Send SIGHUP to the server."""
        front, world = self._simulation.front, self._simulation.world
        app = front.app
        if front.process.is_dead:
            return  # the next one reads the file when it starts
        if app is None:  # it starts or stops
            world.after(RETRY_SECONDS, self._hang_up)
            return

        def reload() -> None:
            reload_keys(app.state.services.access.keys)
            if self._is_whole:
                self.replace()

        front.loop.call_soon_threadsafe(reload)

    def _write(self, limits: Mapping[str, int | None]) -> None:
        keys = tuple(
            named_key(
                name,
                SECRETS[name],
                is_admin=name == "ops",
                priority="interactive",
                max_requests=limit,
            )
            for name, limit in limits.items()
        )
        self.path.write_bytes(msgspec.json.encode(KeyFile(keys=keys)))
        self.path.chmod(0o600)

"""A real worker's loop driven step by step, with all accounts checked against the arrays after
each.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from holdfast.wire.commands import Command, SequenceRequest
from holdfast.wire.events import Finished
from holdfast.worker.engine import sequence
from holdfast.worker.engine.plan import KeepPolicy
from holdfast.worker.kv import full
from holdfast.worker.kv.live import LiveState
from holdfast.worker.loop import cache_client
from holdfast.worker.prefix import cache, live_tier, lookup
from tests.fakes.caching_worker import CachingWorker, greedy, tiny_worker
from tests.fakes.script_inbox import ScriptInbox

SMALL_BLOCK = 16
MOST_STEPS = 3000


def make_blocks_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few tokens, so that short prompts have several, are shared, and frozen parts are
    merged.
    """
    monkeypatch.setattr(cache, "BLOCK_TOKENS", SMALL_BLOCK)
    monkeypatch.setattr(cache_client, "BLOCK_TOKENS", SMALL_BLOCK)
    monkeypatch.setattr(live_tier, "BLOCK_TOKENS", SMALL_BLOCK)
    monkeypatch.setattr(lookup, "BLOCK_TOKENS", SMALL_BLOCK)
    monkeypatch.setattr(live_tier, "LEAST_SHARED_TOKENS", SMALL_BLOCK)
    small = functools.partial(KeepPolicy, block_tokens=SMALL_BLOCK)
    monkeypatch.setattr(sequence, "KeepPolicy", small)
    monkeypatch.setattr(cache, "BOUNDARY_TOKENS", 2 * SMALL_BLOCK)
    monkeypatch.setattr(cache, "TEND_SECONDS", 0.0)
    monkeypatch.setattr(cache_client, "LEAST_SHARED_TOKENS", SMALL_BLOCK)
    monkeypatch.setattr(full, "_SHORT_PART", SMALL_BLOCK // 2)


@functools.cache
def answer_alone(name: str, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """The answer to a request on a worker without a cache."""
    return tuple(
        tiny_worker(name=name)
        .serve([[greedy("alone", prompt, max_tokens=max_tokens)]])
        .tokens("alone")
    )


class SteppedWorker:
    """One life of a worker, or several with one folder."""

    def __init__(self, name: str, *, folder: Path | None = None, **more: Any) -> None:
        self.name, self._folder, self._more = name, folder, more
        self.sent: dict[str, SequenceRequest] = {}
        self.inbox = ScriptInbox([])
        self._nothing_comes = threading.Event()
        self.begin()

    def begin(self) -> None:
        """Start a worker with the store's contents."""
        self.worker = self.make()
        self.loop = self.worker.loop(self.inbox)

    def make(self) -> CachingWorker:
        return tiny_worker(self._folder, name=self.name, **self._more)

    def end(self) -> None:
        """Shut it down, ending all requests."""
        self.loop._shut_down()
        self.check()

    def send(self, *commands: Command) -> None:
        """Commands arrive together."""
        self.sent |= {
            command.request_id: command
            for command in commands
            if isinstance(command, SequenceRequest)
        }
        self.loop._obey(list(commands))
        self.loop._send()
        self.check()

    def step(self) -> bool:
        """One iteration of the loop; returns whether there was something to do."""
        self.loop._quantize_running(self.worker.memory)
        is_busy = self.loop._advance()
        self.loop._send()
        if not is_busy:
            self.loop._flush_if_idle()
        self.check()
        return is_busy

    def run_to_end(self, *, but: Sequence[str] = ()) -> None:
        """Until all requests have ended except those expected to wait for ever."""
        for _ in range(MOST_STEPS):
            if not set(self.open()) - set(but):
                return
            if not self.step():
                self._nothing_comes.wait(0.0005)  # for the disk
        raise AssertionError(f"these never end: {self.open()}")

    def open(self) -> list[str]:
        """Requests without an end."""
        return list(self.inbox.open_requests())

    def ended(self) -> list[str]:
        """Requests that were answered."""
        return [event.request_id for event in self.inbox.events if isinstance(event, Finished)]

    def check_answer(self, request_id: str) -> None:
        """It equals the answer alone; a cancelled one equals its beginning."""
        request, tokens = self.sent[request_id], tuple(self.inbox.tokens(request_id))
        alone = answer_alone(self.name, tuple(request.prompt_token_ids), request.max_tokens)
        reason = self.inbox.finished(request_id).reason.value
        assert reason in ("length", "cancelled"), (
            request_id,
            reason,
            self.inbox.finished(request_id).error,
        )
        assert tokens == (alone if reason == "length" else alone[: len(tokens)]), request_id

    def check(self) -> None:
        """All accounts agree with each other and with the arrays."""
        worker = self.worker
        self.loop.check_invariants()
        worker.index.check_invariants()
        self.loop._cache._count_held(worker.cache)  # as the next step begins
        chains = list(worker.cache.live._chains)
        assert all(chain.state is not None for chain in chains), "a live chain without a state"
        for chain in chains:
            for key in chain.keys:
                assert chain in worker.index._holders[key], "a key that does not know its holder"
                start, tokens = worker.index.run_of(key)
                assert start + tokens <= chain.state.tokens, "a holder that has not all of a block"
        for holders in worker.index._holders.values():
            assert holders <= set(chains), "a holder that is not live"
        held, parked = held_and_parked(
            [c.state for c in chains if not c.is_parked], [c.state for c in chains if c.is_parked]
        )
        own = sum(
            chain.held_tokens * chain.state.bytes_per_token()
            for chain in chains
            if not chain.is_parked and not chain.state.can_share
        )
        assert worker.cache.live.held.total_bytes == held + parked + own, (
            "held memory is miscounted"
        )
        assert worker.cache.live.held.parked_bytes == parked, "parked memory is miscounted"
        running = [chain for chain in chains if not chain.is_parked and chain.state.can_share]
        assert all(chain.held_tokens == chain.state.frozen_tokens for chain in running), (
            "frozen and held tokens differ"
        )
        for chain in running:
            sequence = self.loop._ledger.find(chain.request_id)
            assert (
                sequence is None
                or not sequence.scheduled.is_running
                or sequence.scheduled.held_tokens == chain.held_tokens
            ), "the scheduler holds other tokens apart"
        assert worker.cache.live.held.parked == sum(chain.is_parked for chain in chains)


def held_and_parked(
    running: Sequence[LiveState | None], parked: Sequence[LiveState | None]
) -> tuple[int, int]:
    """Bytes frozen by running states, and those of parked ones in addition."""
    frozen = {
        id(a): a for each in running if each for leaf in each.leaves for a in leaf.frozen_arrays()
    }
    all_parked = {id(a): a for each in parked if each for a in each.arrays()}
    beside = [array for key, array in all_parked.items() if key not in frozen]
    return sum(map(_nbytes, frozen.values())), sum(map(_nbytes, beside))


def _nbytes(array: mx.array) -> int:
    return array.nbytes

"""What was read stays read: asks the library when a request arrives, fetches from disk, keeps what sequences leave behind.

Device thread only. The store's threads see bytes, never arrays.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import mlx.core as mx

from holdfast.cache.addition import Addition
from holdfast.cache.codec import (
    Codec,
    PackedRun,
    cut,
    pack,
    run_from_bytes,
    run_to_bytes,
    state_from_bytes,
    state_to_bytes,
    unpack,
)
from holdfast.cache.hold import Hold
from holdfast.cache.library import Library
from holdfast.cache.reuse import ReusePlan
from holdfast.cache.snapshot import KVRun, RunForm, SnapshotMismatch, StateSnapshot, form_of
from holdfast.engine.keeping import Kept, Prefix
from holdfast.engine.plan import KeepPolicy
from holdfast.messages import MemoryFigures, MemoryReport
from holdfast.store.block import Block, ReadFailed
from holdfast.store.keys import BlockKey
from holdfast.store.store import BlockStore
from holdfast.worker.memory_report import figures_of, report_of

RUN_TOKENS = 256
MOST_PARTINGS = 8
BOUNDARY_TOKENS = 1024  # between states of a long prompt, for models that resume only there
TEND_SECONDS = 0.25
OFFER_AGAIN_SECONDS = 30.0
BLOCKS_OFFERED_AGAIN = 64
BLOCKS_AT_A_TIME = 8

Payload: TypeAlias = PackedRun | StateSnapshot

logger = logging.getLogger("holdfast.memory")


@dataclass(slots=True, eq=False)
class Recall:
    """What one request can begin from. Holds it in memory until it is released."""

    tokens: array[int]
    salt: str
    plan: ReusePlan
    hold: Hold
    asked_at: float
    awaited: dict[BlockKey, Future[Block]] = field(default_factory=dict)
    fetched: dict[BlockKey, Payload] = field(default_factory=dict)
    restored_seconds: float = 0.0

    @property
    def cached_tokens(self) -> int:
        """Tokens that need not be read."""
        return self.plan.tokens

    def report(self) -> MemoryReport:
        """What was found, and why not more."""
        return report_of(self.plan, restore_seconds=self.restored_seconds)

    def release(self) -> None:
        """Let the memory go; what was fetched stays where the library put it."""
        self.hold.release()
        self.fetched.clear()


class Memory:
    """The library of one model, its store, and the way between them and the engine."""

    def __init__(
        self, library: Library, *, store: BlockStore | None, run_form: RunForm, resumes_anywhere: bool, codec: Codec = "native"
    ) -> None:
        self._library, self._store = library, store
        self._run_form, self._resumes_anywhere, self._codec = run_form, resumes_anywhere, codec
        self._tended_at = self._offered_at = 0.0
        loaded = library.load()
        if loaded.placed:
            logger.info("the store has %d blocks of this model", loaded.placed)

    @property
    def library(self) -> Library:
        """The book of what is kept."""
        return self._library

    @property
    def store(self) -> BlockStore | None:
        """The disk side, if a folder is set."""
        return self._store

    def boundaries(self, prompt_tokens: int, partings: Sequence[int] = ()) -> tuple[int, ...]:
        """Where spans of a prompt have to end so that a state can be taken: every so often, at partings, before the last token.

        The last token is read again in any case, so that a repeated prompt can begin right before it.
        """
        if self._resumes_anywhere:
            return ()
        marks = {*range(BOUNDARY_TOKENS, prompt_tokens, BOUNDARY_TOKENS), *partings[:MOST_PARTINGS], prompt_tokens - 1}
        return tuple(sorted(mark for mark in marks if 0 < mark < prompt_tokens))

    def policy(self, prompt_tokens: int, partings: Sequence[int] = ()) -> KeepPolicy:
        """What the engine is to copy out of a sequence with such a prompt while it runs."""
        marks = self.boundaries(prompt_tokens, partings) or (prompt_tokens,)
        return KeepPolicy(run_tokens=RUN_TOKENS, boundaries=frozenset(marks))

    def recall(self, tokens: array[int], *, salt: str = "") -> Recall:
        """Ask what a sequence that knows `tokens` can begin from, and begin to fetch what of it is on disk."""
        plan = self._plan(tokens, salt)
        recall = Recall(tokens=tokens, salt=salt, plan=plan, hold=self._library.hold(plan.keys), asked_at=time.perf_counter())
        self._fetch(recall)
        return recall

    def is_settled(self, recall: Recall) -> bool:
        """Whether everything is in RAM. What cannot be read is forgotten, and the request begins from what remains.

        Takes a few blocks at a time, so that streams that are decoding meanwhile hardly feel it.
        """
        done = [key for key, future in recall.awaited.items() if future.done()]
        if not all(self._take(recall, key) for key in done[:BLOCKS_AT_A_TIME]):
            self._plan_again(recall)
            return False
        if recall.awaited:
            return False
        if not self._gather(recall):  # something was forgotten on another request's account
            self._plan_again(recall)
            return False
        if not recall.restored_seconds:
            recall.restored_seconds = time.perf_counter() - recall.asked_at
        return True

    def _take(self, recall: Recall, key: BlockKey) -> bool:
        """Take a block that was read; False when it cannot be used."""
        try:
            payload = self._payload_of(recall.awaited.pop(key).result())
        except (ReadFailed, SnapshotMismatch) as failure:
            logger.warning("a stored block cannot be used, its tokens are read again: %s", failure)
            self._library.unreadable((key,))
            return False
        recall.fetched[key] = payload
        self._library.restored(key, payload)
        return True

    def _gather(self, recall: Recall) -> bool:
        """Take hold of every payload of the plan, whatever becomes of it in the library; False when one is not there."""
        for key in recall.plan.keys:
            payload = recall.fetched.get(key) or self._library.payload(key)
            if not isinstance(payload, PackedRun | StateSnapshot):
                return False
            recall.fetched[key] = payload
        return True

    def prefix(self, recall: Recall) -> Prefix | None:
        """What to give the engine; None when there is nothing. Counts as a use."""
        plan = recall.plan
        if plan.tokens == 0:
            return None
        runs: list[KVRun] = []
        for piece in plan.pieces:
            kept = recall.fetched[piece.key]
            assert isinstance(kept, PackedRun)
            part = unpack(cut(kept, offset=piece.offset, tokens=piece.tokens))
            runs.append(KVRun(start=piece.start, tokens=piece.tokens, arrays=part.arrays))
        self._library.accept(plan)
        return Prefix(runs=tuple(runs), state=self._state_of(recall))

    def _state_of(self, recall: Recall) -> StateSnapshot | None:
        if recall.plan.state is None:
            return None
        state = recall.fetched[recall.plan.state.key]
        assert isinstance(state, StateSnapshot)
        return state

    def keep(self, tokens: array[int], kept: Kept, *, salt: str = "") -> None:
        """Take in what a sequence that knows `tokens` has left behind; longer than what it knows is not kept."""
        for run in kept.runs:
            self._keep_run(tokens, run, salt)
        if kept.state is not None:
            self.keep_state(tokens, kept.state, salt=salt)

    def keep_state(self, tokens: array[int], state: StateSnapshot, *, salt: str) -> None:
        """Take in a state that has seen the first of these tokens; one that has seen more is not kept."""
        if 0 < state.position <= len(tokens):
            addition = self._library.add_state(tokens[: state.position], payload=state, salt=salt)
            if addition.is_new:
                self._save(addition, state)

    def tend(self) -> None:
        """Now and then: learn from the store what became durable and what was lost."""
        now = time.perf_counter()
        if self._store is None or now - self._tended_at < TEND_SECONDS:
            return
        self._tended_at = now
        changes = self._store.changes()
        if changes.stored or changes.lost:
            self._library.disk_changed(stored=changes.stored, lost=changes.lost)
        if now - self._offered_at >= OFFER_AGAIN_SECONDS:
            self._offered_at = now
            self._offer_again()

    def _offer_again(self) -> None:
        """Give the store once more what it had no room or no disk for."""
        for addition in self._library.unsaved()[:BLOCKS_OFFERED_AGAIN]:
            payload = self._library.payload(addition.key)
            if isinstance(payload, PackedRun | StateSnapshot):
                self._library.save_again(addition)
                self._save(addition, payload)

    def figures(self) -> MemoryFigures:
        """What is kept."""
        return figures_of(self._library.statistics(), None if self._store is None else self._store.statistics())

    def close(self) -> None:
        """Write what is queued and end the store's threads."""
        if self._store is not None:
            self._store.close()

    def _plan(self, tokens: array[int], salt: str) -> ReusePlan:
        return self._library.plan(tokens, salt=salt, resumable_anywhere=self._resumes_anywhere, limit=len(tokens) - 1)

    def _plan_again(self, recall: Recall) -> None:
        recall.hold.release()
        recall.plan = self._plan(recall.tokens, recall.salt)
        recall.hold = self._library.hold(recall.plan.keys)
        self._fetch(recall)

    def _fetch(self, recall: Recall) -> None:
        wanted = [key for key in recall.plan.to_read if key not in recall.fetched]
        recall.awaited = {key: future for key, future in recall.awaited.items() if key in wanted}
        if self._store is not None:
            recall.awaited |= {key: self._store.read(key) for key in wanted if key not in recall.awaited}

    def _payload_of(self, block: Block) -> Payload:
        parts = tuple(memoryview(part) for part in block.parts)
        if block.kind == "state":
            return state_from_bytes(block.meta, parts)
        packed = self.run_of(block.meta, parts)
        if packed.tokens != len(block.token_ids):
            raise SnapshotMismatch("a stored run has another length than its tokens")
        return packed

    def run_of(self, meta: bytes, parts: Sequence[memoryview]) -> PackedRun:
        """A run of this model out of its bytes. Raises SnapshotMismatch for what is none."""
        packed = run_from_bytes(meta, parts)
        if form_of(unpack(packed)) != self._run_form or any(array.shape[2] != packed.tokens for array in packed.arrays):
            raise SnapshotMismatch("a run is of another form than this model's")
        return packed

    def _keep_run(self, tokens: array[int], run: KVRun, salt: str) -> None:
        if min(run.start + run.tokens, len(tokens)) > run.start:
            self.keep_packed(tokens[: run.start + run.tokens], pack(run, self._codec), salt=salt)

    def keep_packed(self, tokens: array[int], run: PackedRun, *, salt: str) -> None:
        """Take in what is not there yet of a run that begins at its `start` among `tokens`."""
        end = min(run.start + run.tokens, len(tokens))
        start = max(run.start, self._library.missing(tokens[:end], salt=salt))
        if start >= end:
            return
        packed = cut(run, offset=start - run.start, tokens=end - start)
        mx.eval(packed.arrays)
        addition = self._library.add_run(tokens[:end], start=start, payload=packed, salt=salt)
        if addition.is_new:
            self._save(addition, packed)

    def _save(self, addition: Addition, payload: Payload) -> None:
        if self._store is None:
            return
        meta, parts = run_to_bytes(payload) if isinstance(payload, PackedRun) else state_to_bytes(payload)
        self._store.put(
            Block(
                key=addition.key,
                parent_key=addition.parent_key,
                parent_tokens=addition.parent_tokens,
                kind=addition.kind,
                start=addition.start,
                token_ids=addition.token_ids,
                meta=meta,
                parts=parts,
            )
        )

"""What other threads hand to the I/O thread: blocks, within bounds, and tasks, in one order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Literal, TypeAlias, TypeVar

from holdfast.store.block import BlockKey, StoreChanges, StoredBlock

Answer = TypeVar("Answer")
Task: TypeAlias = Callable[[], None]
Offer: TypeAlias = Literal["taken", "held already", "full", "closed"]

# that nobody has asked for yet; older ones are forgotten: reading tells, too
_MOST_CHANGES = 1 << 17


class Mailbox:
    """Safe from any thread.

    Blocks are held, and can be read from here, until the I/O thread has finished with them.
    """

    def __init__(self, *, most_bytes: int, most_blocks: int) -> None:
        self._most_bytes, self._most_blocks = most_bytes, most_blocks
        self._changed = threading.Condition()
        self._waiting: deque[StoredBlock | Task] = deque()
        self._held: dict[BlockKey, StoredBlock] = {}
        self._held_bytes = 0
        self._closed = False
        self._unanswered: set[Future[Any]] = set()
        self._stored: deque[BlockKey] = deque(maxlen=_MOST_CHANGES)
        self._lost: deque[BlockKey] = deque(maxlen=_MOST_CHANGES)
        self.refused_blocks = 0

    def offer(self, block: StoredBlock) -> Offer:
        """Queue a block for writing, if there is room.

        One block alone is always taken, however large it is.
        """
        size = block.nbytes
        with self._changed:
            if self._closed:
                return "closed"
            if block.key in self._held:
                return "held already"
            full = (
                self._held_bytes + size > self._most_bytes or len(self._held) >= self._most_blocks
            )
            if full and self._held:
                self.refused_blocks += 1
                self._lost.append(block.key)
                return "full"
            self._held[block.key] = block
            self._held_bytes += size
            self._waiting.append(block)
            self._changed.notify()
        return "taken"

    def send(self, task: Task) -> bool:
        """Queue a task behind everything that was handed over before. False when the box is closed."""
        with self._changed:
            if self._closed:
                return False
            self._waiting.append(task)
            self._changed.notify()
        return True

    def ask(self, work: Callable[[], Answer]) -> Future[Answer]:
        """Queue a question likewise; its answer is cancelled when the box is closed.

        A failed assertion is the asker's business alone, any other exception the thread's, too.
        """
        answer: Future[Answer] = Future()

        def reply() -> None:
            self._unanswered.discard(answer)
            try:
                answer.set_result(work())
            except AssertionError as error:
                answer.set_exception(error)
            except BaseException as error:
                answer.set_exception(error)
                raise

        self._unanswered.add(answer)
        if not self.send(reply):
            self._unanswered.discard(answer)
            answer.cancel()
        return answer

    def take(self, timeout_seconds: float | None) -> StoredBlock | Task | None:
        """The next block or task; None when nothing came in time, or when the box is closed and
        empty.
        """
        with self._changed:
            if not self._waiting and not self._closed:
                self._changed.wait(timeout_seconds)
            return self._waiting.popleft() if self._waiting else None

    def take_block(self) -> StoredBlock | None:
        """The next thing if it is a block; never waits."""
        with self._changed:
            if not self._waiting or not isinstance(self._waiting[0], StoredBlock):
                return None
            block = self._waiting.popleft()
            assert isinstance(block, StoredBlock)
            return block

    def held(self, key: BlockKey) -> StoredBlock | None:
        """A block that is queued or being written."""
        with self._changed:
            return self._held.get(key)

    def finish(self, keys: Iterable[BlockKey], *, stored: bool) -> None:
        """Let go of blocks that are durable now (`stored`) or will never be."""
        with self._changed:
            for key in keys:
                block = self._held.pop(key, None)
                if block is not None:
                    self._held_bytes -= block.nbytes
                (self._stored if stored else self._lost).append(key)

    def lose(self, keys: Iterable[BlockKey]) -> None:
        """Note that blocks are not in the store any more."""
        with self._changed:
            self._lost.extend(keys)

    def changes(self) -> StoreChanges:
        """What was stored and lost since the last call."""
        with self._changed:
            changes = StoreChanges(stored=tuple(self._stored), lost=tuple(self._lost))
            self._stored.clear()
            self._lost.clear()
        return changes

    def load(self) -> tuple[int, int]:
        """Blocks and bytes that are held."""
        with self._changed:
            return len(self._held), self._held_bytes

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._closed

    def close(self) -> None:
        """Take nothing more; what is in the box is still handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Take nothing more, let go of everything: nobody shall wait for an answer for ever."""
        self.close()
        with self._changed:
            self._waiting.clear()
        for answer in tuple(self._unanswered):
            answer.cancel()

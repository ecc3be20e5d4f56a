"""What of a sequence's state is copied out while it runs, so that others, later turns and restarts
can begin from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import mlx.core as mx

from holdfast.wire.requests import RequestId
from holdfast.worker.engine.plan import KeepPolicy
from holdfast.worker.engine.sequence import EngineSequence
from holdfast.worker.kv.snapshot import (
    KVBlock,
    StateCheckpoint,
    all_finite,
    copy_block,
    copy_checkpoint,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Snapshots of one sequence that a step has made. The blocks adjoin what was kept of it before."""

    request_id: RequestId
    blocks: tuple[KVBlock, ...]
    state: StateCheckpoint | None = None
    # bool []: neither NaN nor infinity is in it; evaluated with the rest
    finite: mx.array = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "finite", all_finite(self._snapshots()))

    @property
    def is_finite(self) -> bool:
        """Whether all of it are finite numbers.

        What is not must not be kept, whatever the logits were: it would be restored.
        """
        return bool(self.finite.item())

    def arrays(self) -> Iterator[mx.array]:
        """What has to be evaluated."""
        yield from self._snapshots()
        yield self.finite

    def _snapshots(self) -> Iterator[mx.array]:
        for block in self.blocks:
            yield from block.arrays
        if self.state is not None:
            yield from self.state.arrays


def keep_due(sequence: EngineSequence, policy: KeepPolicy) -> Kept | None:
    """Copy out what is due after the tokens that were appended last; None when nothing is. Lazy."""
    is_boundary = sequence.live.tokens in policy.boundaries
    blocks = list(_full_blocks(sequence, policy.block_tokens))
    if is_boundary:
        return _kept_up_to_now(sequence, blocks)
    return Kept(request_id=sequence.request.request_id, blocks=tuple(blocks)) if blocks else None


def keep_everything(sequence: EngineSequence) -> Kept:
    """Copy out all that has not been kept yet, and the state as it is. Lazy."""
    # one that was read alone has kept nothing on its way
    block_tokens = (sequence.keep or KeepPolicy()).block_tokens
    return _kept_up_to_now(sequence, list(_full_blocks(sequence, block_tokens)))


def _kept_up_to_now(sequence: EngineSequence, blocks: list[KVBlock]) -> Kept:
    if sequence.live.tokens > sequence.kept:
        blocks.append(_next_block(sequence, sequence.live.tokens - sequence.kept))
    state = copy_checkpoint(sequence.live.layers, position=sequence.live.tokens)
    return Kept(
        request_id=sequence.request.request_id,
        blocks=tuple(blocks),
        state=state if state.layers else None,
    )


def _full_blocks(sequence: EngineSequence, block_tokens: int) -> Iterator[KVBlock]:
    while sequence.live.tokens - sequence.kept >= block_tokens:
        yield _next_block(sequence, block_tokens)


def _next_block(sequence: EngineSequence, tokens: int) -> KVBlock:
    block = copy_block(sequence.live.layers, start=sequence.kept, tokens=tokens)
    sequence.kept += tokens
    return block

"""What the admission of a prompt that is in the cache costs on the host: look-up, submission and
the bookkeeping of a restore.

    python -m tools.measure_admission [--tokens 16000] [--repeats 200]

No model and no device: the index is filled by this script with payloads that only weigh something.
What a restore does with arrays is not in it; packing the prompt's token ids, which happens once for
each request, is shown apart.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.config import SchedulerSettings
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import TOKEN_BYTES, SamplingParams, TokenIds
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.loop.sequences import LiveSequence
from holdfast.worker.prefix.chain import pack_tokens
from holdfast.worker.prefix.in_flight import InFlightPrefills
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.prefix.lookup import Lookup
from holdfast.worker.scheduler.admission import SequenceCosts
from holdfast.worker.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class Weight:
    """A payload without content."""

    nbytes: int = 1


def filled_index(prompts: list[tuple[int, ...]]) -> PrefixIndex:
    """An index that has all of these prompts."""
    index = PrefixIndex(fingerprint="a model", ram_budget_bytes=1 << 30)
    for prompt in prompts:
        packed, cursor = pack_tokens(prompt), index.cursor()
        index.advance(cursor, packed, end=len(prompt))
        while cursor.position < len(prompt):
            at = cursor.position * TOKEN_BYTES
            index.insert(cursor, packed[at : at + BLOCK_TOKENS * TOKEN_BYTES], Weight())
    return index


def a_scheduler() -> Scheduler:
    """One that admits at once."""
    costs = SequenceCosts(kv_bytes_per_token=1, fixed_bytes_per_sequence=0)
    settings = SchedulerSettings(step_tokens=2048)
    return Scheduler(
        settings, costs, budget_bytes=1 << 40, context_tokens=1 << 20, mixes_chunks=True
    )


def admit(
    index: PrefixIndex, scheduler: Scheduler, in_flight: InFlightPrefills, sequence: LiveSequence
) -> int:
    """All that the host does for one request between its arrival and its first step, but for
    arrays; cached tokens.
    """
    request, chain = sequence.request, bytes(sequence.chain)
    limit = len(chain) // TOKEN_BYTES - 1
    scheduler.submit(
        request.request_id,
        prompt_tokens=len(request.prompt_token_ids),
        max_tokens=8,
        is_ready=False,
    )
    plan = index.plan(chain, resumable_anywhere=True, limit=limit)
    lookup = Lookup(
        chain=chain, tenant="", kv_bits="native", plan=plan, hold=index.pinned(plan), asked_at=0.0
    )
    in_flight.ahead_of(chain, plan.tokens, limit=limit)
    in_flight.announce(request.request_id, chain, have=plan.tokens)
    lookup.fetched = {
        key: payload for key in plan.keys if (payload := index.payload(key)) is not None
    }
    scheduler.make_ready(request.request_id, plan.tokens)
    decision = scheduler.next_step()
    assert len(decision.admitted) == 1
    assert all(piece.key in lookup.fetched for piece in plan.blocks)
    index.accept(plan)
    report = lookup.report(lookup_seconds=0.0, waited_seconds=0.0, restore_seconds=0.0)
    lookup.release()
    return report.cached_tokens


def milliseconds(work: Callable[[], object], *, repeats: int) -> float:
    """The median of many runs."""
    took: list[float] = []
    for _ in range(repeats):
        began_at = time.perf_counter()
        work()
        took.append(time.perf_counter() - began_at)
    return statistics.median(took) * 1e3


def main() -> int:
    """Print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(150_000) for _ in range(options.tokens)) for _ in range(4)]
    index = filled_index(prompts)
    request = SequenceRequest(
        request_id="a",
        prompt_token_ids=TokenIds.of(prompts[1]),
        max_tokens=8,
        sampling=SamplingParams(temperature=0.0, seed=0),
    )
    sequence = LiveSequence(request=request, submitted_at=0.0)

    def once() -> None:
        assert admit(index, a_scheduler(), InFlightPrefills(), sequence) == options.tokens - 1

    packing = milliseconds(
        lambda: LiveSequence(request=request, submitted_at=0.0), repeats=options.repeats
    )
    sys.stdout.write(f"{options.tokens} tokens, all of them cached; medians of {options.repeats}\n")
    sys.stdout.write(f"packing the token ids: {packing:.3f} ms\n")
    sys.stdout.write(
        f"admission:             {milliseconds(once, repeats=options.repeats):.3f} ms\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

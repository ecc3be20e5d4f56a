"""The index over a real store: the payloads are the tokens themselves, so that a wrong one is
detected.
"""

from __future__ import annotations

import random
from pathlib import Path

from holdfast.store.block import BadBlock, StoredBlock, fingerprint_id
from holdfast.store.store import BlockStore
from holdfast.wire.events import CacheOutcome
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.prefix.chain import pack_tokens
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.prefix.lookup import Shortfall
from tests.fakes.chains import plan_of, stored
from tests.fakes.payloads import Weight

FINGERPRINT = "model"


def read_chain(index: PrefixIndex, store: BlockStore, chain: list[int], tenant: str) -> None:
    cursor, packed = stored(index, chain, tenant=tenant), pack_tokens(chain)
    while cursor.position < len(chain):
        own = packed[4 * cursor.position : 4 * (cursor.position + BLOCK_TOKENS)]
        block = index.insert(cursor, own, Weight(len(own) // 4))
        assert block is not None
        store.put(StoredBlock(block=block, parts=(own + tenant.encode(),)))


def restored_tokens(
    library: PrefixIndex, store: BlockStore, chain: list[int], tenant: str
) -> bytes:
    """Payloads restored for a sequence that begins with the chain, all from disk."""
    plan = plan_of(library, chain, tenant=tenant)
    assert plan.to_read == plan.keys
    tokens = b""
    for block in plan.blocks:
        (part,) = store.read(block.key).result().parts
        whole = bytes(part).removesuffix(tenant.encode())
        tokens += whole[len(tokens) - 4 * block.start : 4 * block.tokens]
    library.accept(plan)
    return tokens


def test_another_process_restores_every_branch_of_every_tenant(tmp_path: Path) -> None:
    numbers = random.Random(5)
    trunk = [numbers.randrange(100_000) for _ in range(1500)]
    chains = [
        (
            trunk[: numbers.randrange(1, 1500)]
            + [numbers.randrange(100_000) for _ in range(numbers.randrange(600))],
            tenant,
        )
        for tenant in ("", "tenant")
        for _ in range(6)
    ]
    with BlockStore(tmp_path / "store", fingerprint=FINGERPRINT) as store:
        library = PrefixIndex(fingerprint=FINGERPRINT, ram_budget_bytes=10**6, disk=store)
        for chain, tenant in chains:
            read_chain(library, store, chain, tenant)
        store.flush()
        changes = store.changes()
        assert library.disk_changed(stored=changes.stored, lost=changes.lost) == ()
        library.check_invariants()
        assert library.unsaved() == ()
        assert all(map(library._disk.is_stored, library._disk.keys()))
    with BlockStore(tmp_path / "store", fingerprint=FINGERPRINT) as store:
        library = PrefixIndex(fingerprint=FINGERPRINT, ram_budget_bytes=0, disk=store)
        assert library.load() == len(store.entries())
        library.check_invariants()
        for chain, tenant in chains:
            assert restored_tokens(library, store, chain, tenant) == pack_tokens(chain)
        assert plan_of(library, chains[0][0], tenant="nobody").tokens == 0


def test_chains_cut_differently_by_two_processes_are_restored(
    tmp_path: Path,
) -> None:
    chain = [*range(1000)]
    with BlockStore(tmp_path / "store", fingerprint=FINGERPRINT) as one:
        ours = PrefixIndex(fingerprint=FINGERPRINT, ram_budget_bytes=10**6, disk=one)
        read_chain(ours, one, chain, "")
        one.flush()
        with BlockStore(tmp_path / "store", fingerprint=FINGERPRINT) as other:
            theirs = PrefixIndex(fingerprint=FINGERPRINT, ram_budget_bytes=10**6, disk=other)
            for tokens in (100, 300, 700):
                read_chain(theirs, other, chain[:tokens], "")
            read_chain(theirs, other, [*chain[:600], *range(5000, 5100)], "")
    with BlockStore(tmp_path / "store", fingerprint=FINGERPRINT) as store:
        library = PrefixIndex(fingerprint=FINGERPRINT, ram_budget_bytes=0, disk=store)
        assert 0 < library.load() < len(store.entries()), "some have all their tokens in others"
        library.check_invariants()
        for wanted in (chain, [*chain[:600], *range(5000, 5100)], chain[:650]):
            assert restored_tokens(library, store, wanted, "") == pack_tokens(wanted)


def test_a_damaged_block_is_prefilled_again_and_its_descendants_reused(
    tmp_path: Path,
) -> None:
    chain = [*range(1024)]
    with BlockStore(tmp_path / "store", fingerprint=FINGERPRINT) as store:
        library = PrefixIndex(fingerprint=FINGERPRINT, ram_budget_bytes=0, disk=store)
        read_chain(library, store, chain, "")
        store.flush()
        changes = store.changes()
        library.disk_changed(stored=changes.stored, lost=changes.lost)
        keys = plan_of(library, chain).keys
        path = (
            tmp_path / "store" / "blocks" / fingerprint_id(FINGERPRINT) / f"{keys[1].hex()}.block"
        )
        damaged = bytearray(path.read_bytes())
        damaged[-9] ^= 1
        path.write_bytes(damaged)
        assert isinstance(store.read(keys[1]).exception(), BadBlock)
        store.flush()
        assert not path.exists()
        assert library.unreadable([keys[1]]) == (keys[1],)
        again = plan_of(library, chain)
        assert (again.tokens, again.shortfall) == (256, Shortfall(CacheOutcome.UNREADABLE, 768))
        assert sum(each.is_missing for each in store.entries()) == 1
        packed = pack_tokens(chain)
        (missing,) = library.to_fill(stored(library, chain))
        block = library.fill(missing, Weight(256), holder=None)
        store.put(StoredBlock(block=block, parts=(packed[1024:2048],)))
        store.flush()
        assert len(list(path.parent.glob("*.block"))) == len(keys)
        assert not any(each.is_missing for each in store.entries())
        changes = store.changes()
        library.disk_changed(stored=changes.stored, lost=changes.lost)
        library.check_invariants()
        assert restored_tokens(library, store, chain, "") == pack_tokens(chain)

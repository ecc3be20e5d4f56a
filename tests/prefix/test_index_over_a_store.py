"""The library with a real store beneath it: the payloads are the tokens themselves, so that right can be told from wrong."""

from __future__ import annotations

import random
from pathlib import Path

from holdfast.prefix.addition import Addition
from holdfast.prefix.evicted import Evicted, EvictionCause
from holdfast.prefix.index import PrefixIndex
from holdfast.prefix.keys import pack_tokens
from holdfast.prefix.tree import BLOCK_TOKENS
from holdfast.store.block import BadBlock, StoredBlock
from holdfast.store.folder import fingerprint_id
from holdfast.store.store import BlockStore
from tests.fakes.payloads import Weight

FINGERPRINT = "model"


def read_chain(library: PrefixIndex, store: BlockStore, chain: list[int], tenant: str) -> None:
    for start in range(library.missing(chain, tenant=tenant), len(chain), BLOCK_TOKENS):
        run = chain[: start + BLOCK_TOKENS]
        addition = library.add_run(run, start=start, payload=Weight(len(run) - start), tenant=tenant)
        put(store, addition, pack_tokens(run[start:]) + tenant.encode())


def put(store: BlockStore, addition: Addition, payload: bytes) -> None:
    assert addition.new_block is not None
    store.put(StoredBlock(block=addition.new_block, meta=b"", parts=(payload,)))


def restored_tokens(library: PrefixIndex, store: BlockStore, chain: list[int], tenant: str) -> bytes:
    """What a sequence that begins with the chain restores, all of it from disk."""
    plan = library.plan(chain, tenant=tenant, resumable_anywhere=True, limit=len(chain))
    assert plan.disk_tokens == plan.tokens
    tokens = b""
    for piece in plan.pieces:
        (part,) = store.read(piece.key).result().parts
        own = bytes(part).removesuffix(tenant.encode())
        tokens += own[4 * piece.offset : 4 * (piece.offset + piece.tokens)]
    library.accept(plan)
    return tokens


def test_another_process_restores_every_branch_of_every_tenant(tmp_path: Path) -> None:
    numbers = random.Random(5)
    trunk = [numbers.randrange(100_000) for _ in range(1500)]
    chains = [
        (trunk[: numbers.randrange(1, 1500)] + [numbers.randrange(100_000) for _ in range(numbers.randrange(600))], tenant)
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
        assert (library.statistics().saving, library.statistics().unsaved) == (0, 0)
    with BlockStore(tmp_path / "store", fingerprint=FINGERPRINT) as store:
        library = PrefixIndex(fingerprint=FINGERPRINT, ram_budget_bytes=0, disk=store)
        assert library.load().unreachable == 0
        library.check_invariants()
        for chain, tenant in chains:
            assert restored_tokens(library, store, chain, tenant) == pack_tokens(chain)
        assert library.plan(chains[0][0], tenant="nobody", resumable_anywhere=True, limit=10).tokens == 0


def test_two_processes_that_cut_one_chain_differently_leave_a_store_that_a_third_restores_from(tmp_path: Path) -> None:
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
        loaded = library.load()
        assert loaded.unreachable == 0
        assert loaded.covered > 0
        library.check_invariants()
        for wanted in (chain, [*chain[:600], *range(5000, 5100)], chain[:650]):
            assert restored_tokens(library, store, wanted, "") == pack_tokens(wanted)


def test_a_damaged_block_is_forgotten_with_what_stands_behind_it_and_read_again(tmp_path: Path) -> None:
    chain = [*range(1024)]
    with BlockStore(tmp_path / "store", fingerprint=FINGERPRINT) as store:
        library = PrefixIndex(fingerprint=FINGERPRINT, ram_budget_bytes=0, disk=store)
        read_chain(library, store, chain, "")
        store.flush()
        changes = store.changes()
        library.disk_changed(stored=changes.stored, lost=changes.lost)
        keys = library.plan(chain, resumable_anywhere=True, limit=1024).keys
        path = tmp_path / "store" / "blocks" / fingerprint_id(FINGERPRINT) / f"{keys[1].hex()}.block"
        damaged = bytearray(path.read_bytes())
        damaged[-9] ^= 1
        path.write_bytes(damaged)
        assert isinstance(store.read(keys[1]).exception(), BadBlock)
        assert set(library.unreadable([keys[1]])) == set(keys[1:])
        again = library.plan(chain, resumable_anywhere=True, limit=1024)
        assert (again.tokens, again.shortfall) == (256, Evicted(256, 768, EvictionCause.UNREADABLE))
        read_chain(library, store, chain, "")
        store.flush()
        changes = store.changes()
        library.disk_changed(stored=changes.stored, lost=changes.lost)
        library.check_invariants()
        assert restored_tokens(library, store, chain, "") == pack_tokens(chain)

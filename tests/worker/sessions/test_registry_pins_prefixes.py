"""Prompt prefixes that are pinned for a while: through pressure in RAM and on disk, within their
time and share.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.store.maintenance import StoreLimits
from holdfast.wire.commands import PinnedPrefix, SequenceRequest
from holdfast.worker.prefix.chain import pack_tokens
from holdfast.worker.sessions.registry import MOST_PREFIXES, PrefixPins, Session, SessionPins
from tests.fakes.caching_worker import CachingWorker, greedy
from tests.fakes.session_worker import answer, ask, info, prompt, serve, worker

COMMON = prompt("common", 256)
CHAINS = {name: (*COMMON, *prompt(name, 60)) for name in "ab"} | {
    name: prompt(name, 100) for name in "cde"
}
MINUTES = 60.0


@pytest.fixture(scope="module")
def reader() -> CachingWorker:
    """Has prefilled all chains, each tenant's under its name."""
    subject = worker()
    requests = [
        greedy(f"{tenant}{name}", chain, max_tokens=1, tenant=tenant)
        for tenant in ("", "t")
        for name, chain in CHAINS.items()
    ]
    serve(subject, *requests)
    return subject


@pytest.fixture
def quota() -> list[int]:
    return [1 << 30]


@pytest.fixture
def table(reader: CachingWorker, quota: list[int]) -> Iterator[SessionPins]:
    table = SessionPins(reader.cache, quota_bytes=lambda: quota[0])
    yield table
    table.check_invariants()
    for pins in list(table._keys.values()):  # the index is shared with the next test
        reader.index.unpin([key for key in pins if table._holders.pop(key, 0)])


@pytest.fixture
def pins(reader: CachingWorker, table: SessionPins) -> PrefixPins:
    return PrefixPins(reader.index, table)


def keep(
    pins: PrefixPins,
    name: str,
    *tokens: int,
    seconds: float = 5 * MINUTES,
    now: float = 0.0,
    tenant: str = "",
) -> None:
    chain = pack_tokens(CHAINS[name])
    wanted = [PinnedPrefix(tokens=each, seconds=seconds) for each in tokens or (len(CHAINS[name]),)]
    pins.keep(wanted, tenant=tenant, chain=chain, now=now)


def keys(reader: CachingWorker, name: str, tokens: int | None = None) -> tuple[bytes, ...]:
    return reader.index.branch(pack_tokens(CHAINS[name][:tokens])).keys


def size(reader: CachingWorker, *names: str) -> int:
    return sum(map(reader.index.size_of, {key for name in names for key in keys(reader, name)}))


def test_a_pin_expires_and_each_use_renews_it(
    pins: PrefixPins, table: SessionPins, reader: CachingWorker
) -> None:
    keep(pins, "c")
    pins.use(keys(reader, "d"), now=200.0)
    pins.use(keys(reader, "c"), now=200.0)
    pins.expire(499.9)
    assert table.pinned_bytes == size(reader, "c")
    pins.expire(500.0)
    assert (table.pinned_bytes, len(pins)) == (0, 0)


def test_a_prefix_pinned_again_keeps_the_longer_time(pins: PrefixPins, table: SessionPins) -> None:
    keep(pins, "c", 60, seconds=60 * MINUTES)
    keep(pins, "c", 100, now=1000.0)
    assert len(pins) == 1  # both end in one block
    pins.expire(1000.0 + 59 * MINUTES)
    assert table.pinned_bytes
    pins.expire(1000.0 + 60 * MINUTES)
    assert not table.pinned_bytes


def test_the_next_turns_pin_replaces_only_shorter_ones(
    pins: PrefixPins,
) -> None:
    keep(pins, "a", 256)
    keep(pins, "a", now=1.0)
    assert len(pins) == 1
    keep(pins, "b", 256, 316, now=2.0)
    assert len(pins) == 3  # all positions of one request are kept
    keep(pins, "b", 256, seconds=60 * MINUTES, now=3.0)
    keep(pins, "b", now=4.0)
    assert len(pins) == 3


def test_an_empty_prefix_is_not_pinned(pins: PrefixPins) -> None:
    pins.keep(
        [PinnedPrefix(tokens=20, seconds=1.0)],
        tenant="",
        chain=pack_tokens(prompt("unread", 30)),
        now=0.0,
    )
    assert len(pins) == 0


def test_a_tenants_oldest_pins_give_way_within_its_share(
    pins: PrefixPins, table: SessionPins, reader: CachingWorker, quota: list[int]
) -> None:
    quota[0] = 4 * size(reader, "c")
    for now, name in enumerate("cde"):
        keep(pins, name, now=now)
    assert table.pinned_bytes == size(reader, "d", "e")
    keep(pins, "c", tenant="t", now=3)
    assert table.pinned_bytes == size(reader, "c", "d", "e")
    keep(pins, "a", now=4)
    assert len(pins) == 3, "what is more than a share takes nothing from others"


def test_at_the_quota_the_first_to_expire_gives_way(
    pins: PrefixPins, table: SessionPins, reader: CachingWorker, quota: list[int]
) -> None:
    quota[0] = 2 * size(reader, "c") + 1
    keep(pins, "c")
    keep(pins, "c", tenant="t", now=1)
    held = Session(
        session_id="s", tenant="u", created_at=0, last_used_at=0, ttl_seconds=None, pinned=True
    )
    held.branches = (reader.index.branch(pack_tokens(CHAINS["d"])),)
    assert not table.fits(held)
    assert pins.give_way()
    assert table.fits(held)
    assert pins.give_way()
    assert not pins.give_way()


def test_the_number_of_sessions_is_bounded(
    pins: PrefixPins, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_PREFIXES >= 100
    monkeypatch.setattr("holdfast.worker.sessions.registry.MOST_PREFIXES", 2)
    for now, name in enumerate("cde"):
        keep(pins, name, now=now)
    assert len(pins) == 2


@settings(max_examples=30)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from("abcde"),
            st.integers(1, 320),
            st.integers(1, 9),
            st.sampled_from(("", "t")),
        )
    ),
    parts=st.integers(0, 6),
)
def test_the_counts_always_agree(
    reader: CachingWorker, steps: list[tuple[str, int, int, str]], parts: int
) -> None:
    table = SessionPins(reader.cache, quota_bytes=lambda: parts * size(reader, "c"))
    pins = PrefixPins(reader.index, table)
    for now, (name, tokens, seconds, tenant) in enumerate(steps):
        keep(pins, name, min(tokens, len(CHAINS[name])), seconds=seconds, now=now, tenant=tenant)
        table.check_invariants()
        assert table.pinned_bytes <= table.quota_bytes
        pins.expire(now)
    pins.expire(1000.0)
    assert table.pinned_bytes == 0


def pinned(name: str, chain: tuple[int, ...], *, seconds: float = 300.0) -> SequenceRequest:
    return greedy(
        name, chain, max_tokens=1, pins=(PinnedPrefix(tokens=len(chain), seconds=seconds),)
    )


PRESSURE = [greedy(f"p{number}", prompt(f"p{number}", 80), max_tokens=1) for number in range(6)]
FIRST, SECOND = prompt("first", 80), prompt("second", 80)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_pinned_prefix_survives_eviction_in_ram(name: str) -> None:
    probe = worker(name)
    serve(probe, greedy("1", FIRST, max_tokens=1))
    one = probe.index.figures().ram_bytes
    inbox = serve(
        worker(name, ram_bytes=one * 4 + one // 2, pinned_percent=60), pinned("1", FIRST), greedy("2", SECOND, max_tokens=1),
        *PRESSURE, greedy("pinned", (*FIRST, 1)), greedy("loose", (*SECOND, 1)),
    )  # fmt: skip
    assert inbox.finished("loose").cached_tokens == 0
    assert inbox.finished("pinned").cached_tokens == len(FIRST)


def test_a_pinned_prefix_survives_eviction_on_disk(tmp_path: Path) -> None:
    name = "qwen3_next"
    probe = worker(name, tmp_path / "probe")
    serve(probe, greedy("1", FIRST, max_tokens=1))
    one = sum(path.stat().st_size for path in (tmp_path / "probe").rglob("*.block"))
    limits = StoreLimits(budget_bytes=one * 4 + one // 2)
    folder = tmp_path / "store"
    first = worker(name, folder, ram_bytes=0, limits=limits, pinned_percent=60)
    marked, loose = (
        (PinnedPrefix(tokens=50, seconds=300.0),),
        greedy("2", SECOND, max_tokens=1, branch_points=(50,)),
    )
    serve(first, greedy("1", FIRST, max_tokens=1, pins=marked, branch_points=(50,)), loose)
    serve(worker(name, folder, ram_bytes=0, limits=limits), *PRESSURE)
    others = [greedy("pinned", (*FIRST[:50], 1, 2)), greedy("loose", (*SECOND[:50], 1, 2))]
    inbox = serve(worker(name, folder, ram_bytes=0, limits=limits), *others)
    assert inbox.finished("loose").cached_tokens == 0
    assert inbox.finished("pinned").cached_tokens == 50, (
        "with the state there, and for the rest of its time after a restart"
    )


def test_an_expired_pin_is_evicted_like_others() -> None:
    probe = worker()
    serve(probe, greedy("1", FIRST, max_tokens=1))
    one = probe.index.figures().ram_bytes
    now = [1000.0]
    subject = worker(ram_bytes=one * 4 + one // 2, pinned_percent=60, clock=lambda: now[0])

    def pass_time() -> None:
        now[0] += 2.0

    script = [pinned("1", FIRST, seconds=3.0), *PRESSURE, greedy("late", (*FIRST, 1))]
    inbox = subject.serve([[command] for command in script], in_turn=True, on_receive=pass_time)
    assert inbox.finished("late").cached_tokens == 0


def test_clients_pins_make_room_for_a_pinned_session() -> None:
    probe = worker()
    serve(probe, greedy("1", FIRST, max_tokens=1))
    one = probe.index.figures().ram_bytes
    inbox = serve(
        worker(ram_bytes=one * 5, pinned_percent=40), pinned("1", FIRST),
        greedy("2", SECOND, session_id="s", max_tokens=1),
        greedy("3", PRESSURE[0].prompt_token_ids, session_id="s", max_tokens=1),
        ask("update", "u", pinned=True),
    )  # fmt: skip
    assert answer(inbox, "u").failure is None
    assert info(inbox, "u").pin_state == "kept"

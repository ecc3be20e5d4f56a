from __future__ import annotations

import asyncio

import pytest

from holdfast.errors import ModelLoadError, UnknownModel, WorkerUnavailable
from holdfast.front.prompt.tokenizer_bundle import Bundles, TokenizerBundle


class Shelf:
    """Reads a bundle when told to, and counts."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self._bundle = bundle
        self.reads: list[str] = []
        self.failure: Exception | None = None
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def read(self, model: str) -> TokenizerBundle:
        self.reads.append(model)
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure
        return self._bundle


async def test_concurrent_requests_read_a_bundle_once(bundle: TokenizerBundle) -> None:
    shelf = Shelf(bundle)
    bundles = Bundles(shelf.read)
    found = await asyncio.gather(*(bundles.of("a") for _ in range(9)))
    assert all(each is bundle for each in found)
    assert shelf.reads == ["a"]
    assert bundles.dialects == {"a": bundle.dialect_report}


async def test_a_model_is_awaited_until_its_bundle_is_read(bundle: TokenizerBundle) -> None:
    shelf = Shelf(bundle)
    bundles = Bundles(shelf.read)
    bundles.awaited.add("a")
    shelf.failure = ModelLoadError("no tokenizer")
    with pytest.raises(WorkerUnavailable):
        await bundles.of("a")
    assert bundles.awaited == {"a"}
    shelf.failure = None
    await bundles.of("a")
    assert bundles.awaited == set()


async def test_a_cancelled_waiter_does_not_cancel_the_others(bundle: TokenizerBundle) -> None:
    shelf = Shelf(bundle)
    shelf.may_end.clear()
    bundles = Bundles(shelf.read)
    gone, stays = asyncio.create_task(bundles.of("a")), asyncio.create_task(bundles.of("a"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    shelf.may_end.set()
    assert await stays is bundle


@pytest.mark.parametrize(
    "failure", [ModelLoadError("no tokenizer"), UnknownModel(model="a", available=())]
)
async def test_a_failed_read_is_repeated_for_the_next_request(
    bundle: TokenizerBundle, failure: Exception
) -> None:
    shelf = Shelf(bundle)
    shelf.failure = failure
    bundles = Bundles(shelf.read)
    with pytest.raises(WorkerUnavailable if isinstance(failure, ModelLoadError) else UnknownModel):
        await bundles.of("a")
    shelf.failure = None
    await asyncio.sleep(0)
    assert await bundles.of("a") is bundle


async def test_the_least_recently_used_bundle_is_dropped(bundle: TokenizerBundle) -> None:
    shelf = Shelf(bundle)
    bundles = Bundles(shelf.read, max_kept=2)
    for model in ("a", "b", "a", "c", "a", "b"):
        await bundles.of(model)
    assert shelf.reads == ["a", "b", "c", "b"]
    assert bundles.dialects.keys() == {"a", "b", "c"}


async def test_a_forgotten_bundle_is_reread_and_waiters_keep_the_old(
    bundle: TokenizerBundle,
) -> None:
    shelf = Shelf(bundle)
    bundles = Bundles(shelf.read)
    shelf.may_end.clear()
    waiting = asyncio.create_task(bundles.of("a"))
    await asyncio.sleep(0)
    bundles.forget("a")
    shelf.may_end.set()
    assert await waiting is bundle
    assert await bundles.of("a") is bundle
    assert shelf.reads == ["a", "a"]

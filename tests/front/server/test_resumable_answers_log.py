from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.server.resumable_answers import EventLog, NumberedEvent


def event(number: int) -> NumberedEvent:
    return NumberedEvent(number, b"%d;" % number)


async def read(log: EventLog, after: int) -> list[int]:
    return [int(frame[:-1]) async for frame in log.events_after(after) if frame]


@given(
    gaps=st.lists(st.integers(1, 3), max_size=12),
    places=st.lists(st.tuples(st.integers(0, 12), st.integers(-1, 30)), max_size=5),
)
def test_a_reader_gets_all_events_after_its_position(
    gaps: list[int], places: list[tuple[int, int]]
) -> None:
    numbers = [sum(gaps[: place + 1]) for place in range(len(gaps))]

    async def follow() -> None:
        log = EventLog()
        readers: list[tuple[int, asyncio.Task[list[int]]]] = []
        for step, number in enumerate([*numbers, None]):
            readers += [
                (after, asyncio.create_task(read(log, after)))
                for when, after in places
                if when == step
            ]
            await asyncio.sleep(0)
            if number is not None:
                log.add(event(number))
        readers += [(after, asyncio.create_task(read(log, after))) for _, after in places]
        log.end()
        for after, reader in readers:
            assert await reader == [number for number in numbers if number > after]

    asyncio.run(follow())


async def test_the_first_event_can_be_waited_for() -> None:
    log = EventLog()
    waiting = asyncio.create_task(log.wait_for_first_event())
    await asyncio.sleep(0)
    assert not waiting.done()
    log.add(event(0))
    await waiting
    await log.wait_for_first_event()

"""Streams closed in any order: each sequence ends or is cancelled once, and each choice ends at
most once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import aclosing

import pytest

from holdfast.front.answers.choice import ChoiceRules
from holdfast.front.answers.pieces import TokenPieces
from holdfast.front.gateway import GenerationStream
from holdfast.front.link.event_stream import EventStream
from holdfast.front.output import ChoiceFinished
from holdfast.front.prompt.prepare import Prepared
from holdfast.front.request import GenerationRequest
from holdfast.front.toolcalls.dialect import ModelDialect, ReasoningFormat
from holdfast.wire.commands import SequenceRequest, ThinkingBudget
from holdfast.wire.events import Accepted, Event, FinishReason, TokensGenerated
from holdfast.wire.requests import SamplingParams, TokenIds
from tests.fakes import toy_tokenizers
from tests.fakes.scripted_client import ScriptedClient, answers

TOKENIZER = toy_tokenizers.byte_level()
PIECES = TokenPieces(TOKENIZER)
WORDS = tuple(TOKENIZER.encode("hello world ", add_special_tokens=False).ids)


async def open_stream(
    engine: ScriptedClient, name: str, *, choices: int, stops: tuple[str, ...] = ()
) -> GenerationStream:
    rules = ChoiceRules(
        prompt_token_ids=TokenIds.of((1,)), stop_token_ids=frozenset(), max_tokens=1000, stops=stops
    )
    sequences = tuple(
        SequenceRequest(
            request_id=f"{name}/{index}",
            prompt_token_ids=TokenIds.of((1,)),
            max_tokens=1000,
            sampling=SamplingParams(seed=1),
        )
        for index in range(choices)
    )
    stream = GenerationStream(
        GenerationRequest(request_id=name, model="toy", prompt="x"),
        Prepared(prompt="", sequences=sequences, rules=rules, pieces=PIECES),
        sources=[engine.submit(sequence) for sequence in sequences],
    )
    await stream.accepted()
    return stream


THINKING = ModelDialect(reasoning=ReasoningFormat(start="<think>", end="</think>"))
END = ThinkingBudget(tokens=0, end_token_ids=(7,))


async def thinking_stream(
    engine: ScriptedClient, *, thought_end: ThinkingBudget | None = END
) -> GenerationStream:
    """A choice that begins in a thought; 32 repeated tokens are enough to end it."""
    rules = ChoiceRules(
        prompt_token_ids=TokenIds.of((1,)),
        stop_token_ids=frozenset(),
        max_tokens=1000,
        dialect=THINKING,
        in_reasoning=True,
    )
    sequence = SequenceRequest(
        request_id="a/0",
        prompt_token_ids=TokenIds.of((1,)),
        max_tokens=1000,
        sampling=SamplingParams(seed=1),
    )
    stream = GenerationStream(
        GenerationRequest(request_id="a", model="toy", prompt="x"),
        Prepared(
            prompt="", sequences=(sequence,), rules=rules, pieces=PIECES, thought_end=thought_end
        ),
        sources=[engine.submit(sequence)],
        repeated_tokens=32,
    )
    await stream.accepted()
    return stream


async def test_a_repeating_thought_is_ended_once_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    engine = ScriptedClient(answers(*WORDS[:3] * 100))
    async with aclosing(await thinking_stream(engine)) as stream:
        *_, end = [event async for event in stream]
    assert isinstance(end, ChoiceFinished)
    assert end.thought_ended_by == "repetition"
    assert engine.thought_limits == [("a/0", END)]
    assert caplog.text.count("repeated itself") == 1


async def test_varied_thoughts_and_repeated_text_are_left_alone() -> None:
    dice = random.Random(1)
    thought = [dice.choice(WORDS) for _ in range(300)]
    said = TOKENIZER.encode("</think>", add_special_tokens=False).ids + list(WORDS[:3] * 100)
    engine = ScriptedClient(answers(*thought, *said))
    async with aclosing(await thinking_stream(engine)) as stream:
        *_, end = [event async for event in stream]
    assert isinstance(end, ChoiceFinished)
    assert (end.thought_ended_by, engine.thought_limits) == (None, [])


async def test_models_with_an_end_marker_end_thoughts_on_request() -> None:
    engine = ScriptedClient(answers(*WORDS))
    async with aclosing(await thinking_stream(engine)) as stream:
        assert stream.end_thoughts()
        assert stream.end_thoughts()
        *_, end = [event async for event in stream]
    assert isinstance(end, ChoiceFinished)
    assert (end.thought_ended_by, engine.thought_limits) == ("request", [("a/0", END)])
    async with aclosing(await thinking_stream(engine, thought_end=None)) as stream:
        assert not stream.end_thoughts()
    assert len(engine.thought_limits) == 1


async def test_unrequested_tokens_stay_in_their_sources_and_pause_them() -> None:
    prompt = TokenIds.of((1,))
    sequences = [
        SequenceRequest(
            request_id=f"r/{index}",
            prompt_token_ids=prompt,
            max_tokens=1000,
            sampling=SamplingParams(seed=1),
        )
        for index in range(2)
    ]
    sources = [
        EventStream(sequence.request_id, control=lambda command: None, unread_bytes=1024)
        for sequence in sequences
    ]
    rules = ChoiceRules(prompt_token_ids=prompt, stop_token_ids=frozenset(), max_tokens=1000)
    stream = GenerationStream(
        GenerationRequest(request_id="r", model="toy", prompt="x"),
        Prepared(prompt="x", sequences=tuple(sequences), rules=rules, pieces=PIECES),
        sources=sources,
    )

    def push(*token_ids: int) -> None:
        for source in sources:
            for token_id in token_ids:
                source.push(TokensGenerated(request_id=source.request_id, token_ids=(token_id,)))

    for source in sources:
        source.push(Accepted(request_id=source.request_id))
    await stream.accepted()
    push(WORDS[0])
    assert {(await anext(stream)).index for _ in sources} == {0, 1}
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)  # it waits for both sources
    push(*WORDS * 4)
    await waiting
    assert [source.is_paused for source in sources] == [True, True]
    for _ in range(2 * 4 * len(WORDS) - 1):
        await anext(stream)
    assert [source.is_paused for source in sources] == [False, False]
    await stream.aclose()


async def read(
    engine: ScriptedClient, name: str, *, choices: int, events: int, stops: tuple[str, ...]
) -> Counter[int]:
    """Read this many events and leave; returns how often each choice ended."""
    ended: Counter[int] = Counter()
    async with aclosing(await open_stream(engine, name, choices=choices, stops=stops)) as stream:
        async for event in stream:
            if isinstance(event, ChoiceFinished):
                ended[event.index] += 1
            events -= 1
            if events <= 0:
                break
    return ended


@pytest.mark.parametrize("seed", range(5))
async def test_leaving_readers_leave_nothing_open(seed: int) -> None:
    dice = random.Random(seed)
    lengths: dict[str, int] = {}

    def script(request: SequenceRequest) -> list[Event]:
        lengths[request.request_id] = dice.randrange(6)
        reason = dice.choice([FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED])
        return list(answers(*WORDS * lengths[request.request_id], reason=reason)(request))

    engine = ScriptedClient(script)
    choices = [dice.randint(1, 3) for _ in range(40)]
    readers = [
        asyncio.create_task(
            read(
                engine,
                str(place),
                choices=n,
                events=dice.choice([1, 3, 1000]),
                stops=dice.choice([(), ("d h",)]),
            )
        )
        for place, n in enumerate(choices)
    ]
    for reader in dice.sample(readers, 8):
        for _ in range(dice.randrange(10)):
            await asyncio.sleep(0)
        reader.cancel()
    for ended in await asyncio.gather(*readers, return_exceptions=True):
        assert isinstance(ended, asyncio.CancelledError) or all(
            times == 1 for times in ended.values()
        )
    assert all(times == 1 for times in Counter(engine.cancelled).values())
    await engine.close()


async def test_patient_readers_see_every_choice_end_once() -> None:
    engine = ScriptedClient(answers(*WORDS * 3))
    ended = await asyncio.gather(
        *(read(engine, str(name), choices=3, events=1000, stops=()) for name in range(10))
    )
    assert ended == [Counter({0: 1, 1: 1, 2: 1})] * 10
    assert engine.cancelled == []

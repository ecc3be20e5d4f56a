"""Cached equals fresh for live states: taken over, rewound, shared with a running sequence, or
turned into blocks when evicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import pytest

from holdfast.worker.engine import engine as engine_module
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.views import StepContext
from tests.fakes.architectures import KEEPABLE, probed
from tests.fakes.caching_worker import (
    SMALL_BLOCK,
    CachingWorker,
    RunningAhead,
    greedy,
    make_blocks_small,
    random_prompt,
)

HELD_ONCE, ONE_BUFFER = "held once", "one buffer"
FUSED = "one buffer and fused attention, as on a GPU"
FAST = {
    ("llama", Engine, HELD_ONCE),
    ("llama", RunningAhead, FUSED),
    ("gemma3_text", Engine, ONE_BUFFER),
    ("qwen3_next", Engine, HELD_ONCE),
    ("qwen3_next", RunningAhead, FUSED),
}
CASES = [
    pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
    for case in itertools.product(KEEPABLE, (Engine, RunningAhead), (HELD_ONCE, ONE_BUFFER, FUSED))
]


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_blocks_small(patch)
        yield


@pytest.mark.parametrize(("name", "engine", "way"), CASES)
def test_requests_over_parked_states_answer_as_alone(
    name: str, engine: type[Engine], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probed(name), "shares", way == HELD_ONCE)
    if way == FUSED:
        monkeypatch.setattr(
            engine_module, "StepContext", partial(StepContext, composes_attention=False)
        )
    leaves = [leaf for layer in probed(name).fresh_layers() for leaf in layer.leaves()]
    resumes_anywhere, can_share = (
        all(leaf.grows for leaf in leaves),
        any(leaf.can_share for leaf in leaves if leaf.grows),
    )
    # otherwise it has read beyond its end and cannot go back
    ends_where_it_is_known = resumes_anywhere or engine is Engine
    subject = CachingWorker(name, engine=engine)

    def ask(request_id: str, prompt: tuple[int, ...], max_tokens: int = 6) -> tuple[int, ...]:
        subject.send(greedy(request_id, prompt, max_tokens=max_tokens))
        subject.run_to_end()
        subject.check_answer(request_id)
        while subject.step():
            pass
        return prompt + tuple(subject.inbox.tokens(request_id))

    first = ask("first", random_prompt(40))
    turn = ask("turn", first + random_prompt(9, "b"))
    moved = subject.inbox.finished("turn").cache_report.moved_tokens
    assert moved == len(first) - 1 or not ends_where_it_is_known
    other_end = turn[:-4] + random_prompt(5, "c")
    # the other end may begin like the answer that it replaces
    pairs = zip(turn, other_end, strict=False)
    common = next(at for at, (before, now) in enumerate(pairs) if before != now)
    rewound = ask("rewound", other_end)
    moved = subject.inbox.finished("rewound").cache_report.moved_tokens
    assert moved == common or not resumes_anywhere
    subject.send(greedy("runs", rewound + random_prompt(3, "d"), max_tokens=20))
    while len(subject.inbox.tokens("runs")) < 5:
        subject.step()
    subject.send(greedy("fork", rewound + random_prompt(4, "e")))
    subject.run_to_end()
    for request_id in ("runs", "fork"):
        subject.check_answer(request_id)
    shared = subject.inbox.finished("fork").cache_report.shared_tokens
    assert shared >= SMALL_BLOCK or not (can_share and resumes_anywhere)
    while subject.step():
        pass
    subject.cache.live.reclaim(1 << 40)
    assert not subject.cache.live.held.parked
    ask("from blocks", rewound + random_prompt(8, "f"))
    found = subject.inbox.finished("from blocks").cache_report
    assert (found.moved_tokens, found.shared_tokens) == (0, 0)
    # the running one has read its last token
    assert found.cached_tokens == len(rewound) or not resumes_anywhere
    subject.end()

"""The equalities with quantized keys and values: in a batch as alone, cached as computed, after a
restart as before.

Answers are compared within one form: quantization must depend only on position, not on chunk sizes,
and happen once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import KVBitsChoice
from holdfast.wire.commands import SequenceRequest
from holdfast.worker.kv.bits import BITS, KVBits
from tests.fakes.caching_worker import CachingWorker, greedy, one_after_the_other
from tests.fakes.pressed_worker import wide
from tests.fakes.script_inbox import ScriptInbox
from tests.fakes.slow import slow
from tests.fakes.tiny_models import VOCAB_SIZE

# full attention; with windows; with sinks and windows; with recurrent layers
NAMES = ["llama", "gemma3_text", "gpt_oss", "qwen3_next"]
# computes attention itself, so that its prompts are cut at blocks
OTHERS = ["gemma2"]
# have no other states than quantized keys and values
RESUME_ANYWHERE = ["llama", "gemma2"]
KV_BITS: list[KVBits] = ["8", "4"]


def some_of(*fast: tuple[str, KVBits]) -> list[Any]:
    """Parameters for all models and forms; `make test` runs those in `fast`."""
    others = [each for each in product([*NAMES, *OTHERS], KV_BITS) if each not in fast]
    return [*fast, *slow(*others)]


def worker(
    name: str, kv_bits: KVBitsChoice, folder: Path | None = None, **more: Any
) -> CachingWorker:
    return CachingWorker(wide(name), folder, kv_bits=kv_bits, **more)


def random_prompt(rng: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB_SIZE - 8) for _ in range(tokens))


def fresh(name: str, kv_bits: KVBits, prompt: tuple[int, ...], **more: int) -> list[int]:
    return worker(name, kv_bits).serve([[greedy("fresh", prompt, **more)]]).tokens("fresh")


def cached(inbox: ScriptInbox, *names: str) -> list[int]:
    return [inbox.finished(name).cached_tokens for name in names]


def served_twice(
    name: str,
    kv_bits: KVBits,
    folder: Path,
    requests: Sequence[SequenceRequest],
    wanted: Mapping[str, list[int]],
) -> Iterator[ScriptInbox]:
    """Serve these requests in turn, then again by a worker that starts from disk, and check their
    answers. Yields the inbox of each worker.
    """
    for _ in range(2):
        inbox = worker(name, kv_bits, folder).serve(one_after_the_other(*requests))
        for request in requests:
            assert inbox.tokens(request.request_id) == wanted[request.request_id], (
                request.request_id
            )
        yield inbox


@pytest.mark.parametrize(("name", "kv_bits"), some_of(("gpt_oss", "4")))
def test_turns_and_forks_equal_fresh_ones_after_a_restart(
    name: str, kv_bits: KVBits, tmp_path: Path
) -> None:
    rng = random.Random(f"{name} {kv_bits}")
    first = random_prompt(rng, 700)
    answer = tuple(fresh(name, kv_bits, first, max_tokens=12))
    turn = first + answer + random_prompt(rng, 90)
    within = first[:600] + random_prompt(rng, 40)
    requests = [
        greedy("first", first, max_tokens=12),
        greedy("exact", first, max_tokens=12),
        greedy("turn", turn, max_tokens=12),
        greedy("within a block", within, max_tokens=12),
        greedy("again", turn, max_tokens=12),
    ]
    wanted = {"first": list(answer), "exact": list(answer)}
    wanted["turn"] = wanted["again"] = fresh(name, kv_bits, turn, max_tokens=12)
    wanted["within a block"] = fresh(name, kv_bits, within, max_tokens=12)
    for inbox in served_twice(name, kv_bits, tmp_path, requests, wanted):
        again, turned = cached(inbox, "exact", "turn")
        assert again >= 512
        assert turned >= 512


@pytest.mark.parametrize(("name", "kv_bits"), some_of(("gpt_oss", "8")))
def test_blocks_after_a_boundary_end_where_tokens_are_quantized(
    name: str, kv_bits: KVBits, tmp_path: Path
) -> None:
    """Snapshots within a block: at a branch point, and at the end of the first prompt."""
    rng = random.Random(f"{name} {kv_bits} boundaries")
    first = random_prompt(rng, 300)
    turn = first + random_prompt(rng, 340)
    fork = first[:100] + random_prompt(rng, 50)
    requests = [
        greedy("first", first, branch_points=(100,)),
        greedy("turn", turn, branch_points=(100, 350)),
        greedy("fork", fork),
        greedy("again", turn),
    ]
    wanted = {"first": fresh(name, kv_bits, first), "fork": fresh(name, kv_bits, fork)}
    wanted["turn"] = wanted["again"] = fresh(name, kv_bits, turn)
    for inbox in served_twice(name, kv_bits, tmp_path, requests, wanted):
        turned, forked, again = cached(inbox, "turn", "fork", "again")
        assert turned >= 256
        assert forked >= 100 or name in RESUME_ANYWHERE, "they cannot resume in a block"
        assert again >= 512


@pytest.mark.parametrize(("name", "kv_bits"), some_of(("llama", "8")))
def test_concurrent_answers_equal_each_alone(name: str, kv_bits: KVBits) -> None:
    rng = random.Random(f"{name} {kv_bits} crowd")
    common = random_prompt(rng, 520)
    prompts = [common + random_prompt(rng, tokens) for tokens in (3, 40, 250, 300)]
    inbox = worker(name, kv_bits).serve(
        [
            [greedy(str(index), prompt, max_tokens=12) for index, prompt in enumerate(prompts)],
        ]
    )
    for index, prompt in enumerate(prompts):
        assert inbox.tokens(str(index)) == fresh(name, kv_bits, prompt, max_tokens=12)


@pytest.mark.parametrize("kv_bits", slow("4", "8"))
def test_a_long_answer_is_continued_equally_after_a_restart(
    kv_bits: KVBits, tmp_path: Path
) -> None:
    rng = random.Random(f"long {kv_bits}")
    prompt = random_prompt(rng, 250)
    long = worker("llama", kv_bits, tmp_path).serve([[greedy("a", prompt, max_tokens=120)]])
    answer = tuple(long.tokens("a"))
    for kept in (5, 6, 7, 200, 261, 262, 263):
        inbox = worker("llama", kv_bits, tmp_path).serve(
            [[greedy("b", prompt + answer[:kept], max_tokens=120 - kept)]]
        )
        assert tuple(inbox.tokens("b")) == answer[kept:], kept


def test_sequences_of_all_forms_share_a_batch_but_no_blocks() -> None:
    rng = random.Random("mixed")
    prompt = random_prompt(rng, 600)
    forms: list[KVBits] = ["native", *BITS]
    alone = {form: fresh("llama", form, prompt, max_tokens=12) for form in forms}
    crowd = worker("llama", "auto", max_running=8)
    requests = [greedy(form, prompt, max_tokens=12, kv_bits=form) for form in forms]
    again = [greedy(f"{form} again", prompt, max_tokens=12, kv_bits=form) for form in forms]
    inbox = crowd.serve([[*requests, *again]])
    for form in forms:
        assert inbox.tokens(form) == inbox.tokens(f"{form} again") == alone[form], form
        assert cached(inbox, form) == [0], form
        assert cached(inbox, f"{form} again")[0] >= 512, form


def test_auto_does_not_continue_anothers_8_bit_blocks(tmp_path: Path) -> None:
    rng = random.Random("auto")
    known, new = random_prompt(rng, 600), random_prompt(rng, 600)
    inbox = worker("llama", "auto", tmp_path).serve(
        one_after_the_other(
            greedy("8", known, kv_bits="8"), greedy("known", known), greedy("new", new)
        )
    )
    assert cached(inbox, "known")[0] == 0
    assert inbox.tokens("known") == fresh("llama", "native", known, max_tokens=6)
    assert inbox.tokens("new") == fresh("llama", "native", new, max_tokens=6)

"""Exported sessions whose quantized blocks are used only in part, because another chain continues
them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.caching_worker import CachingWorker, greedy
from tests.fakes.pressed_worker import prompt_of
from tests.fakes.pressed_worker import worker as wide_worker
from tests.fakes.session_worker import ask, info, serve

LONG = prompt_of("long", 700)


def worker() -> CachingWorker:
    return wide_worker("llama", kv_bits="8", most_parked_bytes=0, step_tokens=512)


def exported(path: Path, prompt: tuple[int, ...]) -> int:
    """A session with this prompt, exported by a worker that also has a longer chain. Returns the
    tokens of the session.
    """
    inbox = serve(
        worker(),
        greedy("long", LONG),
        greedy("s", prompt, max_tokens=1, session_id="s"),
        ask("export", path=str(path)),
    )
    return info(inbox, "c").tokens


@pytest.mark.parametrize(
    ("common", "own", "imported"),
    [(400, 0, 256), (300, 100, 256), (300, 400, 700)],
    ids=["ends in a block", "ends after a partial block", "diverges in a block"],
)
def test_an_import_ends_before_a_quantized_block_without_all_its_tokens(
    common: int, own: int, imported: int, tmp_path: Path
) -> None:
    path = tmp_path / "session"
    prompt = (*LONG[:common], *prompt_of("own", own))
    assert exported(path, prompt) == len(prompt)
    turn = (*prompt, *prompt_of("turn", 80))
    inbox = serve(worker(), ask("import", path=str(path)), greedy("turn", turn, session_id="s"))
    assert info(inbox, "c").tokens == imported
    assert inbox.finished("turn").cached_tokens == imported
    assert inbox.tokens("turn") == serve(worker(), greedy("turn", turn)).tokens("turn")

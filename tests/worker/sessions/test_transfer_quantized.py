"""Exported sessions whose quantized blocks are used only in part, because another chain continues
them.
"""

from __future__ import annotations

from pathlib import Path

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


def test_imports_end_before_a_partial_quantized_block(
    tmp_path: Path,
) -> None:
    path = tmp_path / "session"
    assert exported(path, LONG[:400]) == 400
    turn = (*LONG[:400], *prompt_of("turn", 80))
    inbox = serve(worker(), ask("import", path=str(path)), greedy("turn", turn, session_id="s"))
    assert info(inbox, "c").tokens == 256
    assert inbox.finished("turn").cached_tokens == 256
    assert inbox.tokens("turn") == serve(worker(), greedy("turn", turn)).tokens("turn")


def test_a_session_diverging_within_a_quantized_block_is_imported_completely(
    tmp_path: Path,
) -> None:
    path = tmp_path / "session"
    prompt = (*LONG[:300], *prompt_of("own", 400))
    assert exported(path, prompt) == 700
    turn = (*prompt, *prompt_of("turn", 80))
    inbox = serve(worker(), ask("import", path=str(path)), greedy("turn", turn, session_id="s"))
    assert info(inbox, "c").tokens == 700
    assert inbox.finished("turn").cached_tokens == 700
    assert inbox.tokens("turn") == serve(worker(), greedy("turn", turn)).tokens("turn")


def test_tokens_after_a_partially_used_quantized_block_are_prefilled_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "session"
    prompt = (*LONG[:300], *prompt_of("own", 100))
    assert exported(path, prompt) == 400
    turn = (*prompt, *prompt_of("turn", 80))
    inbox = serve(worker(), ask("import", path=str(path)), greedy("turn", turn, session_id="s"))
    assert info(inbox, "c").tokens == 256
    assert inbox.finished("turn").cached_tokens == 256
    assert inbox.tokens("turn") == serve(worker(), greedy("turn", turn)).tokens("turn")

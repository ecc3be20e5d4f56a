"""Forged session files with right checksums and wrong contents are refused before anything is
imported, and harm no request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.errors import SessionFailure
from holdfast.store.block import StoredBlock
from holdfast.wire.commands import Command
from holdfast.wire.sessions import SessionAnswer
from holdfast.worker.prefix.chain import Branch, ChainBlock, ChainState
from holdfast.worker.sessions.session_file import Manifest, write_session
from tests.fakes.caching_worker import CONTEXT_TOKENS, CachingWorker, greedy
from tests.fakes.session_worker import answer, ask, ended, exported, info, prompt, serve, worker
from tests.fakes.slow import slow

# full, window, recurrent, composite, latent
KINDS = ["llama", "gemma3_text", "qwen3_next", "falcon_h1", "deepseek_v3", *slow("rwkv7")]
Parts = tuple[bytes, ...]
FORGERIES: dict[str, Callable[[Parts], Parts]] = {
    "a part is shorter": lambda parts: (*parts[:-1], parts[-1][:-4]),
    "a part is longer": lambda parts: (parts[0] + bytes(4), *parts[1:]),
    "a part is empty": lambda parts: (b"", *parts[1:]),
    "a part is missing": lambda parts: parts[1:],
    "a part too many": lambda parts: (*parts, bytes(4)),
    "no parts": lambda parts: (),
    "one part": lambda parts: (b"".join(parts),),
}


def with_parts(block: StoredBlock, forge: Callable[[Parts], Parts]) -> StoredBlock:
    parts = tuple(bytes(part) for part in block.parts)
    return replace(block, parts=forge(parts) if parts else parts)


def refused(
    subject: CachingWorker, folder: Path, files: Sequence[tuple[Manifest, list[StoredBlock]]]
) -> list[SessionAnswer]:
    """Assert that each file is refused; another tenant's session and a concurrent request are not
    affected.
    """
    commands: list[list[Command]] = [
        [greedy("theirs", prompt("theirs"), session_id="theirs", tenant="t")],
        [ask("get", "before", "theirs", tenant="t")],
    ]
    for number, (manifest, blocks) in enumerate(files):
        write_session(folder / str(number), manifest, blocks)
        path = str(folder / str(number))
        commands.append([ask("import", str(number), f"made up {number}", path=path)])
    commands.append([ask("get", "after", "theirs", tenant="t")])
    commands.append([greedy("mine", prompt("first"))])
    inbox = subject.serve(commands, in_turn=True)
    before, after = answer(inbox, "before").sessions[0], answer(inbox, "after").sessions[0]
    assert after == before
    assert after.kept_tokens == after.tokens
    assert inbox.finished("mine").cached_tokens == 0  # nothing was imported
    return [answer(inbox, str(number)) for number in range(len(files))]


@pytest.mark.parametrize("name", KINDS)
def test_blocks_that_do_not_fit_the_models_layers_are_refused(name: str, tmp_path: Path) -> None:
    manifest, blocks = exported(tmp_path, name)
    made_up = []
    for forge in FORGERIES.values():
        forged = [with_parts(block, forge) for block in blocks]
        if any(
            len(one.parts) != len(other.parts) or one.nbytes != other.nbytes
            for one, other in zip(forged, blocks, strict=True)
        ):
            made_up.append((manifest, forged))
    last = blocks[-1]
    for bad in (np.nan, np.inf):
        parts = tuple(np.full(len(part) // 4, bad, np.float32).tobytes() for part in last.parts)
        if any(parts):
            made_up.append((manifest, [*blocks[:-1], replace(last, parts=parts)]))
    if any(block.block.kind == "kv" for block in blocks):
        branches = tuple(replace(branch, form="8") for branch in manifest.branches)
        made_up.append((replace(manifest, branches=branches), blocks))
        for form in ("8", "none"):
            others = [
                replace(block, form=form) if block.block.kind == "kv" else block for block in blocks
            ]
            made_up.append((manifest, others))
    assert len(made_up) > 6
    answers = refused(worker(name), tmp_path, made_up)
    assert {found.failure for found in answers} == {SessionFailure.BAD_FILE}
    assert all("of the file does not fit this model: " in found.message for found in answers)


def test_a_block_named_4000_times_is_refused_immediately(tmp_path: Path) -> None:
    manifest, blocks = exported(tmp_path, "llama")
    key, own = blocks[0].key, blocks[0].block.tokens
    times = tuple(ChainBlock(key, own, own * (number + 1)) for number in range(4000))
    short = tuple(part for part in times if part.end <= CONTEXT_TOKENS)
    twice = [
        (replace(manifest, branches=(Branch(blocks=named),)), blocks[:1])
        for named in (times, short, times[:2])
    ]
    found = refused(worker(ram_bytes=1 << 20), tmp_path, twice)
    assert [each.failure for each in found] == [SessionFailure.BAD_FILE] * 3
    assert "tokens, but the model's context has only 4096" in found[0].message
    assert all("does not fit its branch" in each.message for each in found[1:])


def test_a_file_beyond_the_quota_is_refused_without_eviction(tmp_path: Path) -> None:
    manifest, blocks = exported(tmp_path, "llama", tokens=800)
    nbytes = sum(size for _, size in manifest.blocks)
    (found,) = refused(worker(ram_bytes=int(nbytes * 1.9)), tmp_path, [(manifest, blocks)])
    assert found.failure is SessionFailure.OVER_QUOTA
    assert f"{nbytes:,}" in found.message


def test_a_block_with_a_wrong_position_is_refused(tmp_path: Path) -> None:
    manifest, blocks = exported(tmp_path, "llama")
    moved = [
        replace(each, block=replace(each.block, start=each.block.start + 1))
        if each.block.start
        else each
        for each in blocks
    ]
    (found,) = refused(worker(), tmp_path, [(manifest, moved)])
    assert found.failure is SessionFailure.BAD_FILE
    assert "does not fit its branch" in found.message


def test_forged_files_harm_no_request(tmp_path: Path) -> None:
    """The checksum is right but the contents are not, as from a hostile or broken writer."""
    manifest, blocks = exported(tmp_path, "qwen3_next")
    shorter = [with_parts(block, FORGERIES["a part is shorter"]) for block in blocks]
    other_tokens = [
        replace(each, block=replace(each.block, packed_tokens=each.block.packed_tokens[4:]))
        for each in blocks
    ]
    for name, forged in (("shorter", shorter), ("tokens", other_tokens)):
        write_session(tmp_path / name, manifest, forged)
    imports = [
        ask("import", name, session_id, path=str(tmp_path / name))
        for name, session_id in (("shorter", "made up"), ("tokens", "made up"), ("whole", ""))
    ]
    inbox = serve(
        worker("qwen3_next"), greedy("busy", prompt("busy"), max_tokens=30), *imports,
        greedy("after", prompt("first")), ask("list", "l"),
    )  # fmt: skip
    for name in ("shorter", "tokens"):
        assert answer(inbox, name).failure in (SessionFailure.BAD_FILE, SessionFailure.FAILED)
    assert info(inbox, "whole").kept_tokens == info(inbox, "whole").tokens > 300
    assert inbox.finished("after").cached_tokens == len(prompt("first")) - 1
    fresh = serve(worker("qwen3_next"), greedy("fresh", prompt("first")))
    assert inbox.tokens("after") == fresh.tokens("fresh")
    assert [session.session_id for session in answer(inbox, "l").sessions] == ["s"]


numbers = st.one_of(
    st.integers(-3, 400), st.sampled_from([-(2**63), 2**63 - 1, 2**40, 256, 300, 305])
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, list[StoredBlock]]:
    return exported(tmp_path_factory.mktemp("whole"), "qwen3_next")


@pytest.fixture(scope="module")
def target() -> CachingWorker:
    return worker("qwen3_next")


def taken_in(subject: CachingWorker, path: Path) -> SessionAnswer:
    """Import a file without a loop around it."""
    assert subject.sessions.carry_out(ask("import", "i", "", path=str(path))) is None
    answers = ended(subject)
    subject.sessions.carry_out(ask("close", "c", forget=True))
    return answers[0]


@settings(max_examples=50)
@given(data=st.data(), requests=numbers, start=numbers, cut=st.integers(0, 9))
def test_a_file_with_any_header_is_imported_or_refused(
    data: st.DataObject,
    requests: int,
    start: int,
    cut: int,
    whole: tuple[Manifest, list[StoredBlock]],
    target: CachingWorker,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    manifest, blocks = whole
    forged = [
        with_parts(block, lambda parts: parts[cut:]) if cut < 3 else block for block in blocks
    ]
    if 0 < start < 400:
        at = data.draw(st.integers(1, len(blocks) - 1))
        block = replace(forged[at].block, start=start, parent_tokens=min(start, 5))
        forged[at] = replace(forged[at], block=block)
    keys = st.sampled_from([*(block.key for block in blocks), b"", bytes(32)])
    branches = st.lists(
        st.builds(
            Branch,
            blocks=st.lists(st.builds(ChainBlock, keys, numbers, numbers), max_size=4).map(tuple),
            states=st.lists(st.builds(ChainState, keys, numbers), max_size=4).map(tuple),
        ),
        max_size=3,
    ).map(tuple)
    chosen = data.draw(st.one_of(st.just(manifest.branches), branches))
    path = tmp_path_factory.mktemp("forged") / "file"
    write_session(path, replace(manifest, requests=requests, branches=chosen), forged)
    assert taken_in(target, path).failure in (None, SessionFailure.BAD_FILE)
    target.index.check_invariants()

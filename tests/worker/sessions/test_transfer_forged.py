"""Forged session files: right checksums, wrong contents.

Refused as a whole before anything comes in; nobody is harmed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
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

# full, window, recurrent, composite, latent
KINDS = ["llama", "gemma3_text", "qwen3_next", "rwkv7", "falcon_h1", "deepseek_v3"]
Forger = Callable[[dict[str, Any]], None]


def described(block: StoredBlock, forge: Forger) -> StoredBlock:
    meta = msgspec.msgpack.decode(block.meta)
    forge(meta)
    return replace(block, meta=msgspec.msgpack.encode(meta))


def shaped(change: Callable[[list[int]], list[int]]) -> Forger:
    def forge(meta: dict[str, Any]) -> None:
        meta["arrays"] = [[dtype, change(list(shape))] for dtype, shape in meta["arrays"]]

    return forge


def typed(dtype: str) -> Forger:
    def forge(meta: dict[str, Any]) -> None:
        meta["arrays"] = [[dtype, shape] for _, shape in meta["arrays"]]

    return forge


def set_to(field: str, value: Any) -> Forger:
    def forge(meta: dict[str, Any]) -> None:
        if field in meta:
            meta[field] = value

    return forge


FORGERIES: dict[str, Forger] = {
    "negative": shaped(
        lambda shape: [-abs(each) if at < 2 else each for at, each in enumerate(shape)]
    ),
    "flat": shaped(lambda shape: [int(np.prod(shape))]),
    "other heads": shaped(lambda shape: [shape[0], shape[1] * 2, *shape[2:-1], shape[-1] // 2]),
    "tokens and heads exchanged": shaped(lambda shape: [shape[0], *shape[:0:-1]]),
    "integers": typed("int32"),
    "unknown type": typed("complex128"),
    "no type": typed(""),
    "codec": set_to("codec", "q8"),
    "unknown codec": set_to("codec", "zip"),
    "of another type": set_to("dtype", "bfloat16"),
    "tokens": set_to("tokens", 2**40),
    "no tokens": set_to("tokens", 0),
    "negative tokens": set_to("tokens", -5),
    "start": set_to("start", -1),
    "position": set_to("position", 7),
    "layers": set_to("layers", [["window", 0, []]]),
    "no arrays": set_to("arrays", []),
}


def refused(
    subject: CachingWorker, folder: Path, files: Sequence[tuple[Manifest, list[StoredBlock]]]
) -> list[SessionAnswer]:
    """Have each of these refused; another tenant's session is whole before and after, and so is who
    asks meanwhile.
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
    assert inbox.finished("mine").cached_tokens == 0  # nothing of any file came in
    return [answer(inbox, str(number)) for number in range(len(files))]


@pytest.mark.parametrize("name", KINDS)
def test_what_does_not_fit_the_models_layers_is_refused(name: str, tmp_path: Path) -> None:
    manifest, blocks = exported(tmp_path, name)
    made_up = []
    for forge in FORGERIES.values():
        forged = [described(block, forge) for block in blocks]
        if any(one.meta != other.meta for one, other in zip(forged, blocks, strict=True)):
            made_up.append((manifest, forged))
    last = blocks[-1]
    for bad in (np.nan, np.inf):
        parts = tuple(np.full(len(part) // 4, bad, np.float32).tobytes() for part in last.parts)
        if any(parts):
            made_up.append((manifest, [*blocks[:-1], replace(last, parts=parts)]))
    assert len(made_up) > 6
    answers = refused(worker(name), tmp_path, made_up)
    assert {found.failure for found in answers} == {SessionFailure.BAD_FILE}
    assert all("of the file does not fit this model: " in found.message for found in answers)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "rwkv7", "falcon_h1"])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_a_state_of_integers_is_refused(name: str, dtype: type, tmp_path: Path) -> None:
    """As many bytes, and every shape is right."""
    manifest, blocks = exported(tmp_path, name)
    forged = [
        described(each, typed(np.dtype(dtype).name)) if each.block.kind == "state" else each
        for each in blocks
    ]
    (found,) = refused(worker(name), tmp_path, [(manifest, forged)])
    assert found.failure is SessionFailure.BAD_FILE


def test_one_block_named_4000_times_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
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
    assert "tokens, the model takes 4096" in found[0].message
    assert all("does not fit its branch" in each.message for each in found[1:])


def test_a_file_beyond_the_quota_is_refused_before_anything_has_to_leave(tmp_path: Path) -> None:
    manifest, blocks = exported(tmp_path, "llama", tokens=2000)
    nbytes = sum(size for _, size in manifest.blocks)
    (found,) = refused(worker(ram_bytes=int(nbytes * 1.9)), tmp_path, [(manifest, blocks)])
    assert found.failure is SessionFailure.OVER_QUOTA
    assert f"{nbytes:,}" in found.message


def test_a_block_that_says_it_stands_elsewhere_is_refused(tmp_path: Path) -> None:
    manifest, blocks = exported(tmp_path, "llama")
    moved = [
        described(block, lambda meta: meta.update(start=meta["start"] + 1)) for block in blocks
    ]
    (found,) = refused(worker(), tmp_path, [(manifest, moved)])
    assert found.failure is SessionFailure.BAD_FILE
    assert "is for other tokens" in found.message


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_made_up_file_harms_nobody_and_is_answered(name: str, tmp_path: Path) -> None:
    """The checksum is right, the contents are not: what a hostile or broken writer would send."""
    manifest, blocks = exported(tmp_path, name)

    def with_meta(meta: bytes) -> list[StoredBlock]:
        return [replace(block, meta=meta) for block in blocks]

    def with_parts(change: Callable[[bytes], bytes]) -> list[StoredBlock]:
        return [
            replace(block, parts=tuple(change(bytes(part)) for part in block.parts))
            for block in blocks
        ]

    def with_tokens(change: Callable[[bytes], bytes]) -> list[StoredBlock]:
        return [
            replace(each, block=replace(each.block, packed_tokens=change(each.block.packed_tokens)))
            for each in blocks
        ]

    metas = {bytes(block.meta) for block in blocks}
    made_up = [
        with_meta(b""), with_meta(b"\xc1"), with_meta(b"\x80"), with_parts(lambda part: part[:-4]), with_parts(lambda part: b""),
        with_parts(lambda part: part + part), *[with_meta(meta) for meta in metas if len(metas) > 1],
        *[with_meta(meta.replace(b"\x02", b"\x7f").replace(b"\x10", b"\xff")) for meta in metas],
        with_tokens(lambda packed: packed[4:]), with_tokens(lambda packed: packed + packed[:4]),
    ]  # fmt: skip
    imports: list[Command] = []
    for number, each in enumerate(made_up):
        path = tmp_path / f"{number}"
        write_session(path, manifest, each)
        imports.append(ask("import", f"{number}", f"made up {number}", path=str(path)))
    inbox = serve(
        worker(name), greedy("busy", prompt("busy"), max_tokens=30), *imports,
        ask("import", "whole", "", path=str(tmp_path / "whole")),
        greedy("after", prompt("first")), ask("list", "l"),
    )  # fmt: skip
    failures = [answer(inbox, str(number)).failure for number in range(len(made_up))]
    assert set(failures) <= {SessionFailure.BAD_FILE, SessionFailure.FAILED}, failures
    assert info(inbox, "whole").kept_tokens == info(inbox, "whole").tokens > 300
    assert inbox.finished("after").cached_tokens == len(prompt("first")) - 1
    assert inbox.tokens("after") == serve(worker(name), greedy("fresh", prompt("first"))).tokens(
        "fresh"
    )
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


@given(
    data=st.data(),
    requests=numbers,
    meta=st.dictionaries(
        st.sampled_from(
            ["tokens", "start", "codec", "dtype", "arrays", "position", "layers", "type"]
        ),
        st.one_of(
            numbers,
            st.text(max_size=3),
            st.lists(st.tuples(st.text(max_size=8), st.lists(numbers, max_size=4)), max_size=3),
        ),
        max_size=2,
    ),
)
def test_whatever_a_header_says_a_file_is_taken_in_or_refused(
    data: st.DataObject,
    requests: int,
    meta: dict[str, Any],
    whole: tuple[Manifest, list[StoredBlock]],
    target: CachingWorker,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    manifest, blocks = whole
    forged = [described(block, lambda known: known.update(meta)) for block in blocks]
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

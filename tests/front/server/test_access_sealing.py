from __future__ import annotations

import base64
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.front.server.access import Seal

SEAL = Seal()


@given(text=st.text(alphabet=st.characters(exclude_categories=()), max_size=200))
def test_sealed_text_can_be_opened_and_sealing_is_deterministic(text: str) -> None:
    assert SEAL.decrypt(SEAL.encrypt(text)) == text
    assert SEAL.encrypt(text) == SEAL.encrypt(text)
    assert SEAL.is_signed(text, SEAL.sign(text))


@example(text="0", place=24, flip=4)  # a bit after the end of the packed text
@given(text=st.text(min_size=1, max_size=40), place=st.integers(0), flip=st.integers(1, 255))
def test_a_changed_byte_opens_nothing(text: str, place: int, flip: int) -> None:
    version, _, shown = SEAL.encrypt(text).partition(".")
    raw = bytearray(base64.b64decode(shown))
    raw[place % len(raw)] ^= flip
    assert SEAL.decrypt(f"{version}.{base64.b64encode(raw).decode()}") is None


@given(
    text=st.text(min_size=1, max_size=40),
    place=st.integers(0),
    other=st.characters(max_codepoint=127),
)
def test_a_changed_character_opens_nothing(text: str, place: int, other: str) -> None:
    sealed = SEAL.encrypt(text)
    place %= len(sealed)
    changed = sealed[:place] + other + sealed[place + 1 :]
    assert SEAL.decrypt(changed) == (text if changed == sealed else None)


@given(
    sealed=st.text(max_size=40)
    | st.binary(max_size=40).map(lambda raw: "hf2." + base64.b64encode(raw).decode())
)
def test_foreign_text_is_not_recognized(sealed: str) -> None:
    assert SEAL.decrypt(sealed) is None
    assert not SEAL.is_signed("x", sealed)


def test_text_sealed_by_an_earlier_cipher_is_refused(tmp_path: Path) -> None:
    (tmp_path / "seal.key").write_bytes(bytes(range(32)))
    assert Seal(tmp_path).decrypt("hf1.E2Ygktzp/oGYKFreSxGeXGxRMi7VSVutp5f4AfXEvwTA") is None


def test_sealing_is_the_same_after_a_restart(tmp_path: Path) -> None:
    (tmp_path / "seal.key").write_bytes(bytes(range(32)))
    assert Seal(tmp_path).encrypt("a thought") == "hf2.mDqUG1F/Z4DuzG3rn2agIfIcp4pAwZSI80GkMXjx9+/D"


def test_the_front_loads_no_pillow_and_the_cipher_only_to_seal() -> None:
    code = """
import sys
import holdfast.front.run.web
from holdfast.front.server.access import Seal
assert "PIL" not in sys.modules
seal = Seal()
seal.sign("x")
assert "cryptography" not in sys.modules
seal.encrypt("x")
assert "cryptography" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_seal_hides_the_text() -> None:
    text = "a secret thought " * 9
    assert "secret" not in SEAL.encrypt(text)
    assert b"secret" not in base64.b64decode(SEAL.encrypt(text).partition(".")[2])


def test_another_server_has_another_key() -> None:
    assert Seal().decrypt(SEAL.encrypt("x")) is None
    assert not Seal().is_signed("x", SEAL.sign("x"))


def test_tenants_cannot_open_each_others_seals(tmp_path: Path) -> None:
    anns, bobs = SEAL.for_tenant("ann"), SEAL.for_tenant("bob")
    for seal in (anns, SEAL.for_tenant("")):
        assert seal.decrypt(seal.encrypt("x")) == "x"
    assert anns.decrypt(SEAL.for_tenant("ann").encrypt("x")) == "x"
    for other in (bobs, SEAL):
        assert other.decrypt(anns.encrypt("x")) is None
        assert not other.is_signed("x", anns.sign("x"))
    assert (
        Seal(tmp_path).for_tenant("ann").decrypt(Seal(tmp_path).for_tenant("ann").encrypt("x"))
        == "x"
    )


def test_the_key_survives_a_restart_and_is_private(tmp_path: Path) -> None:
    sealed = Seal(tmp_path).encrypt("x")
    assert Seal(tmp_path).decrypt(sealed) == "x"
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_servers_creating_the_key_concurrently_share_one(tmp_path: Path) -> None:
    for attempt in range(20):
        folder, together = tmp_path / str(attempt), Barrier(6)
        folder.mkdir()

        def sealed(_: int, folder: Path = folder, together: Barrier = together) -> str:
            together.wait()
            return Seal(folder).encrypt("x")

        with ThreadPoolExecutor(6) as servers:
            assert len(set(servers.map(sealed, range(6)))) == 1
        assert [file.name for file in folder.iterdir()] == ["seal.key"]


def test_a_missing_folder_is_not_created(tmp_path: Path) -> None:
    seal = Seal(tmp_path / "no")
    assert seal.decrypt(seal.encrypt("x")) == "x"
    assert not (tmp_path / "no").exists()


def test_a_damaged_key_invalidates_only_old_seals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "seal.key").write_bytes(b"short")
    seal = Seal(tmp_path)
    assert seal.decrypt(seal.encrypt("x")) == "x"
    (tmp_path / "seal.key").unlink()
    (tmp_path / "seal.key").mkdir()
    assert Seal(tmp_path).encrypt("x")
    assert "are valid only in this process" in caplog.text

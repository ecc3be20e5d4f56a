"""Kept results of `holdfast quality`."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import ModelLoadError
from holdfast.models import quality
from holdfast.models.quality import find_quality, save_quality
from tests.fakes.quality_report import REPORT


def test_a_result_is_found_only_by_the_fingerprint(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert find_quality(REPORT.fingerprint, environ) is None
    save_quality(REPORT, environ)
    assert find_quality(REPORT.fingerprint, environ) == REPORT
    assert find_quality("e" * 64, environ) is None
    assert find_quality("", environ) is None
    (file,) = (tmp_path / "holdfast" / "quality").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"fingerprint": 1}'])
def test_a_damaged_file_counts_as_missing(tmp_path: Path, content: bytes) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    save_quality(REPORT, environ)
    (file,) = (tmp_path / "holdfast" / "quality").iterdir()
    file.write_bytes(content)
    assert find_quality(REPORT.fingerprint, environ) is None


def test_a_renamed_file_is_not_another_models_result(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    save_quality(REPORT, environ)
    (file,) = (tmp_path / "holdfast" / "quality").iterdir()
    file.rename(file.with_name("e" * 64 + ".json"))
    assert find_quality("e" * 64, environ) is None


def test_a_result_that_cannot_be_saved_is_reported(tmp_path: Path) -> None:
    (tmp_path / "holdfast").write_text("in the way")
    with pytest.raises(ModelLoadError, match="the result cannot be kept"):
        save_quality(REPORT, {"XDG_CACHE_HOME": str(tmp_path)})


def test_only_the_latest_results_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "MOST_RESULTS", 2)
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    for name in ("a" * 64, "b" * 64, "c" * 64):
        save_quality(msgspec.structs.replace(REPORT, fingerprint=name), environ)
        for file in (tmp_path / "holdfast" / "quality").iterdir():  # as if a minute passed
            os.utime(file, ns=(0, file.stat().st_mtime_ns - 60_000_000_000))
    assert find_quality("a" * 64, environ) is None
    assert find_quality("b" * 64, environ) is not None
    assert find_quality("c" * 64, environ) is not None


def test_changes_are_relative_to_native() -> None:
    assert REPORT.perplexity_change(REPORT.forms[1]) == pytest.approx(0.005)
    assert REPORT.perplexity_change(REPORT.forms[2]) is None

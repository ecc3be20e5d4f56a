"""`holdfast doctor` as a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.front.fleet.worker_files import CrashReport, write_report
from tests.fakes.command_line import holdfast, holdfast_here, only_line
from tests.fakes.tiny_models import write_tiny


@pytest.mark.slow
def test_it_reports_machine_speed_and_layout(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", "qwen3")
    write_tiny(tmp_path / "draft", "llama", seed=1)
    (tmp_path / "models.toml").write_text(
        '[models.kelp]\npath = "model"\nspeculation = "small"\n[models.small]\npath = "draft"\n'
    )
    done = holdfast("doctor", "kelp", "--models", "models.toml", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["machine"]["usable_cores"] >= 1
    assert found["platform"]["mlx_version"]
    assert found["speed"]["in_use_gflops"] > 0
    assert (found["model"]["layout"], found["model_name"], found["problems"]) == (
        "rows",
        "kelp",
        [],
    )
    assert found["draft_model"] == "small"
    assert found["dialect"]["tools"] in ("template", "text", "none")


@pytest.mark.slow
def test_a_model_limited_to_one_request_is_the_first_recommendation(
    tmp_path: Path,
) -> None:
    write_tiny(tmp_path / "model", "deepseek_v41")
    done = holdfast("doctor", "./model", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["advice"][0]
    assert "one at a time" in first
    assert (
        "Why: rows fails (LayoutError: a layer uses a cache class that only mlx-lm knows)" in first
    )
    assert "What to do: " in first


@pytest.mark.slow
def test_the_last_worker_that_died_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write_tiny(tmp_path / "model", "qwen3")
    report = CrashReport(
        at="2026-01-01T00:00:00.000+00:00",
        model="some-model",
        cause="died",
        how="signal SIGSEGV",
        pid=7,
        served_seconds=3.0,
        log=("Fatal Python error: Segmentation fault",),
    )
    write_report(str(tmp_path / "state" / "holdfast" / "crashes"), report)
    shown = holdfast("doctor", "model", cwd=tmp_path).stdout
    for part in (
        "last worker crash",
        "was serving",
        "0 requests (0 tokens generated)",
        "some-model",
        "signal SIGSEGV",
        "Segmentation fault",
    ):
        assert part in shown


@pytest.mark.slow
def test_code_compiled_by_mlx_is_in_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / "model", "qwen3")
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "shared"))
    assert holdfast("doctor", "model", cwd=tmp_path).returncode == 0
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.slow
def test_a_model_that_cannot_run_does_not_hide_the_rest(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", "qwen3")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "no_such_architecture"}')
    done = holdfast("doctor", "model", cwd=tmp_path)
    assert done.returncode == 2
    for part in ("machine", "GFLOP/s as installed", "cannot be run", "recommendations"):
        assert part in done.stdout
    assert "no_such_architecture" in only_line(done.stderr)


def test_a_missing_draft_model_is_reported_before_measuring(
    tmp_path: Path,
) -> None:
    done = holdfast_here("doctor", "--speculation", "nonsense", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "speculation = nonsense: there is no model folder nonsense" in only_line(done.stderr)


@pytest.mark.parametrize("model", ["none", "./none", "file.gguf", "empty"])
def test_a_missing_model_is_reported_before_measuring(tmp_path: Path, model: str) -> None:
    (tmp_path / "file.gguf").touch()
    (tmp_path / "empty").mkdir()
    done = holdfast_here("doctor", model, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert model.removeprefix("./") in only_line(done.stderr)

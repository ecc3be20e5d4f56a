"""`holdfast quality` as a process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast.cli import quality_texts
from holdfast.cli.doctor import check_model
from holdfast.cli.quality_texts import built_in_text
from holdfast.config import ModelSettings
from holdfast.models.download import demo_folder
from holdfast.models.quality import find_quality
from tests.fakes.command_line import holdfast, holdfast_here, only_line
from tests.fakes.tiny_models import write_tiny


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Let the model read one short page; the tiny tokenizer has a token for each byte."""
    monkeypatch.setattr(quality_texts, "PAGES", 1)
    return ("--context", "2500")


def test_the_result_is_kept_until_the_model_changes(tmp_path: Path, short: tuple[str, ...]) -> None:
    folder = write_tiny(tmp_path / "model", "qwen3", changes={"head_dim": 64})
    (tmp_path / "story.txt").write_text(built_in_text()[:600])
    (tmp_path / "models.toml").write_text('[models.kelp]\npath = "model"\n')
    arguments = ("--models", "models.toml", "--text", "story.txt", "--kv-bits", "8,4")
    done = holdfast_here("quality", "kelp", *arguments, *short, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["model"], report["text"], report["questions"]) == ("kelp", "story.txt", 13)
    assert report["text_tokens"] > 300
    assert report["quantized_tokens"] >= 256
    native, eight, four = report["forms"]
    assert (native["form"], native["kl_divergence"], native["agreement"]) == ("native", 0, 1)
    assert 0 < eight["kl_divergence"] < four["kl_divergence"]

    fingerprint = check_model(ModelSettings(path=str(folder))).fingerprint
    assert fingerprint == report["fingerprint"]
    kept = find_quality(fingerprint, os.environ)
    assert kept is not None
    assert [each.form for each in kept.forms] == ["native", "8", "4"]
    write_tiny(folder, "qwen3", seed=1, changes={"head_dim": 64})
    changed = check_model(ModelSettings(path=str(folder))).fingerprint
    assert find_quality(changed, os.environ) is None


@pytest.mark.slow
def test_the_bundled_model_answers_from_quantized_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_texts, "PAGES", 3)
    done = holdfast_here("quality", "holdfast-demo", "--kv-bits", "8,4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    head, columns, *rows, foot = done.stdout.splitlines()
    assert head.startswith("holdfast-demo, computed in float32, mlx ")
    assert columns.split("  ")[0] == "kv bits"
    assert [row.split()[0] for row in rows] == ["native", "8", "4"]
    assert foot.startswith("built-in text: ")
    shown = holdfast("doctor", "holdfast-demo", cwd=tmp_path).stdout
    assert "8 bits: perplexity " in shown
    settings = ModelSettings(path=str(demo_folder()))
    kept = find_quality(check_model(settings).fingerprint, os.environ)
    assert kept is not None
    native, eight, four = kept.forms
    assert (native.right or 0) > 0.75 * kept.questions
    assert (eight.agreement or 0) >= 0.99
    assert (kept.perplexity_change(eight) or 0) <= 0.005
    assert (kept.perplexity_change(four) or 0) <= 0.01
    assert 0 < (four.kl_divergence or 0) <= 1e-3
    for row, each in zip(rows, kept.forms, strict=True):
        assert f"{each.right} of 39" in row


@pytest.mark.slow
def test_an_unusable_form_is_named_with_the_reason(tmp_path: Path, short: tuple[str, ...]) -> None:
    write_tiny(tmp_path / "model", "qwen3")  # its head dimension is 16
    done = holdfast_here("quality", "./model", "--kv-bits", "8", *short, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not possible: its heads have 16 dimensions" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-bits", "3"], "--kv-bits 3: '3' is not allowed; allowed: 8, 8/4, 4"),
        (["--kv-bits", "8,"], "--kv-bits 8,: '' is not allowed"),
        (["--text", "none.txt"], "none.txt cannot be read: No such file"),
        (["--text", "binary"], "binary is not a text in UTF-8"),
        (["--text", "short"], "the text has 1 tokens; at least 512 are needed"),
        (["--context", "200"], "the built-in questions need a context of"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short").write_text("a")
    done = holdfast_here("quality", "holdfast-demo", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in only_line(done.stderr)


@pytest.mark.parametrize("model", ["holdfast-dem", "./none", "owner/../x"])
def test_a_missing_model_is_one_line(tmp_path: Path, model: str) -> None:
    done = holdfast_here("quality", model, cwd=tmp_path)
    assert done.returncode == 2
    assert only_line(done.stderr).startswith("holdfast: ")


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", "qwen3")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = holdfast_here("quality", "./model", cwd=tmp_path)
    assert done.returncode == 2
    assert "model.safetensors" in only_line(done.stderr)

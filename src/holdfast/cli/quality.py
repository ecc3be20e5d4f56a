"""`holdfast quality`: measures how much quantized keys and values degrade a model's predictions.

MLX runs in a separate process, which is started as `python -m holdfast.cli.quality`.
"""

from __future__ import annotations

import datetime
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import typer

from holdfast.cli.output import (
    Json,
    load_progress,
    new_table,
    print_json,
    print_table,
    size_text,
)
from holdfast.cli.settings import settings_command
from holdfast.config import EffectiveSettings, ModelSettings
from holdfast.errors import ConfigError, HoldfastError
from holdfast.models.download import check_present, is_demo, resolve_model, served_id
from holdfast.models.model_folder import known_context_tokens, read_json
from holdfast.models.quality import (
    FORMS,
    NATIVE,
    FormQuality,
    Passage,
    QualityReport,
    QuantizedForm,
    save_quality,
)

_BUILT_IN = "built-in"
_ANY_LENGTH = 1 << 30  # used as the context length if that is unknown

TextFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--text", metavar="FILE", help="Text file in UTF-8 to read; default: a built-in text."
    ),
]
Forms: TypeAlias = Annotated[
    str,
    typer.Option(
        "--kv-bits",
        metavar="LIST",
        help="KV bits to compare with native: 8, 8/4 (keys 8, values 4) or 4 (keys 5, values 4), "
        "separated by commas; default: all three.",
    ),
]


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    """The task of the measuring process.

    hash_cache: the file that caches hashes of model files; empty: none.
    """

    settings: ModelSettings
    name: str  # the model's id in the report
    text: str  # name of the text that was read
    forms: tuple[QuantizedForm, ...]
    passages: tuple[Passage, ...]  # notes and questions
    hash_cache: str


# What the measuring process prints, one JSON value per line: a stage and its finished
# fraction, the result, or an error message.
_Line: TypeAlias = tuple[str, float] | QualityReport | str


@functools.partial(
    settings_command,
    shown=("model.path", "model.context_tokens"),
    left_out=("model.kv_bits",),
)
def quality(
    effective: EffectiveSettings,
    text: TextFile = None,
    kv_bits: Forms = "",
    as_json: Json = False,
) -> None:
    """Measure how much quantized keys and values degrade a model's answers.

    MODEL reads a text and answers questions about notes, with native (unquantized) keys and values
    and with quantized ones. `holdfast doctor` and /v1/models show the result.
    """
    from holdfast.front.fleet.catalog import catalog_of
    from holdfast.front.run.running_servers import run_folder

    settings = effective.settings
    if settings.model.path:  # the path may be a name in models.toml
        entry = catalog_of(settings, os.environ).entries[0]
        settings = replace(settings, model=entry.model)
    forms = _parsed_forms(kv_bits)
    content = "" if text is None else _text_of(text)
    check_present(settings.model)  # reports a misspelled name before anything is read
    with run_folder(os.environ), load_progress(settings.log) as progress:
        report = measured_quality(
            settings.model,
            forms=forms,
            text=content,
            text_name=_BUILT_IN if text is None else text.name,
            progress=progress,
        )
        progress("ready", 1.0)
    save_quality(report, os.environ)
    if as_json:
        print_json(report)
    else:
        _print_report(report)


def measured_quality(
    settings: ModelSettings,
    *,
    forms: Sequence[QuantizedForm],
    text: str,
    text_name: str,
    progress: Callable[[str, float], None],
) -> QualityReport:
    """Measure a model in a separate process. Downloads the model if necessary.

    text: the text to read; empty: the built-in one. text_name: its name in the result. Raises
    HoldfastError with a message of one line.
    """
    from holdfast.cli.quality_texts import built_in_text, passages_for
    from holdfast.files import hash_cache_file

    folder = resolve_model(settings, progress=progress)
    # the bundled models were trained on notes only, so they do not read the story
    built_in = "" if is_demo(settings.path) else built_in_text()
    limit = settings.context_tokens or known_context_tokens(read_json(folder / "config.json"))
    passages = passages_for(folder, text=text or built_in, context_tokens=limit or _ANY_LENGTH)
    task = _Task(
        settings=settings.of_base_model(path=str(folder)),
        name=served_id(settings),
        text=text_name,
        forms=tuple(forms),
        passages=passages,
        hash_cache=hash_cache_file(os.environ),
    )
    return _run_in_process(task, progress)


def quality_text(report: QualityReport) -> str:
    """Describe the result in one line, for `holdfast doctor`."""
    return "; ".join(_form_text(report, each) for each in report.forms if each.form != NATIVE)


def _form_text(report: QualityReport, quality: FormQuality) -> str:
    """Describe how one form of keys and values compares with native."""
    if quality.refused is not None:
        return f"{quality.form} bits: not possible"
    return (
        f"{quality.form} bits: perplexity {_perplexity_change_text(report, quality)}, the same "
        f"token in {_percent_text(quality.agreement)}"
    )


def _parsed_forms(kv_bits: str) -> tuple[QuantizedForm, ...]:
    """Parse --kv-bits: the forms to compare with native. Raises ConfigError if one is unknown."""
    if not kv_bits:
        return FORMS
    names = [name.strip() for name in kv_bits.split(",")]
    for name in names:
        if name not in (NATIVE, *FORMS):
            raise ConfigError(
                f"--kv-bits {kv_bits}: {name!r} is not allowed; allowed: {', '.join(FORMS)}"
            )
    return tuple(form for form in FORMS if form in names)


def _text_of(file: Path) -> str:
    """The text to read. Raises ConfigError."""
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not a text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


def _run_in_process(task: _Task, progress: Callable[[str, float], None]) -> QualityReport:
    """Have the measuring process do the task. Raises HoldfastError if it fails."""
    command = [sys.executable, "-P", "-m", "holdfast.cli.quality"]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(task))
            process.stdin.close()
            for line in process.stdout:
                message = msgspec.json.decode(line, type=_Line)
                if isinstance(message, str):
                    raise HoldfastError(message)
                if isinstance(message, QualityReport):
                    return message
                progress(*message)
        except BaseException:
            process.kill()
            raise
        exit_code = process.wait()
        errors.seek(0)
        error_lines = errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
        raise HoldfastError(f"measuring ended with code {exit_code}: {error_lines[-1]}")


def _print_report(report: QualityReport) -> None:
    """Print the result as a table: a row for each form of keys and values."""
    columns = ("perplexity", "KL divergence", "same token", "right", "KV per token")
    table = new_table("kv bits", *columns, right=columns)
    for each in report.forms:
        if each.refused is not None:
            table.add_row(each.form, f"not possible: {each.refused}")
            continue
        assert each.bytes_per_token is not None
        table.add_row(
            each.form,
            f"{each.perplexity:.4g}"
            if each.form == NATIVE
            else _perplexity_change_text(report, each),
            "" if each.form == NATIVE else f"{each.kl_divergence:.1e}",
            "" if each.form == NATIVE else _percent_text(each.agreement),
            f"{each.right} of {report.questions}",
            size_text(each.bytes_per_token),
        )
    typer.echo(f"{report.model}, computed in {report.compute_dtype}, mlx {report.mlx_version}")
    print_table(table)
    typer.echo(
        f"{report.text} text: {report.text_tokens:,} predicted tokens, with "
        f"{report.quantized_tokens:,} quantized tokens before each on average"
    )


def _perplexity_change_text(report: QualityReport, quality: FormQuality) -> str:
    change = report.perplexity_change(quality)
    return "" if change is None else f"{change:+.2%}"


def _percent_text(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


def _measure(task: _Task, progress: Callable[[str, float], None]) -> QualityReport:
    """Load the model and measure it in this process, which is the measuring process."""
    from holdfast.worker.cpu.blas import prepare_blas

    prepare_blas(task.settings.threads)  # before the first import of MLX
    from holdfast.worker.engine import probe
    from holdfast.worker.engine import quality as measuring
    from holdfast.worker.engine.engine import Engine
    from holdfast.worker.loop.device import use_device

    use_device(task.settings.device)
    loaded, fingerprint = measuring.load_with_fingerprint(
        task.settings, hash_cache=task.hash_cache, progress=progress
    )
    runner = probe.choose_layout(
        loaded.model, vocab_size=loaded.vocab_size, wanted=task.settings.layout
    )
    costs = Engine(runner, vocab_size=loaded.vocab_size).measure_costs()
    measurement = measuring.measure(
        runner,
        costs.form,
        task.forms,
        task.passages,
        vocab_size=loaded.vocab_size,
        progress=functools.partial(progress, "measuring"),
    )
    return QualityReport(
        model=task.name,
        fingerprint=fingerprint,
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        mlx_version=loaded.platform.mlx_version,
        compute_dtype=str(loaded.compute_dtype).removeprefix("mlx.core."),
        text=task.text,
        text_tokens=measurement.text_tokens,
        quantized_tokens=measurement.quantized_tokens,
        questions=sum(len(passage.answers) for passage in task.passages),
        forms=measurement.forms,
    )


def _answer_task() -> None:
    """The measuring process: read a task from stdin, and print progress and result (`_Line`)."""

    lines = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a model's own code prints must not mix with these lines

    def write_line(line: _Line) -> None:
        lines.write(msgspec.json.encode(line) + b"\n")
        lines.flush()

    task = msgspec.json.decode(sys.stdin.buffer.read(), type=_Task)
    try:
        write_line(_measure(task, lambda stage, fraction: write_line((stage, fraction))))
    except HoldfastError as error:
        write_line(str(error))
    if "mlx.core" in sys.modules:
        sys.modules["mlx.core"].clear_streams()


if __name__ == "__main__":
    _answer_task()

"""The results of `holdfast quality` (how much quantized keys and values degrade a model's
predictions), and the files in which they are kept.

The name of a file is the fingerprint of the model: a hash of its files, and of the code and the
package versions that compute with them. So the result for an earlier version is never found.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from holdfast.errors import ModelLoadError
from holdfast.files import atomic_write, quality_folder, read_regular

NATIVE: Final = "native"  # the form of keys and values that are not quantized
MOST_RESULTS = 100  # the latest ones are kept
# the quantized values of the setting `model.kv_bits`
QuantizedForm: TypeAlias = Literal["8", "8/4", "4"]
FORMS: tuple[QuantizedForm, ...] = get_args(QuantizedForm)

logger = logging.getLogger("holdfast.models")


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a model reads with each form of keys and values, to compare its predictions.

    is_text: whether the predictions of all tokens count for perplexity, agreement and divergence.
    answers: the ranges of tokens, as (first, end), that a model predicts if it answers correctly.
    """

    token_ids: tuple[int, ...]
    is_text: bool
    answers: tuple[tuple[int, int], ...] = ()


class FormQuality(msgspec.Struct, frozen=True, kw_only=True):
    """The quality of a model's predictions with one value of `kv_bits`.

    `form` is that value: `native` (not quantized), `8`, `8/4` or `4`. The other fields are null if
    the model does not support it; `refused` then has the reason. `agreement` is the share of tokens
    whose most likely prediction is the same as with `native`. `kl_divergence` is the divergence
    from the predictions with `native`, in nats per token. `right` is the number of correct answers
    to questions about notes. `bytes_per_token` is the memory that a token takes.
    """

    form: str
    perplexity: float | None = None
    kl_divergence: float | None = None
    agreement: float | None = None
    right: int | None = None
    bytes_per_token: int | None = None
    refused: str | None = None


class QualityReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `holdfast quality`: how much quantized keys and values degrade a model.

    `text_tokens` predictions were compared, with `quantized_tokens` quantized tokens before each of
    them on average. `forms` has one item for each value of `kv_bits`, `native` first.
    """

    model: str
    fingerprint: str  # of the model's files
    measured_at: str  # ISO 8601
    mlx_version: str
    compute_dtype: str
    text: str  # name of the text that was read
    text_tokens: int
    quantized_tokens: int
    questions: int  # how many were asked about notes
    forms: tuple[FormQuality, ...]

    @property
    def native(self) -> FormQuality:
        """The predictions with native keys and values."""
        return self.forms[0]

    def perplexity_change(self, quality: FormQuality) -> float | None:
        """How much higher the perplexity is than with native keys and values, as a share; None if
        it was not measured.
        """
        if quality.perplexity is None or not self.native.perplexity:
            return None
        return quality.perplexity / self.native.perplexity - 1


def save_quality(report: QualityReport, environ: Mapping[str, str]) -> None:
    """Keep a result, and delete the oldest ones. Raises ModelLoadError if that fails."""
    file = _file(report.fingerprint, environ)
    if file is None:
        raise ModelLoadError("the result cannot be kept: the user has no home folder")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_write(file) as opened:
            opened.write(msgspec.json.format(msgspec.json.encode(report), indent=2))
        files = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime_ns)
        for old_file in files[:-MOST_RESULTS]:
            old_file.unlink(missing_ok=True)
    except OSError as error:
        raise ModelLoadError(f"the result cannot be kept: {error}") from error


def find_quality(fingerprint: str, environ: Mapping[str, str]) -> QualityReport | None:
    """The kept result for a model with this fingerprint; None if there is none. Reads one small
    file.
    """
    file = _file(fingerprint, environ)
    if not fingerprint or file is None:
        return None
    try:
        report = msgspec.json.decode(read_regular(file), type=QualityReport)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        logger.info("%s is not used: %s", file, error)
        return None
    return report if report.fingerprint == fingerprint and report.forms else None


def _file(fingerprint: str, environ: Mapping[str, str]) -> Path | None:
    """The file for the result of a model; None without a home folder."""
    folder = quality_folder(environ)
    return Path(folder) / f"{fingerprint}.json" if folder else None

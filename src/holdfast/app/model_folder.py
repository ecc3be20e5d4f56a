"""From the setting model.path to a local folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.config import ModelSettings
from holdfast.models.download import resolve_model

Progress = Callable[[str, float], None]


def local_folder(settings: ModelSettings, *, progress: Progress = lambda stage, fraction: None) -> Path:
    """The folder with the model, fetched from the Hub if need be. Raises ModelLoadError or DownloadError with one line."""
    return resolve_model(settings, progress=progress)

"""Folders that pass for models as long as nothing is loaded, and the kinds of damage that they can
have.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.fakes.foreign_weights import stored, write_safetensors

WEIGHTS = "model.safetensors"


def write_bare_model(
    folder: Path, *weights: str, model_type: object = "llama", **config: object
) -> Path:
    """Write a folder with a configuration, a tokenizer and weight files (one, if none are named)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    (folder / "tokenizer.json").write_text("{}")
    for number, name in enumerate(weights or (WEIGHTS,)):
        write_safetensors(folder / name, {f"w{number}": stored(np.ones(4))})
    return folder

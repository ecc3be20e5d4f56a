"""The model that tests of whole servers and of the library use."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.models.download import demo_folder


def served_model_folder() -> Path:
    """The bundled model, or the one in the variable (a model that is still in training, for
    instance).
    """
    named = os.environ.get("TEST_MODEL_FOLDER")
    return Path(named) if named else demo_folder()

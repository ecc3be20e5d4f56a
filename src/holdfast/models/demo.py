"""The tiny bundled models, for trying and testing Holdfast without a download."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from holdfast.errors import ModelLoadError

DEMO_ID = "holdfast-demo"
DEMO_IDS = (DEMO_ID, "holdfast-demo-draft", "holdfast-demo-window")


def is_demo(model: str) -> bool:
    """Whether this is the id of a bundled model; empty means the first one."""
    return model == "" or model in DEMO_IDS


def demo_folder(model: str = DEMO_ID) -> Path:
    """The folder of a bundled model. Raises ModelLoadError if there is no such model."""
    if not is_demo(model):
        raise ModelLoadError(f"{model!r} is not a bundled model; there are {', '.join(DEMO_IDS)}")
    name = model or DEMO_ID
    folder = Path(str(resources.files("holdfast.models"))) / "bundled" / name
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"this installation does not have the bundled model {name}")
    return folder

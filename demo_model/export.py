"""Writes trained weights as a bundled model: `python export.py holdfast-demo WORK_FOLDER OUTPUT`.

Shape, tokenizer and template never change, so the other files are copied from the bundled model.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import mlx.core as mx
from recipes import RECIPES
from words import BUNDLED

WEIGHTS = "model.safetensors"


def export(name: str, checkpoint: Path, output: Path) -> None:
    """Write the model folder: the mean of the trained weights and the initial ones, weighted by the
    recipe, in bfloat16.
    """
    initial, share = mx.load(str(BUNDLED / name / WEIGHTS)), RECIPES[name].blend
    weights = {}
    for key, value in mx.load(str(checkpoint)).items():
        if key.startswith("model."):
            path = key.removeprefix("model.")
            # Both sides are rounded to bfloat16, as each would be if it were exported alone.
            trained = value.astype(mx.bfloat16).astype(mx.float32)
            blended = share * trained + (1 - share) * initial[path].astype(mx.float32)
            weights[path] = blended.astype(mx.bfloat16)
    mx.eval(weights)
    if output != BUNDLED / name:
        shutil.copytree(BUNDLED / name, output, dirs_exist_ok=True)
    mx.save_safetensors(str(output / WEIGHTS), weights, {"format": "pt"})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("work", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    checkpoint = arguments.work / "checkpoint.safetensors"
    export(arguments.model, checkpoint, arguments.output.resolve())


if __name__ == "__main__":
    main()

"""Write trained weights as a bundled model: `python export.py holdfast-demo WORK_FOLDER OUTPUT`.

Shape, tokenizer and template never change, so the other files are copied from the bundled model.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from recipes import RECIPES, Recipe
from safetensors.torch import load_file, save_file
from words import BUNDLED


def exported_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a bundled model in float32, named as in `Network`."""
    tensors = load_file(str(folder / "model.safetensors"))
    return {key.removeprefix("model."): value.float() for key, value in tensors.items()}


def blended(recipe: Recipe, trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The mean of the trained weights and the initial ones, weighted by the recipe."""
    initial = exported_weights(BUNDLED / recipe.name)
    return {
        # Both sides are rounded to bfloat16, as each would be if it were exported alone.
        key: recipe.blend * value.bfloat16().float() + (1 - recipe.blend) * initial[key]
        for key, value in trained.items()
    }


def export(name: str, work: Path, output: Path) -> None:
    """Write the model folder, with weights in bfloat16."""
    checkpoint = torch.load(work / "checkpoint.pt", map_location="cpu")
    weights = blended(RECIPES[name], checkpoint["network"])
    tensors = {
        f"model.{key}": value.to(torch.bfloat16).contiguous() for key, value in weights.items()
    }
    if output != BUNDLED / name:
        shutil.copytree(BUNDLED / name, output, dirs_exist_ok=True)
    save_file(tensors, str(output / "model.safetensors"), metadata={"format": "pt"})
    (output / "model.safetensors").chmod(0o644)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("work", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    export(arguments.model, arguments.work, arguments.output.resolve())


if __name__ == "__main__":
    main()

"""Writes docs/reference/architectures.md: the layout that the probe chooses for each architecture, and how the others did.

Run: `make architectures`, or `python -m tools.architectures > docs/reference/architectures.md` from the root of the repository.
"""

from __future__ import annotations

from importlib import metadata

from holdfast.models import mlx_lm_import

mlx_lm_import.prepare()  # the seam has to be in place before a model module is imported

from holdfast.engine.probe import Trial, choose_layout, trial_of_each_layout  # noqa: E402
from tests.fakes.tiny_models import TINY, VOCAB_SIZE, make_tiny  # noqa: E402

HEADER = """# Layouts of architectures

Made by `make architectures` with mlx {mlx} and mlx-lm {mlx_lm} on tiny random models (fp32, CPU). The number is the largest error
of any logit, relative to what one changed token of the context does to the logits; a layout is right up to 1e-3. The probe takes
the first right one from left to right; it runs on every model at load, so that a model that is not in this table is right too.

| architecture | layout | rows | split, seam | split, gathered | split, gathered, grouped masks | solo |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Print the table."""
    print(HEADER.format(mlx=metadata.version("mlx"), mlx_lm=metadata.version("mlx-lm")), end="")
    for name in sorted(TINY):
        chosen = choose_layout(make_tiny(name), vocab_size=VOCAB_SIZE).name
        trials = trial_of_each_layout(make_tiny(name), vocab_size=VOCAB_SIZE)
        print(f"| {name} | **{chosen}** | " + " | ".join(_cell(trial) for trial in trials) + " |")


def _cell(trial: Trial) -> str:
    if trial.relative_error is not None:
        return f"{trial.relative_error:.0e}" if trial.relative_error else "0"
    return trial.note.split(":", 1)[0]


if __name__ == "__main__":
    main()

"""Write docs/reference/architectures.md: the layout that the probe chooses for each architecture,
and the results of the others.

Run: `make architectures`, or `python -m tools.architectures > docs/reference/architectures.md` from
the root of the repository.
"""

from __future__ import annotations

from importlib import metadata

from holdfast.worker.engine import seams

seams.prepare()  # the seam has to be in place before a model module is imported

from holdfast.worker.engine.probe import Trial, choose_layout, trial_of_each_layout  # noqa: E402
from tests.fakes.tiny_models import TINY, VOCAB_SIZE, make_tiny  # noqa: E402

HEADER = """# Architectures

Holdfast runs unmodified mlx-lm models in one of three layouts. When it loads a model, it tries the layouts in the order
of the next table and uses the first one that computes correct results. So architectures that the second table does not
list can work too. `holdfast doctor MODEL` shows the layout of a model; `model.layout` forces one.

| layout | meaning |
|---|---|
| `rows` | one forward pass for all sequences, prefill and decode together; the fastest |
| `split` | one forward pass for all decoding sequences, and one per prompt chunk; for recurrent or unusual layers |
| `solo` | one forward pass per sequence, without prefix cache; the slowest |

`make architectures` generates the table below with mlx {mlx} and mlx-lm {mlx_lm} on tiny random models (float32, CPU).
A number is the largest error of any logit, relative to the effect of one changed token of the context; a layout counts
as correct up to 1e-3. A word is the exception because of which a layout was rejected. The three `split` columns differ
in how decoding sequences attend: through Holdfast's attention function (seam), or in the model's own code over padded
copies of their KV (gathered), if necessary with one more mask dimension (grouped masks).

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

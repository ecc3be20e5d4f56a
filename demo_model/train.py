"""Continues the training of a bundled model: `python train.py holdfast-demo WORK_FOLDER`.

If the folder has a checkpoint, the training resumes from it; SIGTERM saves one and ends.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from pathlib import Path
from typing import Any

from holdfast.worker.cpu.blas import prepare_blas

prepare_blas()  # before the first import of MLX

import mlx.core as mx  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
from conversation import Encoder  # noqa: E402
from mlx import nn  # noqa: E402
from mlx.utils import tree_flatten, tree_map, tree_unflatten  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402
from recipes import RECIPES, Recipe  # noqa: E402
from stream import Batch, Stream  # noqa: E402
from words import BUNDLED  # noqa: E402

CHECKPOINT = "checkpoint.safetensors"
LOWEST_RATE = 0.02  # relative to the highest learning rate
DECAY = 0.01  # of the matrices, relative to their learning rate
SECONDS_BETWEEN_SAVES = 120


def rate_factor(recipe: Recipe, done: float) -> float:
    """The learning rate, relative to the highest one: it rises, then falls linearly."""
    if done < recipe.warm_up:
        return max(LOWEST_RATE, done / recipe.warm_up)
    return max(LOWEST_RATE, (1 - done) / (1 - recipe.warm_up))


def is_matrix(path: str, parameter: mx.array) -> bool:
    """Whether Muon trains a parameter; embeddings and norms are trained by Adam."""
    return parameter.ndim == 2 and "embed" not in path


def losses_of(model: Any, batch: Batch) -> tuple[mx.array, mx.array]:
    """The weighted loss of a batch, as a sum, and the mean loss of the model's own tokens."""
    hidden = model.model(batch.tokens[:, :-1])
    chosen = hidden.reshape(-1, hidden.shape[-1])[batch.positions]
    losses = nn.losses.cross_entropy(model.model.embed_tokens.as_linear(chosen), batch.targets)
    own = batch.weights == 1.0
    return (losses * batch.weights).sum(), (losses * own).sum() / mx.maximum(own.sum(), 1)


class Trainer:
    """A training run. Its checkpoint contains all of its state."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        folder.mkdir(parents=True, exist_ok=True)
        bundled = BUNDLED / recipe.name
        self.model, _ = load_model(bundled)
        self.model.set_dtype(mx.float32)
        self.optimizer = optim.MultiOptimizer(
            [
                optim.Muon(recipe.muon_rate, momentum=0.95, weight_decay=0.0),
                optim.Adam(recipe.adam_rate, betas=[0.9, 0.95], bias_correction=True),
            ],
            [is_matrix],
        )
        self.optimizer.init(self.model.trainable_parameters())
        self.gradients = nn.value_and_grad(self.model, losses_of)
        self.stream = Stream(Encoder(bundled / "tokenizer.json"), recipe)
        self.counters: dict[str, Any] = {
            "pool_number": 0,
            "pool_done": 0.0,
            "next_batch": 0,
            "tokens": 0,
            "steps": 0,
        }
        self.answer_loss = 0.0
        self.is_stopping = False
        self._restore()

    @property
    def done(self) -> float:
        """The completed share of the training."""
        return float(self.counters["tokens"] / 1e6 / self.recipe.million_tokens)

    def run(self) -> None:
        """Train to the end or until stopped."""
        self.started = self.saved = time.monotonic()
        self.tokens_before = self.counters["tokens"]
        counters = self.counters
        while self.done < 1.0 and not self.is_stopping:
            batches = self.stream.pool(counters["pool_number"], counters["pool_done"])
            while counters["next_batch"] < len(batches) and self.done < 1.0:
                first = counters["next_batch"]
                self._step(batches[first : first + self.recipe.passes])
                counters["next_batch"] += self.recipe.passes
                self._report()
                if self.is_stopping:
                    break
            if counters["next_batch"] >= len(batches):
                counters["pool_number"] += 1
                counters["pool_done"] = self.done
                counters["next_batch"] = 0
        self.save()

    def stop(self, *_: object) -> None:
        """Signal handler: save and stop after the current step."""
        self.is_stopping = True

    def save(self) -> None:
        """Replace the checkpoint atomically."""
        state = {"model": self.model.parameters(), "optimizer": self.optimizer.state}
        partial = self.folder / f"partial-{CHECKPOINT}"
        counters = json.dumps(self.counters)
        mx.save_safetensors(str(partial), dict(tree_flatten(state)), {"counters": counters})
        partial.rename(self.folder / CHECKPOINT)

    def _restore(self) -> None:
        path = self.folder / CHECKPOINT
        if path.exists():
            arrays, metadata = mx.load(str(path), return_metadata=True)
            state = tree_unflatten(list(arrays.items()))
            self.model.update(state["model"])
            self.optimizer.state = state["optimizer"]
            self.counters = json.loads(metadata["counters"])

    def _report(self) -> None:
        """Print progress and save the checkpoint from time to time."""
        now, tokens = time.monotonic(), self.counters["tokens"]
        if self.counters["steps"] % 25 == 0:
            speed = (tokens - self.tokens_before) / (now - self.started)
            print(
                f"{tokens / 1e6:.2f}M tokens, {self.done:.1%}, answer loss {self.answer_loss:.4f}, "
                f"{speed:.0f} tokens/s",
                flush=True,
            )
        if now - self.saved > SECONDS_BETWEEN_SAVES:
            self.save()
            self.saved = now

    def _step(self, batches: list[Batch]) -> None:
        total = sum(batch.weights.sum().item() for batch in batches)
        summed = None
        for batch in batches:
            (_, own_loss), found = self.gradients(self.model, batch)
            summed = found if summed is None else tree_map(mx.add, summed, found)
            mx.eval(summed, own_loss)
            kept = 0.98 if self.answer_loss else 0.0
            self.answer_loss = kept * self.answer_loss + (1 - kept) * own_loss.item()
            self.counters["tokens"] += batch.size
        mean = tree_map(lambda gradient: gradient / total, summed)
        clipped, _ = optim.clip_grad_norm(mean, 1.0)
        self._update(clipped, rate_factor(self.recipe, self.done))
        self.counters["steps"] += 1

    def _update(self, gradients: Any, factor: float) -> None:
        muon, adam = self.optimizer.optimizers
        muon.learning_rate = self.recipe.muon_rate * factor
        adam.learning_rate = self.recipe.adam_rate * factor
        kept = 1 - self.recipe.muon_rate * factor * DECAY
        decayed = [
            (path, parameter * kept if is_matrix(path, parameter) else parameter)
            for path, parameter in tree_flatten(self.model.trainable_parameters())
        ]
        self.model.update(tree_unflatten(decayed))
        self.optimizer.update(self.model, gradients)
        mx.eval(self.model.parameters(), self.optimizer.state)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("folder", type=Path, help="where the checkpoint is kept")
    arguments = parser.parse_args()
    trainer = Trainer(RECIPES[arguments.model], arguments.folder)
    signal.signal(signal.SIGTERM, trainer.stop)
    trainer.run()
    mx.clear_streams()


if __name__ == "__main__":
    main()

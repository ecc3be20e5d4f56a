"""Continue the training of a bundled model: `python train.py holdfast-demo WORK_FOLDER`.

If the folder has a checkpoint, the training resumes from it; SIGTERM saves one and ends.
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conversation import Encoder
from export import exported_weights
from network import Network
from optimizer import Optimizer
from recipes import RECIPES, Recipe
from stream import Batch, Stream
from words import BUNDLED

LOWEST_RATE = 0.02  # relative to the highest learning rate
SECONDS_BETWEEN_SAVES = 120


def rate_factor(recipe: Recipe, done: float) -> float:
    """The learning rate, relative to the highest one: it rises, then falls linearly."""
    if done < recipe.warm_up:
        return max(LOWEST_RATE, done / recipe.warm_up)
    return max(LOWEST_RATE, (1 - done) / (1 - recipe.warm_up))


class Trainer:
    """A training run. Its checkpoint contains all of its state."""

    def __init__(self, recipe: Recipe, folder: Path, float32: bool = False) -> None:
        self.recipe, self.folder, self.float32 = recipe, folder, float32
        folder.mkdir(parents=True, exist_ok=True)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(recipe.seed)
        bundled = BUNDLED / recipe.name
        self.network = Network(recipe.shape).to(self.device)
        self.network.load_state_dict(exported_weights(bundled))
        self.optimizer = Optimizer(self.network, recipe.muon_rate, recipe.adam_rate)
        self.stream = Stream(Encoder(bundled / "tokenizer.json"), recipe)
        self.counters: dict[str, Any] = {
            "pool_number": 0,
            "pool_done": 0.0,
            "next_batch": 0,
            "tokens": 0,
            "steps": 0,
        }
        self.answer_loss = 8.0
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
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state(),
            "counters": self.counters,
        }
        partial = self.folder / "checkpoint.partial"
        torch.save(state, partial)
        partial.rename(self.folder / "checkpoint.pt")

    def _restore(self) -> None:
        path = self.folder / "checkpoint.pt"
        if path.exists():
            state = torch.load(path, map_location=self.device)
            self.network.load_state_dict(state["network"])
            self.optimizer.restore(state["optimizer"])
            self.counters = state["counters"]

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
        for batch in batches:
            (self._loss(batch) * (batch.weights.sum().item() / total)).backward()
        self.counters["tokens"] += sum(batch.size for batch in batches)
        self.optimizer.step(rate_factor(self.recipe, self.done))
        self.counters["steps"] += 1

    def _loss(self, batch: Batch) -> torch.Tensor:
        """The weighted loss of a batch."""
        weights = batch.weights.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=not self.float32):
            logits = self.network(
                batch.tokens.to(self.device)[:, :-1], batch.positions.to(self.device)
            )
        losses = F.cross_entropy(logits.float(), batch.targets.to(self.device), reduction="none")
        answers = weights == 1.0
        if answers.any():
            mean = losses.detach()[answers].mean().item()
            self.answer_loss = 0.98 * self.answer_loss + 0.02 * mean
        return (losses * weights).sum() / weights.sum()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("folder", type=Path, help="where the checkpoint is kept")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--float32", action="store_true", help="for CPUs without bfloat16 units")
    parser.add_argument("--compile", action="store_true", help="compile the layers first")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(RECIPES[arguments.model], arguments.folder, arguments.float32)
    if arguments.compile:
        for layer in trainer.network.layers:
            layer.compile(dynamic=True)
    signal.signal(signal.SIGTERM, trainer.stop)
    trainer.run()


if __name__ == "__main__":
    main()

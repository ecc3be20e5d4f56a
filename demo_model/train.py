"""Train one of the models: `python train.py holdfast-demo WORK_FOLDER`.

Goes on from the checkpoint that it finds there.

On a busy machine two processes of one thread each are much faster than two threads (the sum of the
gradients is the same): `torchrun --nproc-per-node 2 train.py holdfast-demo WORK_FOLDER --threads
1`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from export import exported_weights
from network import Network
from optimizer import Optimizer
from recipes import BUNDLED, RECIPES, Recipe
from stream import Batch, Stream
from tokenizer import Encoder
from tokenizer import train as train_tokenizer

FLOOR = 0.02
"""The lowest learning rate, as a share of the highest."""


def rate_factor(recipe: Recipe, done: float) -> float:
    """The learning rate at this share of the training: up, level, and down in a straight line."""
    if done < recipe.warm_up:
        return max(FLOOR, done / recipe.warm_up)
    return max(FLOOR, min(1.0, (1 - done) / recipe.cool_down))


class Trainer:
    """One training run; all that it needs to go on is in its checkpoint."""

    def __init__(
        self, recipe: Recipe, folder: Path, rank: int = 0, ranks: int = 1, float32: bool = False
    ) -> None:
        self.recipe, self.folder, self.rank, self.ranks = recipe, folder, rank, ranks
        self.float32 = float32
        folder.mkdir(parents=True, exist_ok=True)
        vocabulary = folder / "tokenizer.json"
        if recipe.begins_with and not vocabulary.exists():
            shutil.copyfile(BUNDLED / recipe.begins_with / vocabulary.name, vocabulary)
        if not vocabulary.exists():
            train_tokenizer().save(str(vocabulary))
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(recipe.seed)
        self.network = Network(recipe.shape).to(self.device)
        if recipe.begins_with:
            self.network.load_state_dict(exported_weights(BUNDLED / recipe.begins_with))
        self.optimizer = Optimizer(self.network, recipe.muon_rate, recipe.adam_rate)
        self.stream = Stream(Encoder(vocabulary), recipe)
        self.pool_number, self.pool_done, self.next_batch = 0, 0.0, 0
        self.tokens, self.steps, self.seconds = 0, 0, 0.0
        self.answer_loss = 8.0
        self.wish_to_stop = self.stopping = False
        self._restore()

    @property
    def done(self) -> float:
        """The share of the training that is done."""
        return self.recipe.done(self.tokens)

    def loss_of(self, batch: Batch) -> torch.Tensor:
        """The weighted loss of a batch; keeps the mean loss of answers in `answer_loss`."""
        tokens = batch.tokens.to(self.device)
        weights = batch.weights.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=not self.float32):
            logits = self.network(tokens[:, :-1], batch.positions.to(self.device))
        losses = F.cross_entropy(logits.float(), batch.targets.to(self.device), reduction="none")
        answers = weights == 1.0
        if answers.any():
            self.answer_loss = (
                0.98 * self.answer_loss + 0.02 * losses.detach()[answers].mean().item()
            )
        return (losses * weights).sum() / weights.sum()

    def run(self, stop_at: float) -> None:
        """Train until this share is done, saving every few minutes."""
        self.started, self.saved, self.before = (
            time.time(),
            time.time(),
            (self.seconds, self.tokens),
        )
        while self.done < min(1.0, stop_at) and not self.stopping:
            batches = self.stream.pool(self.pool_number, self.pool_done)
            while self.next_batch < len(batches) and self.done < 1.0 and not self.stopping:
                self._step(batches[self.next_batch : self.next_batch + self.recipe.passes])
                self.next_batch += self.recipe.passes
                self._watch()
            if self.next_batch >= len(batches):
                self.pool_number, self.pool_done, self.next_batch = (
                    self.pool_number + 1,
                    self.done,
                    0,
                )
        self.save()

    def compile(self) -> None:
        """Compile the layers, once for batches of all sizes."""
        for layer in self.network.layers:
            layer.compile(dynamic=True)

    def stop(self, *_: object) -> None:
        """Save and stop after the step at hand (a signal handler)."""
        self.wish_to_stop = True

    def _watch(self) -> None:
        """Keep the time, tell how it goes, save now and then."""
        seconds = time.time() - self.started
        self.seconds = self.before[0] + seconds
        if self.steps % 25 == 0 and not self.rank:
            print(
                f"step {self.steps} tokens {self.tokens / 1e6:.2f}M done {self.done:.3f} answer "
                f"loss {self.answer_loss:.4f} "
                f"{(self.tokens - self.before[1]) / seconds:.0f} tokens/s {self.seconds / 60:.1f} "
                "min",
                flush=True,
            )
        if time.time() - self.saved > 120:
            self.save()
            self.saved = time.time()

    def _step(self, batches: list[Batch]) -> None:
        total = sum(batch.weights.sum().item() for batch in batches)
        for batch in batches[self.rank :: self.ranks]:
            (self.loss_of(batch) * (batch.weights.sum().item() / total)).backward()
        self.tokens += sum(batch.size for batch in batches)
        self.stopping = self.wish_to_stop
        if self.ranks > 1:
            self._share_gradients()
        self.optimizer.step(rate_factor(self.recipe, self.done))
        self.steps += 1

    def _share_gradients(self) -> None:
        """Sum the gradients of all processes; a wish to stop goes with them, so that all stop after
        the same step.
        """
        parameters = list(self.network.parameters())
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in parameters
        ]
        wish = torch.tensor([float(self.wish_to_stop)], device=self.device)
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), wish])
        dist.all_reduce(flat)
        self.stopping = bool(flat[-1] > 0)
        parts = flat[:-1].split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        if self.rank:
            return
        counters = {
            name: getattr(self, name)
            for name in (
                "pool_number",
                "pool_done",
                "next_batch",
                "tokens",
                "steps",
                "seconds",
                "answer_loss",
            )
        }
        state: dict[str, Any] = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state(),
            "counters": counters,
        }
        partial = self.folder / "checkpoint.partial"
        torch.save(state, partial)
        partial.rename(self.folder / "checkpoint.pt")

    def _restore(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device)
        self.network.load_state_dict(state["network"])
        self.optimizer.restore(state["optimizer"])
        for name, value in state["counters"].items():
            setattr(self, name, value)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("folder", type=Path, help="where checkpoint and tokenizer are kept")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--stop-at", type=float, default=1.0, help="stop when this share is done (go on later)"
    )
    parser.add_argument(
        "--float32",
        action="store_true",
        help="for a CPU without bfloat16 units, where bfloat16 is slow",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the layers first: minutes, then a quarter faster",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    trainer = Trainer(RECIPES[arguments.model], arguments.folder, rank, ranks, arguments.float32)
    if arguments.compile:
        trainer.compile()
    size = sum(parameter.numel() for parameter in trainer.network.parameters())
    print(
        f"{arguments.model}: {size / 1e6:.2f}M parameters on {trainer.device}, from "
        f"{trainer.tokens / 1e6:.2f}M tokens on",
        flush=True,
    )
    signal.signal(signal.SIGTERM, trainer.stop)
    trainer.run(arguments.stop_at)


if __name__ == "__main__":
    main()

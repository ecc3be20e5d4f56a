"""Muon for the matrices, AdamW for embeddings and norms."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Orthogonalize a stack of matrices of equal size (Newton-Schulz)."""
    first, second, third = 3.4445, -4.7750, 2.0315
    wide = matrices.size(-2) <= matrices.size(-1)
    current = matrices.float() if wide else matrices.mT.float()
    current = current / (current.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = current @ current.mT
        current = first * current + (second * square + third * square @ square) @ current
    return (current if wide else current.mT).to(matrices.dtype)


class Muon:
    """Momentum with orthogonalized steps; see Keller Jordan,
    https://kellerjordan.github.io/posts/muon/.
    """

    def __init__(
        self, parameters: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        self.momentum, self.decay = momentum, decay
        self.parameters = parameters
        self.averages = [torch.zeros_like(parameter) for parameter in parameters]
        self.by_size: dict[torch.Size, list[int]] = defaultdict(list)
        for index, parameter in enumerate(parameters):
            self.by_size[parameter.shape].append(index)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step with this learning rate."""
        for shape, indices in self.by_size.items():
            directions = []
            for index in indices:
                gradient = self.parameters[index].grad
                assert gradient is not None
                self.averages[index].lerp_(gradient, 1 - self.momentum)
                directions.append(gradient.lerp(self.averages[index], self.momentum))
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for index, direction in zip(indices, orthogonal(torch.stack(directions)), strict=True):
                self.parameters[index].mul_(1 - rate * self.decay)
                self.parameters[index].add_(direction, alpha=-rate * scale)


class Optimizer:
    """Both optimizers under one learning-rate factor."""

    def __init__(self, network: nn.Module, muon_rate: float, adam_rate: float) -> None:
        self.network = network
        self.muon_rate, self.adam_rate = muon_rate, adam_rate
        named = list(network.named_parameters())
        self.muon = Muon(
            [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
        )
        rest = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
        self.adam = torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, factor: float) -> None:
        """Clip the gradients, take one step, and reset the gradients."""
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.muon.step(self.muon_rate * factor)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * factor
        self.adam.step()
        self.network.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"adam": self.adam.state_dict(), "muon": self.muon.averages}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.adam.load_state_dict(state["adam"])
        for average, saved in zip(self.muon.averages, state["muon"], strict=True):
            average.copy_(saved)

"""`holdfast models info`: how large a model is, and what of it fits."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from holdfast.cli.output import print_rows, size_text
from holdfast.errors import ModelLoadError
from holdfast.machine.device_memory import DeviceMemory, memory_report
from holdfast.models.context_window import UNKNOWN_CONTEXT_TOKENS, known_context_tokens
from holdfast.models.download import ModelSource
from holdfast.models.fit import Choice, Need, choice_for
from holdfast.models.hub_cache import local_folder
from holdfast.models.loadable import check_loadable
from holdfast.models.stored_size import StoredSize, size_of_folder, size_on_hub
from holdfast.worker.engine.sequence_size import sequence_size_of

_GIB = 1 << 30
_MACHINES = (16 * _GIB, 32 * _GIB, 64 * _GIB)
_AGENT_TOKENS = (8192, 32768, 131072)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """What `info` found out."""

    name: str
    place: str
    stored: StoredSize
    context_tokens: int
    here: Need  # in the form in which this machine computes
    usable_bytes: int  # of this machine, now
    memory: DeviceMemory
    agents_here: dict[int, int]  # by tokens of each
    choices: tuple[Choice, ...]

    @property
    def fits(self) -> bool:
        """Whether the weights fit here, and one agent with a short context."""
        return next(iter(self.agents_here.values()), 0) > 0

    def as_json(self) -> dict[str, Any]:
        """All figures, in bytes and tokens."""
        return {
            "model": self.name,
            "place": self.place,
            "model_type": self.stored.config.get("model_type"),
            "parameters": self.stored.parameters,
            "weight_bytes": self.stored.weight_bytes,
            "bits_per_weight": round(self.stored.bits_per_weight, 2),
            "context_tokens": self.context_tokens,
            "this_machine": {
                "memory_bytes": self.memory.total_bytes,
                "usable_bytes": self.usable_bytes,
                **asdict(self.here),
                "fits": self.fits,
                "agents": {str(tokens): agents for tokens, agents in self.agents_here.items()},
            },
            "choices": [asdict(choice) for choice in self.choices],
        }


def fit_of(source: ModelSource) -> ModelFit:
    """Look at headers and config.json of a model, here or on the Hub. Raises ModelLoadError."""
    folder = _whole_folder(source)
    stored = size_on_hub(source) if folder is None else size_of_folder(folder)
    sequence = sequence_size_of(stored.config)
    context = known_context_tokens(stored.config) or UNKNOWN_CONTEXT_TOKENS
    memory = memory_report(working_set_bytes=sequence.working_set_bytes)
    usable = sequence.working_set_bytes or memory.available_bytes
    # On a CPU everything becomes float32, if there is room for that (`weight_format`).
    unpacked = 4 * stored.parameters
    in_memory = (
        unpacked if sequence.is_on_cpu and unpacked <= usable * 0.75 else stored.weight_bytes
    )
    here = Need(
        weight_bytes=in_memory,
        bytes_per_token=sequence.bytes_per_token,
        fixed_bytes=sequence.fixed_bytes,
    )
    lengths = [tokens for tokens in _AGENT_TOKENS if tokens <= context] or [context]
    halves = 2 if sequence.is_on_cpu else 1  # a GPU keeps KV in 16 bits, a CPU in 32
    on_gpu = Need(
        weight_bytes=stored.weight_bytes,
        bytes_per_token=sequence.bytes_per_token // halves,
        fixed_bytes=sequence.fixed_bytes // halves,
    )
    return ModelFit(
        name=source.name,
        place="on the Hub, not fetched" if folder is None else str(folder),
        stored=stored,
        context_tokens=context,
        here=here,
        usable_bytes=usable,
        memory=memory,
        agents_here={tokens: here.agents(tokens, memory_bytes=usable) for tokens in lengths},
        choices=tuple(
            choice_for(total, on_gpu, parameters=stored.parameters, context_tokens=context)
            for total in _MACHINES
        ),
    )


def _whole_folder(source: ModelSource) -> Path | None:
    """Where the model is on this machine, whole; None where it has to be asked for on the Hub."""
    folder = local_folder(source, os.environ)
    if folder is None or source.kind != "hub":
        return folder
    try:
        check_loadable(folder)
    except ModelLoadError:
        return None
    return folder


def print_fit(info: ModelFit) -> None:
    """The figures as a person reads them."""
    stored, here = info.stored, info.here
    agents = ", ".join(
        f"{count:,} of {tokens:,} tokens" for tokens, count in info.agents_here.items()
    )
    computed = (
        ""
        if here.weight_bytes == stored.weight_bytes
        else f"; {size_text(here.weight_bytes)} in memory here, in float32"
    )
    beside = f", and {size_text(here.fixed_bytes)} for each agent" if here.fixed_bytes else ""
    rows = [
        ("model", f"{info.name} ({info.place})"),
        (
            "type",
            f"{stored.config.get('model_type')}, {stored.parameters / 1e6:,.1f} million parameters",
        ),
        (
            "weights",
            f"{size_text(stored.weight_bytes)}, {stored.bits_per_weight:.1f} bits each{computed}",
        ),
        ("context", f"{info.context_tokens:,} tokens"),
        ("KV", f"{size_text(here.bytes_per_token)} per token{beside}"),
        (
            "this machine",
            f"{size_text(info.usable_bytes)} to use of {size_text(info.memory.total_bytes)}",
        ),
        ("", f"it fits; room for agents: {agents}" if info.fits else "it does not fit"),
    ]
    print_rows(rows)
    typer.echo("")
    typer.echo("On a machine with a GPU that shares this memory:")
    for choice in info.choices:
        total = f"{choice.total_bytes // _GIB} GB"
        if choice.agents == 0:
            typer.echo(f"{total:<12}  too large, in every form")
            continue
        form = f"{choice.form} ({size_text(choice.need.weight_bytes)})"
        typer.echo(
            f"{total:<12}  use it {form}: enough memory for {choice.agents:,} agents with "
            f"{choice.tokens:,} tokens each"
        )

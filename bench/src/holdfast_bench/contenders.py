"""The servers that are measured: Holdfast and its peers, which are mlx_lm.server (as installed, or
with a fast BLAS), llama.cpp's server, and any other command.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.models.download import demo_folder
from holdfast.worker.cpu.kernels.build import SWITCH

# Loads a BLAS globally and then runs a module as `python -m` does, without importing Holdfast.
_WITH_BLAS = (
    "import ctypes, runpy, sys; ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL); "
    "sys.argv = sys.argv[2:]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
_FIND_BLAS = (
    "import os, sys; os.environ['HOLDFAST_KERNELS'] = sys.argv[1]; "
    "from holdfast.worker.cpu.blas import prepare_blas; found = prepare_blas(); "
    "print(found.file, found, sep='\\n')"
)
_FIND_INSTRUCTIONS = "import xllamacpp; print(xllamacpp.get_system_info().strip(' |\\n'))"
_ADDRESS = ("--host", "127.0.0.1", "--port", "{port}")
_HOLDFAST = (sys.executable, "-m", "holdfast.cli.main", "serve", "{model}", *_ADDRESS)
_MLX_LM = ("mlx_lm", "server", "--model", "{model}", *_ADDRESS, "--log-level", "WARNING")
_LLAMA_CPP = (
    sys.executable,
    "-m",
    "holdfast_bench.llama_cpp_server",
    "{model}",
    "--port",
    "{port}",
)
HOLDFAST, MLX_LM_WITH_BLAS, LLAMA_CPP = "holdfast", "mlx_lm+BLAS", "llama.cpp"
AS_INSTALLED = "mlx_lm-as-installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A server to measure: a command that starts it, or the URL of one that already runs.

    command: may contain {model}, {port} and {store}. model_id: empty for the first model in
    `/v1/models`. store_options: added to the command in scenarios that measure storage on disk.
    """

    label: str
    command: tuple[str, ...] = ()
    url: str = ""
    model_id: str = ""
    store_options: tuple[str, ...] = ()

    def storing(self) -> Contender:
        """The same server with a store on disk."""
        return replace(self, command=(*self.command, *self.store_options), store_options=())

    @property
    def is_ours_to_start(self) -> bool:
        """Whether the benchmark starts the server, so that it can also restart it and measure its
        memory.
        """
        return bool(self.command)

    def filled_command(self, *, model: Path, port: int, store: Path) -> list[str]:
        """The command, with the values in place of {model}, {port} and {store}."""
        words = {"{model}": str(model), "{port}": str(port), "{store}": str(store)}
        filled = []
        for part in self.command:
            for word, value in words.items():
                part = part.replace(word, value)
            filled.append(part)
        return filled


def holdfast(*options: str, label: str = HOLDFAST) -> Contender:
    """The Holdfast of this environment."""
    store = ("--store", "{store}")
    return Contender(label=label, command=(*_HOLDFAST, *options), store_options=store)


def mlx_lm_as_installed() -> Contender:
    """The mlx_lm.server of this environment, as installed: on Linux, with MLX's reference BLAS."""
    command = (sys.executable, "-m", *_MLX_LM)
    return Contender(label="mlx_lm as installed", command=command, model_id="default_model")


def mlx_lm() -> Contender:
    """The same with the system's OpenBLAS or MKL, loaded before MLX's own BLAS; as installed if the
    system has neither.
    """
    blas, _ = _blas(of_the_system=True)
    if not blas:
        return mlx_lm_as_installed()
    command = (sys.executable, "-c", _WITH_BLAS, blas, *_MLX_LM)
    return Contender(label=MLX_LM_WITH_BLAS, command=command, model_id="default_model")


def llama_cpp() -> Contender:
    """llama.cpp's server, from the package `xllamacpp`. Models are converted for it with the package
    `gguf`. Raises HoldfastError if one of the packages is not installed.
    """
    if not is_installed(LLAMA_CPP):
        raise HoldfastError(
            f"the peer {LLAMA_CPP} needs packages: pip install './bench[llama-cpp]'"
        )
    return Contender(label=LLAMA_CPP, command=_LLAMA_CPP)


def _speculating(peer: Contender, *options: str) -> Contender:
    return replace(peer, label=f"{peer.label} speculating", command=(*peer.command, *options))


def _draft_model() -> str:
    return str(demo_folder("holdfast-demo-draft"))


# Three of them are this Holdfast without speculation, and servers with the bundled draft model.
PEERS: dict[str, Callable[[], Contender]] = {
    "mlx_lm": mlx_lm,
    AS_INSTALLED: mlx_lm_as_installed,
    LLAMA_CPP: llama_cpp,
    "without-speculation": lambda: holdfast(
        "--speculation", "off", label="holdfast without speculation"
    ),
    "draft-model": lambda: holdfast(
        "--speculation", _draft_model(), label="holdfast with a draft model"
    ),
    "mlx_lm-draft-model": lambda: _speculating(mlx_lm(), "--draft-model", _draft_model()),
    "llama.cpp-ngrams": lambda: _speculating(llama_cpp(), "--ngrams"),
}


def peers_of(names: Sequence[str]) -> list[Contender]:
    """Return the peers with these names, each once. The name "none" is ignored. Raises HoldfastError
    for an unknown name.
    """
    wanted = [name for name in names if name != "none"]
    if unknown := [name for name in wanted if name not in PEERS]:
        known = ", ".join((*PEERS, "none"))
        raise HoldfastError(f"unknown peer {unknown[0]!r}; there are: {known}")
    found = [PEERS[name]() for name in wanted]
    return list({peer.label: peer for peer in found}.values())


def is_installed(name: str) -> bool:
    """Whether the packages that the peer `name` needs are installed."""
    return name != LLAMA_CPP or all(map(importlib.util.find_spec, ("xllamacpp", "gguf")))


def by_command(template: str, *, label: str = "peer") -> Contender:
    """Any server that a command starts. template: a shell command with {port} in it; {model} and
    {store} are optional. Raises HoldfastError if {port} is missing.
    """
    if "{port}" not in template:
        raise HoldfastError("the command of a peer must contain {port}, and usually {model}")
    return Contender(label=label, command=tuple(shlex.split(template)))


def products_of(labels: Collection[str]) -> dict[str, str]:
    """Describe the matrix multiplication of these contenders, by label: the BLAS and its target
    processor, or the instructions that llama.cpp uses. Other contenders are omitted.
    """
    found = {}
    if HOLDFAST in labels:
        found[HOLDFAST] = _blas(of_the_system=False)[1]
    if MLX_LM_WITH_BLAS in labels:
        found[MLX_LM_WITH_BLAS] = _blas(of_the_system=True)[1]
    if LLAMA_CPP in labels:
        found[LLAMA_CPP] = _told_by(_FIND_INSTRUCTIONS)
    return found


@cache
def _blas(*, of_the_system: bool) -> tuple[str, str]:
    """File and description of the BLAS that Holdfast loads. of_the_system: without Holdfast's
    kernels, so that it is a library that other programs can load too.
    """
    kernels = "0" if of_the_system else os.environ.get(SWITCH, "")
    lines = _told_by(_FIND_BLAS, kernels).split("\n")
    return lines[0], lines[-1]


def _told_by(script: str, *arguments: str) -> str:
    """The output of a Python script in another process, because looking for a BLAS loads it. The first
    time, it also compiles Holdfast's kernels.
    """
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.stdout.rstrip("\n")

"""The servers that are measured: Holdfast and its peers, which are mlx_lm.server (as installed, or
with a fast BLAS), llama.cpp's server, any other command, and any URL.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.models.download import demo_folder
from holdfast.worker.cpu.kernels.build import SWITCH

# Loads a BLAS globally and then runs a module as `python -m` does, without importing Holdfast.
_WITH_BLAS = (
    "import ctypes, runpy, sys; ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL); sys.argv = "
    "sys.argv[2:]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
_FIND_BLAS = (
    "import os, sys; os.environ['HOLDFAST_KERNELS'] = sys.argv[1]; "
    "from holdfast.worker.cpu.blas import prepare_blas; found = prepare_blas(); "
    "print(found.file, found, sep='\\n')"
)
_FIND_INSTRUCTIONS = "import xllamacpp; print(xllamacpp.get_system_info().strip(' |\\n'))"


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
    api_key: str = ""
    store_options: tuple[str, ...] = ()

    def storing(self) -> Contender:
        """The same server with a store on disk."""
        return replace(self, command=(*self.command, *self.store_options), store_options=())

    @property
    def is_ours_to_start(self) -> bool:
        """Whether the benchmark starts the server, so that it can also restart and kill it, and
        measure its memory.
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


def holdfast() -> Contender:
    """The Holdfast of this environment."""
    serve = (
        sys.executable,
        "-m",
        "holdfast.cli.main",
        "serve",
        "{model}",
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
    )
    return Contender(label=HOLDFAST, command=serve, store_options=("--store", "{store}"))


def without_speculation() -> Contender:
    """The Holdfast of this environment, with speculation turned off."""
    command = (*holdfast().command, "--speculation", "off")
    return Contender(label="holdfast without speculation", command=command)


def with_draft_model() -> Contender:
    """The Holdfast of this environment, with the bundled draft model."""
    command = (*holdfast().command, "--speculation", str(demo_folder(_DRAFT_ID)))
    return Contender(label="holdfast with a draft model", command=command)


def mlx_lm() -> Contender:
    """The mlx_lm.server of this environment, as installed: on Linux, with MLX's reference BLAS."""
    return Contender(
        label="mlx_lm as installed",
        command=(sys.executable, "-m", *_MLX_LM),
        model_id="default_model",
    )


def mlx_lm_with_blas() -> Contender:
    """The mlx_lm.server of this environment, with the system's OpenBLAS or MKL loaded before MLX's
    own BLAS. Raises HoldfastError if the system has neither.
    """
    blas = _blas_file()
    if not blas:
        raise HoldfastError("the system has no OpenBLAS or MKL to replace mlx_lm.server's own")
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
    command = (
        sys.executable,
        "-m",
        "holdfast_bench.llama_cpp_server",
        "{model}",
        "--port",
        "{port}",
    )
    return Contender(label=LLAMA_CPP, command=command)


def _drafting(peer: Contender, *options: str) -> Contender:
    """A peer with speculation."""
    return replace(peer, label=f"{peer.label} speculating", command=(*peer.command, *options))


_DRAFT_ID = "holdfast-demo-draft"
HOLDFAST, MLX_LM_WITH_BLAS, LLAMA_CPP = "holdfast", "mlx_lm+BLAS", "llama.cpp"
_MLX_LM = (
    "mlx_lm",
    "server",
    "--model",
    "{model}",
    "--host",
    "127.0.0.1",
    "--port",
    "{port}",
    "--log-level",
    "WARNING",
)


def peers_of(names: Sequence[str]) -> list[Contender]:
    """The peers with these names, without repetitions: "mlx_lm" (with the system's BLAS if it has
    one, otherwise as installed), "mlx_lm-as-installed", "llama.cpp",
    "without-speculation" (this Holdfast), "draft-model" (this Holdfast with the bundled draft
    model), "mlx_lm-draft-model" (with the same one), "llama.cpp-ngrams". "none" adds no peer.
    Raises HoldfastError for other names.
    """
    found: list[Contender] = []
    for name in names:
        match name:
            case "none":
                continue
            case "mlx_lm":
                found.append(mlx_lm_with_blas() if _blas_file() else mlx_lm())
            case "mlx_lm-as-installed":
                found.append(mlx_lm())
            case "llama.cpp":
                found.append(llama_cpp())
            case "mlx_lm-draft-model":
                peer = mlx_lm_with_blas() if _blas_file() else mlx_lm()
                found.append(_drafting(peer, "--draft-model", str(demo_folder(_DRAFT_ID))))
            case "llama.cpp-ngrams":
                found.append(_drafting(llama_cpp(), "--ngrams"))
            case "without-speculation":
                found.append(without_speculation())
            case "draft-model":
                found.append(with_draft_model())
            case _:
                raise HoldfastError(
                    f"unknown peer {name!r}; there are: mlx_lm, mlx_lm-as-installed, "
                    f"{LLAMA_CPP}, without-speculation, draft-model, mlx_lm-draft-model, "
                    "llama.cpp-ngrams, none"
                )
    return list({peer.label: peer for peer in found}.values())


def is_installed(name: str) -> bool:
    """Whether the packages that the peer `name` needs are installed."""
    return name != LLAMA_CPP or all(map(importlib.util.find_spec, ("xllamacpp", "gguf")))


def by_command(template: str, *, label: str = "peer") -> Contender:
    """Any server that a command starts. template: a shell command with {port} in it; {model} and
    {store} are optional. Raises HoldfastError if {port} is missing.
    """
    command = tuple(shlex.split(template))
    if "{port}" not in template or not command:
        raise HoldfastError("the command of a peer must contain {port}, and usually {model}")
    return Contender(label=label, command=command)


def by_url(url: str, *, label: str = "", model_id: str = "", api_key: str = "") -> Contender:
    """A server that already runs. label: by default, the host and port. Raises HoldfastError unless
    the URL begins with http://.
    """
    if not url.startswith("http://"):
        raise HoldfastError(f"{url!r}: the load generator supports http:// only")
    bare = url.rstrip("/").removesuffix("/v1")
    return Contender(
        label=label or bare.split("//")[-1], url=bare, model_id=model_id, api_key=api_key
    )


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


def _blas_file() -> str:
    return _blas(of_the_system=True)[0]


@cache
def _blas(*, of_the_system: bool) -> tuple[str, str]:
    """File and description of the BLAS that Holdfast loads. of_the_system: without Holdfast's
    kernels, so that it is a library that other programs can load too.
    """
    kernels = "0" if of_the_system else os.environ.get(SWITCH, "")
    lines = _told_by(_FIND_BLAS, kernels).split("\n")
    return lines[0], lines[-1]


def _told_by(script: str, *arguments: str) -> str:
    """The output of a Python script in another process, because looking for a BLAS loads it."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.rstrip("\n")

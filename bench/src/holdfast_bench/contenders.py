"""Who is measured: Holdfast, mlx_lm.server as installed or with a fast BLAS in front, any command,
any URL.
"""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from holdfast.errors import HoldfastError

# Loads a BLAS globally and then runs a module as `python -m` would; nothing of Holdfast is in that
# process.
_WITH_BLAS = (
    "import ctypes, runpy, sys; ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL); sys.argv = "
    "sys.argv[2:]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
_FIND_BLAS = (
    "import os, sys; os.environ['HOLDFAST_KERNELS'] = sys.argv[1]; "
    "from holdfast.machine.platform import prepare_blas; found = prepare_blas(); "
    "print(found.file, found, sep='\\n')"
)
_FIND_INSTRUCTIONS = "import xllamacpp; print(xllamacpp.get_system_info().strip(' |\\n'))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A server to measure: a command that starts it (with the words {model}, {port}, {store}), or
    the URL of a running one.
    """

    label: str
    command: tuple[str, ...] = ()
    url: str = ""
    model_id: str = ""  # "" asks /v1/models
    api_key: str = ""
    # added to the command where keeping things on disk is the subject
    store_options: tuple[str, ...] = ()

    def storing(self) -> Contender:
        """The same server, keeping things on disk."""
        return replace(self, command=(*self.command, *self.store_options), store_options=())

    @property
    def is_ours_to_start(self) -> bool:
        """Whether it can be started, restarted and killed from here, and its memory be seen."""
        return bool(self.command)

    def filled_command(self, *, model: Path, port: int, store: Path) -> list[str]:
        """The command with its words filled in."""
        words = {"{model}": str(model), "{port}": str(port), "{store}": str(store)}
        filled = []
        for part in self.command:
            for word, value in words.items():
                part = part.replace(word, value)
            filled.append(part)
        return filled


def holdfast() -> Contender:
    """This Holdfast."""
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


def mlx_lm() -> Contender:
    """mlx_lm.server of this environment, as it is installed."""
    return Contender(
        label="mlx_lm as installed",
        command=(sys.executable, "-m", *_MLX_LM),
        model_id="default_model",
    )


def mlx_lm_with_blas() -> Contender:
    """mlx_lm.server with the OpenBLAS or MKL of the system in front of MLX's own.

    Raises HoldfastError when there is none.
    """
    blas = _blas_file()
    if not blas:
        raise HoldfastError(
            "the system has no OpenBLAS or MKL that could be put in front of mlx_lm.server's own"
        )
    command = (sys.executable, "-c", _WITH_BLAS, blas, *_MLX_LM)
    return Contender(label=MLX_LM_WITH_BLAS, command=command, model_id="default_model")


def llama_cpp() -> Contender:
    """llama.cpp's server as the wheel `xllamacpp` brings it, and `gguf`, which writes its models.

    Raises HoldfastError when one of them is not installed.
    """
    if not is_installed(LLAMA_CPP):
        raise HoldfastError(f"the peer {LLAMA_CPP} needs packages: pip install xllamacpp gguf")
    command = (
        sys.executable,
        "-m",
        "holdfast_bench.llama_cpp_server",
        "{model}",
        "--port",
        "{port}",
    )
    return Contender(label=LLAMA_CPP, command=command)


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
    """Contenders by name: "mlx_lm" (with the BLAS in front where there is one, else as installed),
    "mlx_lm-as-installed", "llama.cpp", "none".

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
            case _:
                raise HoldfastError(
                    f"unknown peer {name!r}; there are: mlx_lm, mlx_lm-as-installed, {LLAMA_CPP}, "
                    "none"
                )
    return list({peer.label: peer for peer in found}.values())


def is_installed(name: str) -> bool:
    """Whether the peer of this name can be started here."""
    return name != LLAMA_CPP or all(map(importlib.util.find_spec, ("xllamacpp", "gguf")))


def by_command(template: str, *, label: str = "peer") -> Contender:
    """Any server by its command, with {model} and {port} (and {store}) in it. Raises HoldfastError."""
    command = tuple(shlex.split(template))
    if "{port}" not in template or not command:
        raise HoldfastError("a command for a peer must have {port} in it, and usually {model}")
    return Contender(label=label, command=command)


def by_url(url: str, *, label: str = "", model_id: str = "", api_key: str = "") -> Contender:
    """A server that runs already. Raises HoldfastError."""
    if not url.startswith("http://"):
        raise HoldfastError(f"{url!r}: the load generator speaks plain http:// only")
    bare = url.rstrip("/").removesuffix("/v1")
    return Contender(
        label=label or bare.split("//")[-1], url=bare, model_id=model_id, api_key=api_key
    )


def products_of(labels: Collection[str]) -> dict[str, str]:
    """What multiplies matrices in these contenders, and for which processor, as far as it is known."""
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
    """File and description of the BLAS that Holdfast finds.

    of_the_system: without its kernels, it is one that any program can load.
    """
    lines = _told_by(_FIND_BLAS, "0" if of_the_system else "").split("\n")
    return lines[0], lines[-1]


def _told_by(script: str, *arguments: str) -> str:
    """By another process: here, looking for a library would load it."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.rstrip("\n")

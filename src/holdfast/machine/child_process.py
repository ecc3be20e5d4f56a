"""Runs a module of the package in another process, which prints its result as JSON."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec

from holdfast.errors import HoldfastError


def answer_of(
    module: str,
    *arguments: str,
    answer_type: Any,
    doing: str,
    limit_seconds: float,
    sent: bytes = b"",
    hint: str = "",
) -> Any:
    """Run a module and return what it prints, decoded as `answer_type`.

    Raises HoldfastError with a message of one line. doing: what the module does, as the subject of a
    message. sent: its standard input. hint: what to do if it takes too long, as the end of a message.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        ended = subprocess.run(
            command, input=sent, capture_output=True, timeout=limit_seconds, check=True
        )
        return msgspec.json.decode(ended.stdout, type=answer_type)
    except subprocess.TimeoutExpired:
        raise HoldfastError(f"{doing} took more than {limit_seconds:.0f} s{hint}") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise HoldfastError(f"{doing} ended with code {error.returncode}: {lines[-1]}") from error
    except msgspec.DecodeError as error:
        raise HoldfastError(f"{doing} failed: {error}") from error

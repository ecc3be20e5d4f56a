"""What one sequence of a model keeps, told from its config.json alone: the model is laid out and
run, but nothing is computed.

MLX is lazy: a model without weights has shapes, and so have the caches after a forward pass that
nobody evaluates. Runs in a process of its own (`python -m holdfast.worker.engine.sequence_size`),
since the caller imports no MLX: use `sequence_size_of`.
"""

from __future__ import annotations

import importlib
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from holdfast.errors import ModelLoadError

_LONGEST_SECONDS = 120.0
_MOST_BYTES = 8 << 30  # of a process that was to compute nothing
_TOKENS = [[1, 2, 3]]


class SequenceSize(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a sequence keeps, and the device on which it was told."""

    bytes_per_token: int  # keys and values of layers that see everything
    fixed_bytes: int  # windows at their full size, and recurrent states
    is_on_cpu: bool
    working_set_bytes: int  # that a GPU recommends to use, or has; 0 on a CPU


def sequence_size_of(config: Mapping[str, Any]) -> SequenceSize:
    """The sizes for a model with that config.json, in a process of its own. Takes about 2 s.

    Raises ModelLoadError where mlx-lm has no such model, or does not tell its sizes without
    computing.
    """
    command = [sys.executable, "-P", "-m", "holdfast.worker.engine.sequence_size"]
    sent = msgspec.json.encode(dict(config))
    try:
        done = subprocess.run(
            command, input=sent, capture_output=True, timeout=_LONGEST_SECONDS, check=True
        )
        return msgspec.json.decode(done.stdout, type=SequenceSize)
    except subprocess.TimeoutExpired:
        raise ModelLoadError(
            f"what a sequence of it keeps was not told within {_LONGEST_SECONDS:.0f} s"
        ) from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {error.returncode}"
        raise ModelLoadError(f"what a sequence of it keeps cannot be told: {reason}") from error
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"what a sequence of it keeps cannot be told: {error}") from error


def _measured(config: dict[str, Any]) -> SequenceSize:
    from holdfast.machine import platform
    from holdfast.worker.engine import seams

    mx = importlib.import_module("mlx.core")
    utils = seams.mlx_lm_utils()
    model_class, arguments = utils._get_classes(config=config)
    model = model_class(arguments.from_dict(config))
    working_set_bytes = platform.working_set_bytes()
    # as it is stored; on a CPU everything becomes float32, which a fresh model is
    if working_set_bytes:
        model.set_dtype(mx.bfloat16)
    cache = importlib.import_module("mlx_lm.models.cache").make_prompt_cache(model)
    model(mx.array(_TOKENS), cache=cache)
    states = [_as_kept(part) for layer in cache for part in _parts(layer)]
    return SequenceSize(
        bytes_per_token=sum(state.bytes_per_token() for state in states),
        fixed_bytes=sum(state.fixed_bytes() for state in states),
        is_on_cpu=working_set_bytes == 0,
        working_set_bytes=working_set_bytes,
    )


def _parts(cache: Any) -> Iterator[Any]:
    inner = getattr(cache, "caches", None)
    if inner is None:
        yield cache
    else:
        yield from (part for each in inner for part in _parts(each))


def _as_kept(cache: Any) -> Any:
    """What stands for one of mlx-lm's caches here, with the same in it; foreign ones are told from
    outside.
    """
    kinds = importlib.import_module("holdfast.worker.kv.kinds")
    state = kinds.fresh_layer(cache)
    if not isinstance(state, kinds.WindowKV):
        return kinds.ForeignState(cache)
    keys, values = cache.state[:2]
    state.append(keys, values)
    return state


def _main() -> None:
    # a model that computes after all must not take the machine's memory
    if sys.platform == "linux":
        resource.setrlimit(
            resource.RLIMIT_DATA, (_MOST_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1])
        )
    size = _measured(msgspec.json.decode(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(msgspec.json.encode(size))


if __name__ == "__main__":
    _main()

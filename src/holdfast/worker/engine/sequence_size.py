"""The memory that a sequence of a model takes, derived from config.json alone, without running the
model.

MLX is lazy: a model without weights has shapes, and so do its caches after a forward pass that is
never evaluated. Callers must not import MLX, so `sequence_size_of` measures in another process
(`python -m holdfast.worker.engine.sequence_size`).
"""

from __future__ import annotations

import importlib
import resource
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from holdfast.errors import HoldfastError, ModelLoadError
from holdfast.machine.child_process import answer_of

_LONGEST_SECONDS = 120.0
_MOST_BYTES = 8 << 30  # memory limit of the measuring process, which should evaluate no array
_TOKENS = [[1, 2, 3]]


class SequenceSize(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a sequence's live state, and the device that computes it."""

    bytes_per_token: int  # keys and values of layers that keep every token
    fixed_bytes: int  # windows at their full size, and recurrent states
    is_on_cpu: bool
    working_set_bytes: int  # memory of a GPU: recommended, or else total; 0 on a CPU


def sequence_size_of(config: Mapping[str, Any]) -> SequenceSize:
    """Measure in another process the memory that a sequence takes in the model with this
    config.json. Takes about 2 s.

    Raises ModelLoadError if mlx-lm has no such model, or if the memory cannot be measured without
    running the model.
    """
    try:
        size: SequenceSize = answer_of(
            "holdfast.worker.engine.sequence_size",
            answer_type=SequenceSize,
            doing="measuring how much memory a sequence of this model takes",
            limit_seconds=_LONGEST_SECONDS,
            sent=msgspec.json.encode(dict(config)),
        )
    except HoldfastError as error:
        raise ModelLoadError(str(error)) from error
    return size


def _measure(config: dict[str, Any]) -> SequenceSize:
    """What `sequence_size_of` returns, in the process that imports MLX."""
    from holdfast.machine import platform
    from holdfast.worker.engine import mlx_lm_hooks

    mx = importlib.import_module("mlx.core")
    utils = mlx_lm_hooks.mlx_lm_utils()
    model_class, arguments = utils._get_classes(config=config)
    model = model_class(arguments.from_dict(config))
    working_set_bytes = platform.working_set_bytes()
    # the stored format; on a CPU everything becomes float32, which a new model already is
    if working_set_bytes:
        model.set_dtype(mx.bfloat16)
    cache = importlib.import_module("mlx_lm.models.cache").make_prompt_cache(model)
    model(mx.array(_TOKENS), cache=cache)
    states = [
        _layer_state_of(simple_cache) for layer in cache for simple_cache in _simple_caches(layer)
    ]
    return SequenceSize(
        bytes_per_token=sum(state.bytes_per_token() for state in states),
        fixed_bytes=sum(state.fixed_bytes() for state in states),
        is_on_cpu=working_set_bytes == 0,
        working_set_bytes=working_set_bytes,
    )


def _simple_caches(cache: Any) -> Iterator[Any]:
    """Yield an mlx-lm cache, or the caches that it is composed of (`CacheList`)."""
    inner_caches = getattr(cache, "caches", None)
    if inner_caches is None:
        yield cache
    else:
        yield from (part for each in inner_caches for part in _simple_caches(each))


def _layer_state_of(cache: Any) -> Any:
    """The layer state that Holdfast would use in place of an mlx-lm cache, with the same tokens."""
    kinds = importlib.import_module("holdfast.worker.kv.kinds")
    state = kinds.fresh_layer(cache)
    if not isinstance(state, kinds.WindowKV):
        return kinds.ForeignState(cache)
    keys, values = cache.state[:2]
    state.append(keys, values)
    return state


def _main() -> None:
    """Read config.json from stdin, and write a SequenceSize to stdout."""
    # in case a model evaluates its arrays after all
    if sys.platform == "linux":
        resource.setrlimit(
            resource.RLIMIT_DATA, (_MOST_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1])
        )
    size = _measure(msgspec.json.decode(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(msgspec.json.encode(size))


if __name__ == "__main__":
    _main()

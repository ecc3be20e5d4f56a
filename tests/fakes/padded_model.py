"""A model with a large, cheap weight file: its real weights lie between holes, which are tensors
that loading ignores. Their sizes are multiples of 4 bytes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.fakes.tiny_models import write_tiny

# mlx-lm's llama does not load tensors of this name
_LEFT_OUT = "model.layers.{}.self_attn.rotary_emb.inv_freq"
_ALIGNMENT = 64


def write_padded(folder: Path, *, before_bytes: int, behind_bytes: int) -> Path:
    """A tiny llama whose weights lie between a hole of `before_bytes` and another one.

    Returns the weight file.
    """
    write_tiny(folder, "llama")
    file = folder / "model.safetensors"
    header, data = _read(file)
    header.pop("__metadata__", None)
    moved = {
        name: {**entry, "data_offsets": [before_bytes + at for at in entry["data_offsets"]]}
        for name, entry in header.items()
    }
    end = before_bytes + len(data)
    moved[_LEFT_OUT.format(0)] = _hole(0, before_bytes)
    moved[_LEFT_OUT.format(1)] = _hole(end, end + behind_bytes)
    encoded = json.dumps(moved).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        out.seek(before_bytes, os.SEEK_CUR)
        out.write(data)
        out.truncate(out.tell() + behind_bytes)
    return file


def spoil_weights(file: Path) -> None:
    """Other weights of the same shapes in place: every number outside the holes changes its sign."""
    header, data_at = _header(file)
    with file.open("r+b") as opened:
        for name, entry in header.items():
            if "rotary_emb" in name or name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            opened.seek(data_at + begin)
            content = bytearray(opened.read(end - begin))
            # float32: the sign of every second one
            content[3::8] = bytes(byte ^ 0x80 for byte in content[3::8])
            opened.seek(data_at + begin)
            opened.write(content)


def _hole(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


def _header(file: Path) -> tuple[dict[str, Any], int]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return json.loads(opened.read(length)), 8 + length


def _read(file: Path) -> tuple[dict[str, Any], bytes]:
    header, data_at = _header(file)
    return header, file.read_bytes()[data_at:]

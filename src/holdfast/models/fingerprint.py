"""What makes one model's keys and values useless to another: weights, configuration, tokenizer, and how they are computed.

The chat template is not part of it: the token ids say already what it did. Paths and dates are not either, so that a copy of a
model finds what the original has read, and new weights under an old path do not.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

FINGERPRINT_FORMAT = 1

_WHOLE_BYTES = 256 * 1024 * 1024  # files up to this size are hashed whole
_SAMPLE_BYTES = 1024 * 1024
_SAMPLES = 64
_HEADER_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header, little endian

# Parts of a configuration that say nothing about what is computed.
_IRRELEVANT_KEYS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})


def model_fingerprint(folder: Path, *, computed_as: str, mlx_lm_version: str) -> str:
    """64 hex digits for the model in `folder`; reads at most 64 MB of each large weight file.

    computed_as: the compute format (dtype, packed or unpacked weights), which rounds differently. mlx_lm_version: its model code
    may change what is computed. The header of a safetensors file names every tensor and its place, so that sizes, header and
    samples together tell one training run from another.
    """
    digest = hashlib.blake2b(digest_size=32)
    _add(digest, f"holdfast {FINGERPRINT_FORMAT}", computed_as, mlx_lm_version)
    _add(digest, json.dumps(_relevant(json.loads((folder / "config.json").read_text())), sort_keys=True))
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            _add(digest, name, hashlib.blake2b((folder / name).read_bytes()).hexdigest())
    for file in sorted(folder.glob("model*.safetensors")):
        _add(digest, file.name, str(file.stat().st_size), _sampled_hash(file))
    return digest.hexdigest()


def _relevant(config: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in config.items() if key not in _IRRELEVANT_KEYS}


def _add(digest: hashlib.blake2b, *parts: str) -> None:
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)


def _sampled_hash(file: Path) -> str:
    digest, size = hashlib.blake2b(), file.stat().st_size
    with file.open("rb") as stream:
        if size <= _WHOLE_BYTES:
            while chunk := stream.read(_SAMPLE_BYTES):
                digest.update(chunk)
            return digest.hexdigest()
        header_bytes = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
        digest.update(stream.read(min(header_bytes, _SAMPLE_BYTES * _SAMPLES)))
        for index in range(_SAMPLES):
            stream.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()

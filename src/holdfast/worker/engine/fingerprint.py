"""The fingerprint of a model: a hash of everything that its cached KV depends on.

The hash covers the weights, configuration, tokenizer and templates, and the code that computes with
them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from holdfast.config import ModelSettings
from holdfast.errors import ModelLoadError
from holdfast.files import read_regular
from holdfast.models.adapter_folder import WEIGHTS, AdapterFiles, adapter_folders, files_of_adapter
from holdfast.models.file_hashing import ModelChanged
from holdfast.models.model_folder import WEIGHT_FILES, read_json
from holdfast.wire.kv import CacheScope

_OF_ADAPTERS = "adapter/"  # prefix of the names of adapters' files in the hashes
_FORMAT = 4  # version of the hashed data's format

_CONFIG = "config.json"
# Adapters in the model's own folder are included, although they are not applied; the names are
# those that mlx-lm and other software use.
_FILES_OF_A_MODEL = (
    WEIGHT_FILES, "adapter*.safetensors", "adapter_config.json", _CONFIG, "hf_quant_config.json",
    "tokenizer*", "*.tiktoken", "spiece.model", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates/*.jinja", "*processor_config.json",
)  # fmt: skip
# parts of a configuration that do not affect the computation
_IRRELEVANT_KEYS = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)
# source files of Holdfast that affect the numbers in a cached state
_OWN_CODE = (
    "worker/engine/mlx_lm_patches.py",
    "worker/engine/backend.py",
    "worker/engine/code_attention.py",
    "worker/engine/lora.py",
    "worker/engine/mlx_lm_hooks.py",
    "worker/engine/weight_format.py",
    "worker/engine/sequence.py",
    "worker/engine/layouts.py",
    "worker/vision/*.py",
    "models/image_files.py",
    "wire/images.py",
    "worker/engine/views.py",
    "worker/cpu/**/*.py",
    "worker/cpu/**/*.c",
    "worker/cpu/**/*.h",
    "worker/kv/*.py",
)


def files_of_identity(
    folder: Path, *, runs_own_code: bool, adapters: Mapping[str, Path] | None = None
) -> dict[str, Path]:
    """All files that affect the KV of the model in `folder`, by name: model files, source code, and
    the files of its adapters, each of which affects only the KV of requests to that adapter.

    runs_own_code: whether Python files of the folder are executed. If so, all files of the folder
    count, because that code may read them. adapters: their folders, by name.
    """
    model_files = dict(
        _all_files(folder) if runs_own_code else _matching_files(folder, _FILES_OF_A_MODEL)
    )
    all_files = {f"model/{name}": path for name, path in model_files.items()} | _source_files(
        "mlx_lm"
    )
    if any(name.endswith("processor_config.json") for name in model_files):  # a model with vision
        all_files |= _source_files("mlx_vlm")
    all_files |= _own_source_files()
    for name, adapter_folder in (adapters or {}).items():
        all_files |= files_of_adapter(name, adapter_folder)
    return all_files


def identity_lister(folder: Path, settings: ModelSettings) -> Callable[[], dict[str, Path]]:
    """A function that lists the files of a model with these settings (`files_of_identity`)."""
    return partial(
        files_of_identity,
        folder,
        runs_own_code=runs_own_code(folder, trust_remote_code=settings.trust_remote_code),
        adapters=adapter_folders(settings.adapters),
    )


def runs_own_code(folder: Path, *, trust_remote_code: bool) -> bool:
    """Whether the model is built by Python files in its folder."""
    try:
        return trust_remote_code and read_json(folder / _CONFIG).get("model_file") is not None
    except ModelLoadError:  # loading reports the error
        return False


def model_fingerprint(
    folder: Path, hashes: Mapping[str, str], *, computed_as: str, versions: Iterable[str]
) -> str:
    """A hash of everything that affects the KV of the model in `folder`.

    Paths and dates do not count: a copy of a model uses the cache of the original, but new weights
    under an old path do not. hashes: the hashes of `files_of_identity`, by name. computed_as: the
    number format (dtype, packed or dequantized weights), since each format rounds
    differently. versions: versions of the packages that compute. Raises ModelChanged if the
    configuration was changed after it was hashed.
    """
    digest = hashlib.blake2b(digest_size=32)
    _add_texts(digest, f"holdfast {_FORMAT}", computed_as, *versions)
    configuration = f"model/{_CONFIG}"
    _add_texts(
        digest,
        json.dumps(
            _relevant_part(_read_as_hashed(folder / _CONFIG, hashes[configuration])), sort_keys=True
        ),
    )
    for name in sorted(hashes.keys() - {configuration}):
        if not name.startswith(_OF_ADAPTERS):
            _add_texts(digest, name, hashes[name])
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """The fingerprints of a model and, by name, of each of its adapters."""

    model: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, command: CacheScope) -> str:
        """Why a command is refused: its adapter is unknown. Otherwise empty."""
        if not command.adapter or command.adapter in self.adapters:
            return ""
        return (
            f"the loaded model has no adapter {command.adapter!r}; available: "
            f"{', '.join(self.adapters) or 'none'}"
        )

    def of(self, command: CacheScope) -> str:
        """The fingerprint of the model with the adapter of a command, or of the model alone."""
        return self.adapters[command.adapter] if command.adapter else self.model

    def cache_tenant(self, command: CacheScope) -> str:
        """The tenant name under which the KV of a command is cached.

        Tenants share nothing, so KV is never used with another adapter. The name contains the
        adapter's fingerprint, so a new version of an adapter does not use the KV of the old one.
        """
        mark = self.adapters.get(command.adapter)
        return command.tenant if mark is None else f"{mark}/{command.tenant}"

    def cache_tenants(self, tenant: str) -> dict[str, str]:
        """All names under which KV of a tenant is cached, each with its adapter; empty: none."""
        return {tenant: ""} | {f"{mark}/{tenant}": name for name, mark in self.adapters.items()}

    def adapter_of(self, cache_tenant: str) -> str:
        """The adapter whose KV is cached under this name; empty: none, or an earlier version."""
        mark = cache_tenant.partition("/")[0]
        return next((name for name, each in self.adapters.items() if each == mark), "")


def adapter_fingerprint(model: str, adapter: AdapterFiles, hashes: Mapping[str, str]) -> str:
    """A hash of everything that affects the KV of a model with an adapter. The adapter's name and
    folder do not count.

    model: the model's own fingerprint. hashes: as for `model_fingerprint`.
    """
    digest = hashlib.blake2b(digest_size=32)
    weights = hashes[f"{_OF_ADAPTERS}{adapter.name}/{WEIGHTS}"]
    _add_texts(digest, "adapter", model, adapter.kind, repr(adapter.scale), weights)
    return digest.hexdigest()


def _read_as_hashed(file: Path, expected: str) -> dict[str, Any]:
    """Parse a JSON file. Raises ModelChanged if its hash is no longer the expected one."""
    content = read_regular(file)
    if xxhash.xxh3_128_hexdigest(content) != expected:
        raise ModelChanged(f"{file} was changed while the model was loaded")
    parsed: dict[str, Any] = json.loads(content)
    return parsed


def _relevant_part(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without the keys that do not affect the computation."""
    return {key: value for key, value in config.items() if key not in _IRRELEVANT_KEYS}


def _matching_files(root: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """The files in a folder that match any of these glob patterns, by their path in the folder."""
    paths = (path for pattern in patterns for path in root.glob(pattern))
    return {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}


def _all_files(folder: Path) -> dict[str, Path]:
    """All files of a folder except hidden ones, which belong to tools such as git."""
    files = {}
    visited_folders: set[str] = set()
    for current_folder, folders, names in os.walk(folder, followlinks=True):
        real_path = os.path.realpath(current_folder)
        if real_path in visited_folders:  # a symbolic link to a parent folder
            folders.clear()
            continue
        visited_folders.add(real_path)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = Path(current_folder, name)
            if not name.startswith(".") and path.is_file():
                files[path.relative_to(folder).as_posix()] = path
    return files


def _source_files(package: str) -> dict[str, Path]:
    """The source files of an installed package of models, by name. Imports nothing."""
    spec = importlib.util.find_spec(package)
    package_folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return {
        f"{package}/{os.path.relpath(path, package_folder)}": path
        for package_folder in package_folders
        for folder, _, names in os.walk(package_folder)  # 2 to 3 times as fast as Path.glob
        for path in (Path(folder, name) for name in names if name.endswith(".py"))
    }


def _own_source_files() -> dict[str, Path]:
    """The source files of Holdfast that affect KV, by name."""
    sources = _matching_files(Path(__file__).parents[2], _OWN_CODE)
    return {f"holdfast/{name}": path for name, path in sources.items()}


def _add_texts(digest: hashlib.blake2b, *parts: str) -> None:
    """Hash texts, each with its length, so that moving a border between texts changes the hash."""
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)

"""Imports mlx-lm without what Holdfast never uses of it, and with the attention seam in place.

`import mlx_lm` brings transformers (60 MB, 1 s) for its tokenizers and its command line;
`mlx_lm.utils` brings huggingface_hub (20 MB). Models and loading need neither. So a stand-in
package, whose `__path__` is the real folder, is registered before the first import, and light
stand-ins take the place of the two heavy modules while `mlx_lm.utils` is imported. Each of them
becomes the real thing when somebody in the process does use it. If mlx-lm was imported before, it
is used as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from holdfast.errors import ModelLoadError

_PACKAGE = "mlx_lm"
_TOKENIZERS = "mlx_lm.tokenizer_utils"
_HUB = "huggingface_hub"


def prepare() -> None:
    """Make `mlx_lm.models.*` importable at little cost, with the attention seam in front.

    Idempotent.
    """
    if _PACKAGE not in sys.modules:
        _register_stand_in()
    with _open_files_limit_kept():
        # Not imported above: the seam's module imports MLX, which must come after
        # `platform.prepare_blas`.
        importlib.import_module("holdfast.worker.engine.attention_seam").install()


def mlx_lm_utils() -> ModuleType:
    """`mlx_lm.utils`, imported without transformers and huggingface_hub."""
    prepare()
    name = f"{_PACKAGE}.utils"
    if name in sys.modules:
        return sys.modules[name]
    tokenizers = ModuleType(_TOKENIZERS)
    tokenizers.__dict__.update(TokenizerWrapper=object, load=_real_tokenizer_load)
    hub = ModuleType(_HUB)
    hub.__dict__.update(snapshot_download=_real_snapshot_download)
    with _open_files_limit_kept(), _standing_in(tokenizers, hub):
        return importlib.import_module(name)


def mlx_lm_version() -> str:
    """The version of the mlx-lm in use."""
    prepare()
    version: str = sys.modules[_PACKAGE].__version__
    return version


def _register_stand_in() -> None:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.submodule_search_locations is None or spec.loader is None:
        raise ModelLoadError("the package mlx-lm is not installed")
    package = importlib.util.module_from_spec(spec)

    def become_real(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}")
        package.__dict__.pop("__getattr__", None)
        with _open_files_limit_kept():
            _execute(spec, package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = become_real
    sys.modules[_PACKAGE] = package
    package.__dict__["__version__"] = importlib.import_module(f"{_PACKAGE}._version").__version__


def _execute(spec: ModuleSpec, package: ModuleType) -> None:
    """Run the package's real `__init__`, and give `mlx_lm.utils` the real tokenizer class that it
    did without.
    """
    assert spec.loader is not None
    utils = sys.modules.get(f"{_PACKAGE}.utils")
    if utils is not None:
        real = importlib.import_module(_TOKENIZERS)
        utils.__dict__.update(TokenizerWrapper=real.TokenizerWrapper, _load_tokenizer=real.load)
    spec.loader.exec_module(package)


def _real_tokenizer_load(*args: Any, **kwargs: Any) -> Any:
    return importlib.import_module(_TOKENIZERS).load(*args, **kwargs)


def _real_snapshot_download(*args: Any, **kwargs: Any) -> Any:
    return importlib.import_module(_HUB).snapshot_download(*args, **kwargs)


@contextmanager
def _standing_in(*modules: ModuleType) -> Iterator[None]:
    """Register the modules whose real ones nobody has imported yet; take them out again afterwards."""
    registered = [module for module in modules if module.__name__ not in sys.modules]
    sys.modules.update({module.__name__: module for module in registered})
    try:
        yield
    finally:
        for module in registered:
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]


@contextmanager
def _open_files_limit_kept() -> Iterator[None]:
    """At import mlx-lm lowers the limits of open files to 2,048 and 4,096; an ordinary user could
    not raise the second again.
    """
    real = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = real

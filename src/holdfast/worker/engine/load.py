"""Loads a model from a local folder: checks the files, maps the weights into memory, then reads
and converts the weights of one module at a time.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from holdfast.config import ModelSettings
from holdfast.errors import ModelLoadError, UnusableModel
from holdfast.machine import device_memory, platform
from holdfast.models.adapter_folder import AdapterFiles, checked_adapters
from holdfast.models.image_files import HOW_TO_INSTALL
from holdfast.models.model_folder import (
    checked_config,
    context_tokens,
    has_vision,
    own_context_tokens,
    parts_of,
    read_json,
)
from holdfast.models.quantization import HOW_TO_CONVERT
from holdfast.models.weight_files import checked_tensors, tensor_bytes
from holdfast.worker.engine import mlx_lm_hooks, weight_format
from holdfast.worker.engine.backend import in_use
from holdfast.worker.engine.fingerprint import (
    Fingerprints,
    adapter_fingerprint,
    model_fingerprint,
)
from holdfast.worker.engine.lora import Adapters, attach
from holdfast.worker.engine.mlx_lm_hooks import HEAD_NAMES
from holdfast.worker.vision import load as vision
from holdfast.worker.vision.model import VisionModel
from holdfast.worker.vision.processor import Processor

logger = logging.getLogger("holdfast.worker")

Progress = Callable[[str, float], None]
_LONGEST_REASON = 300
# exceptions that a model's code raises, besides ValueError and OSError, if the configuration or the
# weights do not fit the code
_MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    SystemExit,
)


def vocabulary_size(model: Module, config: Mapping[str, Any]) -> int:
    """The number of logits: the rows of the output head or of the embedding; if the model has
    neither, `vocab_size` of the configuration.
    """
    heads = []
    embeddings = []
    modules: list[tuple[str, Any]] = cast("Any", model).named_modules()
    for path, module in modules:
        if "weight" not in module:
            continue
        if path.rsplit(".", 1)[-1] in HEAD_NAMES and module.weight.ndim == 2:
            heads.append(module.weight.shape[0])
        elif hasattr(module, "as_linear"):
            embeddings.append(module.weight.shape[0])
    configured = next(
        (value for part in parts_of(config) if isinstance(value := part.get("vocab_size"), int)), 0
    )
    rows = heads or embeddings
    # If there are several (auxiliary heads, embeddings per layer): the one with the configured
    # number of rows, or else the largest.
    return configured if configured in rows else max(rows, default=configured)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to compute. Use it only on the device thread."""

    model: Module
    model_type: str
    parameters: int
    weight_bytes: int  # in memory, after conversion, with those of the adapters
    compute_dtype: mx.Dtype
    context_tokens: int
    own_context_tokens: int  # ignores the setting model.context_tokens; 0: unknown
    vocab_size: int
    platform: platform.PlatformReport
    weight_format: weight_format.WeightFormat
    kept_layers: int  # layers whose weights stay in their stored form
    adapters: Adapters | None = None  # None if there are none
    images: Processor | None = None  # of a model that can be given images
    images_refused: str = ""  # why a model with vision cannot

    def fingerprints(self, folder: Path, hashes: Mapping[str, str]) -> Fingerprints:
        """The fingerprints of this model and its adapters. folder: its files. hashes: of these files."""
        versions = [self.platform.mlx_version, mlx_lm_hooks.mlx_lm_version()]
        if isinstance(self.model, VisionModel):
            versions += vision.versions()
        model = model_fingerprint(folder, hashes, computed_as=self.computed_as, versions=versions)
        files = () if self.adapters is None else self.adapters.files
        adapters = {each.name: adapter_fingerprint(model, each, hashes) for each in files}
        return Fingerprints(model, adapters)

    @property
    def computed_as(self) -> str:
        """The format of the weights, as it counts for the fingerprint."""
        form = self.weight_format
        return (
            f"{self.compute_dtype}, unpacked: {form.unpack}, with experts: {form.unpack_experts}, "
            f"kept: {self.kept_layers > 0}"
        )


def _adapter_bytes(adapters: Sequence[AdapterFiles], *, available_bytes: int) -> int:
    """The bytes of all adapters' weights. Raises ModelLoadError if that is more than available."""
    needed = sum(each.tensor_bytes for each in adapters)
    if needed <= available_bytes:
        return needed
    largest = max(adapters, key=lambda each: each.tensor_bytes)
    raise ModelLoadError(
        f"the adapters need {needed / 2**30:,.1f} GiB of memory, but only "
        f"{available_bytes / 2**30:,.1f} GiB are available; the largest is {largest.name} in "
        f"{largest.folder} with {largest.tensor_bytes / 2**30:,.1f} GiB"
    )


def load_model(folder: Path, settings: ModelSettings, *, progress: Progress) -> LoadedModel:
    """Load the model in `folder`. Device thread only; blocks until the weights are read.

    progress: called with the stage ("checking", "building", "reading") and the fraction of the
    whole load that is done. Raises ModelLoadError, with a message of one line, if anything is wrong
    with the model.
    """
    progress("checking", 0.0)
    stored_config = checked_config(folder)
    file_bytes = tensor_bytes(checked_tensors(folder, stored_config))
    adapter_files = checked_adapters(settings.adapters)
    _check_foreign_code(folder, stored_config, settings)
    tokenizer_limit = _tokenizer_limit(folder)
    context_limit = context_tokens(
        stored_config, tokenizer_limit=tokenizer_limit, requested=settings.context_tokens
    )
    progress("building", 0.0)
    model, config = _build(folder, stored_config, settings)
    _check_no_integers(folder, model)
    report = platform.report()
    available_bytes = device_memory.usable_bytes(platform.working_set_bytes())
    available_bytes -= _adapter_bytes(adapter_files, available_bytes=available_bytes)
    with _one_line_errors(folder):
        weights_format = weight_format.choose_format(
            model,
            dtype=settings.dtype,
            dequantize=settings.dequantize,
            available_bytes=available_bytes,
        )
        parameters = weight_format.parameter_count(model)
        weight_format.convert(
            model, weights_format, read=_progress_of_reading(progress, total_bytes=file_bytes)
        )
    progress("reading", 1.0)
    dtype = weight_format.compute_dtype(model)
    with _one_line_errors(folder):
        adapters = attach(model, adapter_files, compute_dtype=dtype)
    images, images_refused = _image_processor(folder, stored_config, model)
    backend = in_use()
    kept_layers = sum(map(backend.is_kept, cast("Any", model).modules()))
    if adapters is None:  # whole steps on the CPU read the weights of the layers alone
        backend.prepare(model, dtype)
    adapter_bytes = 0 if adapters is None else adapters.nbytes
    return LoadedModel(
        model=model,
        model_type=stored_config["model_type"],
        parameters=parameters,
        weight_bytes=weight_format.format_bytes(model, weight_format.UNCHANGED) + adapter_bytes,
        compute_dtype=dtype,
        context_tokens=context_limit,
        own_context_tokens=own_context_tokens(stored_config, tokenizer_limit=tokenizer_limit),
        vocab_size=vocabulary_size(model, config),
        platform=report,
        weight_format=weights_format,
        kept_layers=kept_layers,
        adapters=adapters,
        images=images,
        images_refused=images_refused,
    )


def _check_no_integers(folder: Path, model: Module) -> None:
    """Raise UnusableModel if a weight has an integer type that no layer unpacks.

    The file checks should have refused such a model. This is a second check, because MLX would
    compute with the integers, even if they encode something else.
    """
    modules: list[tuple[str, Any]] = cast("Any", model).named_modules()
    for path, module in modules:
        weight = module.get("weight")
        unpacks = "scales" in module or type(module).__name__ == "BitLinear"
        if unpacks or not isinstance(weight, mx.array) or mx.issubdtype(weight.dtype, mx.floating):
            continue
        raise UnusableModel(
            f"{folder}: {path}.weight has numbers of the type {weight.dtype}, which mlx-lm does not "
            f"convert. {HOW_TO_CONVERT}"
        )


def _image_processor(
    folder: Path, stored_config: dict[str, Any], model: Module
) -> tuple[Processor | None, str]:
    """The processor of a model's images, or the reason why a model with vision has none."""
    if not has_vision(stored_config):
        return None, ""
    if not isinstance(model, VisionModel):
        return None, _why_text_only()
    try:
        return vision.load_processor(folder, model), ""
    except ModelLoadError as error:
        return None, str(error)


def _why_text_only() -> str:
    if not vision.is_installed():
        return f"mlx-vlm is not installed; {HOW_TO_INSTALL}"
    return "mlx-vlm cannot run this model here; the log says why"


def _build(
    folder: Path, stored_config: dict[str, Any], settings: ModelSettings
) -> tuple[Module, dict[str, Any]]:
    """Build the model. Its weights are mapped into memory, but not read yet.

    Returns the model and its configuration.
    """
    if has_vision(stored_config) and vision.is_installed() and not settings.adapters:
        model = _build_with_vision(folder)
        if model is not None:
            return model, stored_config
    utils = mlx_lm_hooks.mlx_lm_utils()
    with _one_line_errors(folder), _without_writing_bytecode():
        if "model_file" not in stored_config:
            _check_architecture(stored_config, utils)
        model, config = utils.load_model(
            folder, lazy=True, strict=True, trust_remote_code=settings.trust_remote_code
        )
    return model, config


def _build_with_vision(folder: Path) -> VisionModel | None:
    """Build the model with its vision; None, with a line in the log, if mlx-vlm cannot."""
    try:
        with _one_line_errors(folder, "mlx-vlm"), _without_writing_bytecode():
            mlx_lm_hooks.prepare_vision()
            return vision.build(folder)
    except ModelLoadError as error:
        logger.warning("%s; the model is loaded without its vision", error)
        return None


def _check_foreign_code(
    folder: Path, stored_config: dict[str, Any], settings: ModelSettings
) -> None:
    """Raise ModelLoadError if the model brings its own code and the settings do not allow that."""
    code = stored_config.get("model_file")
    if code is not None and not settings.trust_remote_code:
        raise ModelLoadError(
            f"the model in {folder} needs to run its own code ({code}); set "
            "model.trust_remote_code = true if you trust this code"
        )


def _check_architecture(config: dict[str, Any], utils: Any) -> None:
    """Raise ModelLoadError if mlx-lm does not have the architecture, or cannot import it here."""
    model_type = config["model_type"]
    module_name = f"mlx_lm.models.{utils.MODEL_REMAPPING.get(model_type, model_type)}"
    try:
        is_known = importlib.util.find_spec(module_name) is not None
    except (ImportError, ValueError):
        is_known = False
    if not is_known and not any(key[0] == model_type for key in utils.MODEL_ARCHITECTURE_REMAPPING):
        raise ModelLoadError(
            f"model_type {model_type!r} is not supported by mlx-lm {mlx_lm_hooks.mlx_lm_version()}"
        )
    if is_known:
        try:
            importlib.import_module(module_name)
        except (ImportError, SystemExit) as error:
            # some modules call exit() if a package that they need is missing
            is_exit = isinstance(error, SystemExit)
            reason = "it needs a package that is not installed" if is_exit else str(error)
            raise ModelLoadError(
                f"mlx-lm's module for model_type {model_type!r} cannot be imported: "
                f"{_one_line(reason)}"
            ) from error


@contextmanager
def _one_line_errors(folder: Path, package: str = "mlx-lm") -> Iterator[None]:
    """Within the block, turn what a model's code raises into ModelLoadError with one line."""
    try:
        yield
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be loaded: {_one_line(str(error))}") from error
    except ValueError as error:
        raise UnusableModel(f"{folder} cannot be loaded: {_one_line(str(error))}") from error
    except _MODEL_ERRORS as error:
        reason = f"{type(error).__name__}: {_one_line(str(error))}"
        raise UnusableModel(
            f"{folder} does not fit {package} {importlib.metadata.version(package)}: {reason}"
        ) from error


@contextmanager
def _without_writing_bytecode() -> Iterator[None]:
    """Write no __pycache__ into the user's folder when a model's code is imported in the block."""
    original_setting = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = original_setting


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 1] + "…"


def _progress_of_reading(progress: Progress, *, total_bytes: int) -> Callable[[int], None]:
    """A function that counts the bytes of weights that were read, and reports the fraction."""
    read_bytes = 0

    def read(stored_bytes: int) -> None:
        nonlocal read_bytes
        read_bytes += stored_bytes
        progress("reading", min(read_bytes / max(total_bytes, 1), 1.0))

    return read


def _tokenizer_limit(folder: Path) -> object:
    """The context length in the tokenizer's configuration, unchecked; None if there is none."""
    file = folder / "tokenizer_config.json"
    return read_json(file).get("model_max_length") if file.exists() else None

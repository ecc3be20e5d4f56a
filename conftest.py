"""What all tests share: a clean environment and the depth of the property tests."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from pathlib import Path

import typer.testing
from hypothesis import HealthCheck, settings

from holdfast.files import kernels_folder
from holdfast.front.fleet.worker_files import machine_subfolder
from holdfast.worker.cpu.blas import prepare_blas

gc.disable()  # until all tests are collected

# The first example of a test often compiles or loads something: deadlines would only measure that.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.register_profile("deep", parent=settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# The BLAS that workers use, which has to be loaded before MLX is imported: with MLX's own, prompts
# of the tiny models take three times as long on Linux.
prepare_blas(threads=1)

# Products of float32 in full precision: on M5 and on NVIDIA GPUs they have 11 bits otherwise, and
# no equality would hold.
os.environ["MLX_ENABLE_TF32"] = "0"

# Settings of the person who runs the tests must not change what is tested; child processes inherit
# this.
for variable in [
    name for name in os.environ if name.startswith("HOLDFAST_") and name != "HOLDFAST_TEST_DEVICE"
]:
    del os.environ[variable]
os.environ["XDG_CONFIG_HOME"] = str(Path(__file__).parent / "tests" / "no-such-folder")
# Nor must tests change what is that person's, except for adding kernels that they have compiled:
# otherwise, servers would compile them again in each process of tests. What MLX has compiled for
# the models of the tests (a second for each operation) is kept from one run to the next.
_caches = tempfile.TemporaryDirectory(prefix="holdfast-tests-")
_compiled = Path(_caches.name, "holdfast", "compiled")
_compiled.mkdir(mode=0o700, parents=True)
_kept_compiled = Path(__file__).parent / ".pytest_cache" / "compiled-by-mlx"
_kept_compiled.mkdir(mode=0o700, parents=True, exist_ok=True)
machine_subfolder(_compiled).symlink_to(_kept_compiled)
if (_kernels := kernels_folder(os.environ)).is_dir():
    Path(_caches.name, "holdfast", "kernels").symlink_to(_kernels)
os.environ["XDG_CACHE_HOME"] = _caches.name
os.environ["XDG_STATE_HOME"] = str(Path(_caches.name) / "state")
# HTTP clients of the tests stay on this machine: none reads the world's authorities first (50 ms).
if authorities := os.environ.pop("SSL_CERT_FILE", ""):
    os.environ.setdefault("PIP_CERT", authorities)
os.environ["SSL_CERT_DIR"] = str(Path(_caches.name) / "no-authorities")
# What lies on that person's machine is not served.
os.environ["HOLDFAST_CATALOG_HUB_CACHE"] = "false"
os.environ["HOLDFAST_CATALOG_FOLDERS"] = ""
# What one test has read must not be there for the next.
os.environ["HOLDFAST_STORE_FOLDER"] = "off"


# The command line is built once, as in a process of its own, not for each command of a test (65 ms).
typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]

# Which device the tests use where there is a GPU: `HOLDFAST_TEST_DEVICE=cpu make test`, or gpu.
if device := os.environ.get("HOLDFAST_TEST_DEVICE"):
    import mlx.core as mx

    mx.set_default_device(mx.Device(getattr(mx, device)))
    os.environ["HOLDFAST_MODEL_DEVICE"] = device


def pytest_collection_finish() -> None:
    """What all modules and tests have made stays: no collection of garbage needs to look through it,
    neither while it is made (1 s for each process) nor later (0.3 s each time).
    """
    gc.enable()
    gc.collect()
    gc.freeze()

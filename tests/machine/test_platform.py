from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import mlx.core as mx
import pytest

from holdfast.errors import ModelLoadError
from holdfast.machine import platform
from tests.fakes.server_process import python_output


def test_the_report_names_device_versions_and_memory() -> None:
    report = platform.report()
    assert report.device in ("cpu", "gpu")
    assert report.backend in ("cpu", "metal", "cuda")
    assert report.mlx_version.count(".") >= 2
    assert report.mlx_lm_version.count(".") >= 2
    assert report.memory.total_bytes > 0
    assert (report.device == "cpu") == (platform.working_set_bytes() == 0)


def test_wiring_and_bounding_memory_do_nothing_without_metal() -> None:
    if platform.report().backend == "metal":
        pytest.skip("this machine has Metal")
    limit = mx.set_cache_limit(1 << 30)
    try:
        platform.wire(1 << 20)
        platform.bound_memory(cache_bytes=0, total_bytes=0)
        assert mx.set_cache_limit(limit) == 1 << 30
    finally:
        mx.set_cache_limit(limit)


def test_on_metal_steps_end_before_the_wired_limit_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def recorded(name: str) -> Callable[..., int]:
        return lambda *arguments: calls.append((name, *arguments)) or 0  # type: ignore[func-returns-value]

    names = ("synchronize", "set_wired_limit", "set_cache_limit", "set_memory_limit")
    metal = SimpleNamespace(**{name: recorded(name) for name in names})
    monkeypatch.setattr(platform, "_mlx", lambda: metal)
    monkeypatch.setattr(platform, "_backend", lambda mx: "metal")
    platform.wire(5)
    platform.bound_memory(cache_bytes=7, total_bytes=9)
    assert calls == [
        ("synchronize",),
        ("set_wired_limit", 5),
        ("set_cache_limit", 7),
        ("set_memory_limit", 9),
    ]


def test_importing_the_module_does_not_import_mlx() -> None:
    imports = "from holdfast.machine import platform; from holdfast.models import download"
    code = f"import sys; {imports}; print('mlx.core' in sys.modules)"
    assert python_output(code) == "False"


def test_a_requested_but_missing_gpu_is_an_error() -> None:
    if platform.working_set_bytes():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ModelLoadError, match=r"model\.device = gpu, but MLX finds no GPU"):
        platform.use_device("gpu")
    platform.use_device("cpu")
    assert platform.report().device == "cpu"

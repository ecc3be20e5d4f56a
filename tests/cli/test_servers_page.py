"""`holdfast serve --open`, with a program in place of the browser."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.server_process import environment, until
from tests.fakes.tiny_models import write_tiny


@pytest.mark.parametrize("option", ["--open", "--no-page"])
def test_the_page_is_opened_only_if_asked_for(tmp_path: Path, option: str) -> None:
    write_tiny(tmp_path / "model", "qwen3")
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o700)
    command = [sys.executable, "-m", "holdfast.cli.main", "serve", "model", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--store", "off", option],
        cwd=tmp_path,
        env={**environment(), "BROWSER": f"{browser} %s"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = next(
            found[1]
            for line in process.stdout
            if (found := re.search(r"is ready at (http://\S+)", line))
        )
        if option == "--open":
            until(lambda: opened.exists() and opened.read_text().strip() != "", "the browser")
            assert opened.read_text().strip().rstrip("/") == url.rstrip("/")
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert opened.exists() == (option == "--open")

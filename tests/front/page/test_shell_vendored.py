"""The page's libraries are exactly those in the manifest."""

from __future__ import annotations

import hashlib
import json
import re

from holdfast.front.page.shell import FILES

VENDOR = FILES / "vendor"
MANIFEST = json.loads((VENDOR / "manifest.json").read_text())
DOCUMENTS = {"manifest.json", "LICENSES.txt"}


def test_the_manifest_names_every_file_and_its_hash() -> None:
    hashes = {each["file"]: each["sha256"] for each in MANIFEST["files"]}
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.iterdir()
        if path.name not in DOCUMENTS
    }
    assert hashes == found


def test_the_manifest_has_each_files_version_license_and_source() -> None:
    licenses = (VENDOR / "LICENSES.txt").read_text()
    for each in MANIFEST["files"]:
        assert each["license"] in {"MIT", "BSD-3-Clause", "Apache-2.0"}
        assert re.fullmatch(r"\d+\.\d+\.\d+", each["version"])
        assert each["source"].endswith(f"/{each['name']}-{each['version']}.tgz")
        assert f"{each['name']} {each['version']}\n" in licenses


def test_modules_of_the_page_load_nothing_from_elsewhere() -> None:
    for path in FILES.rglob("*.js"):
        imports = re.findall(r"""(?:from|import)\s*\(?\s*["']([^"']+)["']""", path.read_text())
        if path.parent == VENDOR:
            imports = [each for each in imports if each.startswith(("http", "/", "."))]
        for name in imports:
            assert (path.parent / name).resolve().is_file(), (path.name, name)

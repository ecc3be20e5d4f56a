"""Downloads the page's libraries from the npm registry into its `vendor` folder.

Each library becomes one minified ES module, and a style sheet if it has one. The folder also
contains the licenses, and `manifest.json` with versions and hashes, which a test compares with the
files.

Run `python -m tools.vendor_page` after changing a version below. It needs npm; the product does
not.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

VENDOR = Path(__file__).resolve().parents[1] / "src/holdfast/front/page/files/vendor"
MANIFEST = "manifest.json"
LICENSES = "LICENSES.txt"
ESBUILD = "esbuild@0.28.2"
_TARGET = "--target=es2022"


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library of the page. entry: the module's exports, as JavaScript."""

    name: str
    version: str
    entry: str
    file: str
    # the license under which we use it, if its package offers several
    license: str


LIBRARIES = (
    Library(
        name="lit",
        version="3.3.3",
        file="lit.js",
        license="BSD-3-Clause",
        entry="export { LitElement, html, nothing, render } from 'lit';\n"
        "export { repeat } from 'lit/directives/repeat.js';\n"
        "export { live } from 'lit/directives/live.js';\n",
    ),
    Library(
        name="markdown-it",
        version="15.0.3",
        file="markdown-it.js",
        license="MIT",
        entry="export { default } from 'markdown-it';\n",
    ),
    Library(
        name="dompurify",
        version="3.4.18",
        file="dompurify.js",
        license="Apache-2.0",
        entry="export { default } from 'dompurify';\n",
    ),
    Library(
        name="uplot",
        version="1.6.32",
        file="uplot.js",
        license="MIT",
        entry="import 'uplot/dist/uPlot.min.css';\nexport { default } from 'uplot';\n",
    ),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _install(folder)
        shutil.rmtree(VENDOR, ignore_errors=True)
        VENDOR.mkdir(parents=True)
        entries = [entry for library in LIBRARIES for entry in _bundled(library, folder)]
        _write_licenses(folder)
    manifest = {"bundled_with": ESBUILD, "files": entries}
    (VENDOR / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    total = sum(path.stat().st_size for path in VENDOR.iterdir())
    print(f"{len(entries)} files, {total:,} bytes in {VENDOR}")


def _install(folder: Path) -> None:
    (folder / "package.json").write_text("{}")
    packages = [f"{library.name}@{library.version}" for library in LIBRARIES]
    _run(
        folder, "npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", ESBUILD, *packages
    )
    _run(folder, "node", "node_modules/esbuild/install.js")


def _bundled(library: Library, folder: Path) -> list[dict[str, str]]:
    entry = folder / f"entry-{library.file}"
    entry.write_text(library.entry)
    options = ("--bundle", "--format=esm", "--minify", "--legal-comments=none", _TARGET)
    output = VENDOR / library.file
    _run(folder, "node_modules/.bin/esbuild", entry.name, *options, f"--outfile={output}")
    head = f"/*! {library.name} {library.version}, {library.license}; see {LICENSES} */\n"
    written = [path for path in (output, output.with_suffix(".css")) if path.exists()]
    for path in written:
        path.write_text(head + path.read_text())
    return [_described(path, library) for path in written]


def _described(output: Path, library: Library) -> dict[str, str]:
    about = asdict(library)
    return {
        "file": output.name,
        **{key: about[key] for key in ("name", "version", "license")},
        "source": f"https://registry.npmjs.org/{library.name}/-/{library.name}-{library.version}.tgz",
        "sha256": hashlib.sha256(output.read_bytes()).hexdigest(),
    }


def _write_licenses(folder: Path) -> None:
    """Collect the licenses of all installed packages but the bundler."""
    texts = []
    for path in sorted((folder / "node_modules").glob("**/package.json")):
        package = json.loads(path.read_text())
        found = sorted(path.parent.glob("LICENSE*"))
        name = package.get("name", "")
        if "version" not in package or not found or "esbuild" in name or name == "argparse":
            continue
        head = f"{name} {package['version']}"
        text = found[0].read_text().strip()
        texts.append(f"{head}\n{'=' * len(head)}\n\n{text}\n")
    (VENDOR / LICENSES).write_text("\n\n".join(texts))


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")


if __name__ == "__main__":
    main()

from __future__ import annotations

import gzip
import hashlib
import json
import re

import httpx
import pytest

from holdfast.config import ServerSettings
from holdfast.front.page.shell import FILES, VIEWS, page_files
from tests.fakes.http_clients import client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MODULE = "/page/files/app.js"


async def got(
    path: str, headers: dict[str, str] | None = None, **settings: object
) -> httpx.Response:
    server = ServerSettings(**settings)  # type: ignore[arg-type]
    async with client_of(ScriptedGateway(), server=server) as client:
        return await client.get(path, headers=headers or {})


@pytest.mark.parametrize("path", VIEWS.values())
async def test_every_view_has_a_public_address_that_reveals_nothing(path: str) -> None:
    response = await got(path, BROWSER, api_key="sesame")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    for name, address in VIEWS.items():
        assert f'<a href="{address}">{name}</a>' in response.text
    assert MODEL not in response.text


@pytest.mark.parametrize("path", ["/page", "/page/"])
async def test_the_folder_of_the_page_leads_to_its_first_view(path: str) -> None:
    response = await got(path, BROWSER, api_key="sesame")
    assert (response.status_code, response.headers["location"]) == (307, "/")
    assert (await got(path, BROWSER, page=False)).status_code == 404


async def test_inline_scripts_and_framing_are_forbidden() -> None:
    response = await got("/", BROWSER)
    policy = dict(
        each.strip().partition(" ")[::2]
        for each in response.headers["content-security-policy"].split(";")
    )
    assert "unsafe" not in response.headers["content-security-policy"]
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert response.headers["x-frame-options"] == "DENY"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", response.text)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", response.text)


async def test_files_are_compressed_and_cached_until_they_change() -> None:
    plain = await got(MODULE, {"accept-encoding": "identity"})
    packed = await got(MODULE, {"accept-encoding": "gzip"})
    assert plain.headers["content-type"] == "text/javascript; charset=utf-8"
    assert packed.headers["content-encoding"] == "gzip"
    assert plain.content == packed.content == (FILES / "app.js").read_bytes()
    again = await got(MODULE, {"if-none-match": plain.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/page/files/none.js",
        "/page/files/../shell.py",
        "/page/files/%2e%2e/shell.py",
        "/page/files/shell.html.jinja",
        "/page/none",
    ],
)
async def test_other_files_are_not_served(path: str) -> None:
    assert (await got(path)).status_code == 404


async def test_the_page_can_be_turned_off() -> None:
    for path in (MODULE, *VIEWS.values()):
        response = await got(path, BROWSER, page=False)
        assert response.status_code == (200 if path == "/" else 404)
        assert "app.js" not in response.text


async def test_foreign_hosts_and_origins_are_refused_here_too() -> None:
    for path in ("/", "/page/now", MODULE):
        assert (await got(path, {"host": "evil.example"})).status_code == 421
        assert (await got(path, {"origin": "https://evil.example"})).status_code == 403


def test_the_page_is_small() -> None:
    compressed = sum(len(gzip.compress(each.content, 9)) for each in page_files().values())
    assert compressed < 250_000


# The page's libraries are exactly those in the manifest.

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

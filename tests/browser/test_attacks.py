"""Pages of other origins, other names for this machine, and texts that look like markup can run,
learn and change nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page

from tests.fakes.browser import Visitor, visiting
from tests.fakes.page_script import MARKUP
from tests.fakes.server_process import ServerProcess

EVIL = "evil.example"
SECRET = "the harbour master's secret"
# actions of a page of another origin; each result is a text
_TRIES = """async (server) => {
  const attempt = async (work) => {
    try { return await work(); } catch (error) { return `refused: ${error.name}`; }
  };
  const json = { 'content-type': 'application/json' };
  const asked = async (path, options) => {
    const answer = await fetch(server + path, options);
    return `${answer.status} ${answer.type} ${await answer.text()}`;
  };
  const body = JSON.stringify({ model: 'scripted', prompt: 'x', max_tokens: 1 });
  const paths = ['/admin/requests', '/admin/misses', '/admin/cache', '/v1/sessions', '/health', '/'];
  const results = {};
  for (const path of paths) {
    results[path] = await attempt(() => asked(path));
    results[`opaque ${path}`] = await attempt(() => asked(path, { mode: 'no-cors' }));
  }
  results.unload = await attempt(() =>
    asked('/admin/models/scripted/unload', { method: 'POST', mode: 'no-cors' }));
  results.forget = await attempt(() =>
    asked('/v1/sessions/none?forget=true', { method: 'DELETE', headers: json }));
  results.generate = await attempt(() =>
    asked('/v1/completions', { method: 'POST', mode: 'no-cors', body }));
  results.pin = await attempt(() =>
    asked('/v1/sessions/kept', { method: 'PATCH', headers: json, body: '{"pinned": true}' }));
  return results;
}"""
_FORM = """(server) => {
  const form = document.createElement('form');
  form.method = 'POST';
  form.enctype = 'text/plain';
  form.action = `${server}/admin/models/scripted/unload`;
  document.body.append(form);
  form.submit();
}"""
_FRAME = """(server) => {
  const frame = document.createElement('iframe');
  frame.src = `${server}/page/memory`;
  document.body.append(frame);
}"""


class _EmptyPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = b"<!doctype html><title>Elsewhere</title><body></body>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[int]:
    """The port of another site on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _EmptyPage) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield site.server_port
        site.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(scripted_server: ServerProcess) -> ServerProcess:
    """A server with sessions and a secret."""
    for session in ("kept", MARKUP):
        body = {"model": "scripted", "prompt": f"{SECRET} {MARKUP}", "max_tokens": 1}
        headers = {"X-Session-ID": session}
        url = f"{scripted_server.url}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
    return scripted_server


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


def unchanged(server: ServerProcess) -> bool:
    """Whether the model is loaded and its session unchanged."""
    session = httpx.get(f"{server.url}/v1/sessions/kept").json()
    return bool(server.model()["state"] == "ready" and session["pinned"] is False)


def test_pages_of_other_sites_learn_and_change_nothing(
    page: Page, server: ServerProcess, elsewhere: int
) -> None:
    page.goto(f"http://{EVIL}:{elsewhere}/")
    for what, result in page.evaluate(_TRIES, server.url).items():
        # an opaque answer has neither a status nor a text for the page
        assert result.startswith("refused: TypeError") or result == "0 opaque ", (what, result)
    assert unchanged(server)
    page.evaluate(_FORM, server.url)
    page.wait_for_url(f"{server.url}/**")
    assert f"web pages of 'http://{EVIL}:{elsewhere}' may not call" in page.inner_text("body")
    assert unchanged(server)


def test_other_local_pages_may_generate_but_not_administer_or_look(
    page: Page, server: ServerProcess, elsewhere: int
) -> None:
    page.goto(f"http://127.0.0.1:{elsewhere}/")
    results = page.evaluate(_TRIES, server.url)
    for path in ("/admin/requests", "/admin/misses", "/admin/cache"):
        assert results[path].startswith("403 "), path
    assert all(SECRET not in result for result in results.values())
    page.evaluate(_FORM, server.url)
    page.wait_for_url(f"{server.url}/**")
    assert "admin" in page.inner_text("body")
    assert server.model()["state"] == "ready"


def test_a_foreign_hostname_gets_neither_the_page_nor_data(
    page: Page, server: ServerProcess
) -> None:
    port = server.url.rpartition(":")[2]
    for path in ("/", "/page/memory", "/page/files/app.js", "/admin/requests", "/v1/sessions"):
        answer = page.goto(f"http://{EVIL}:{port}{path}")
        assert answer is not None
        assert answer.status in (403, 421), path
        assert "Holdfast" not in page.title()
        assert SECRET not in page.content()
        assert "kept" not in page.content()


@pytest.mark.parametrize("host", ["127.0.0.1", EVIL])
def test_the_page_cannot_be_framed(
    page: Page, server: ServerProcess, elsewhere: int, host: str
) -> None:
    page.goto(f"http://{host}:{elsewhere}/")
    with page.expect_event("framenavigated"):
        page.evaluate(_FRAME, server.url)
    page.wait_for_function("document.querySelector('iframe').contentDocument === null")
    (_, frame) = page.frames
    assert frame.url.startswith("chrome-error://")


def test_another_page_cannot_reach_the_window_it_opened(
    page: Page, server: ServerProcess, elsewhere: int
) -> None:
    page.goto(f"http://127.0.0.1:{elsewhere}/")
    with page.context.expect_page() as opened:
        page.evaluate(
            "(server) => { window.opened = window.open(`${server}/page/memory`); }", server.url
        )
    opened.value.get_by_role("heading", name="Memory", level=1).wait_for()
    assert opened.value.evaluate("window.opener") is None
    page.wait_for_function("window.opened.closed")  # as it appears to the other page


@pytest.fixture
def visitor(browser: Browser, server: ServerProcess) -> Iterator[Visitor]:
    with visiting(browser, server.url) as visitor:
        yield visitor


def test_markup_in_names_and_prompts_is_shown_as_text(
    visitor: Visitor, server: ServerProcess
) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.patch("/v1/sessions/kept", json={"metadata": {"name": MARKUP}}).raise_for_status()
        other = {"model": "scripted", "prompt": f"{SECRET} {MARKUP}!\n{MARKUP}", "max_tokens": 1}
        client.post("/v1/completions", json=other).raise_for_status()
    page = visitor.open("/page/memory")
    page.get_by_role("tree").wait_for()
    page.get_by_text("As a table").click()
    page.get_by_role("region", name="Cached parts of scripted").wait_for()
    # in the picture, its table, the missed prompts, the sessions, and the store's folder
    assert page.inner_text("main").count(MARKUP) > 4
    assert MARKUP in (page.get_by_role("treeitem").first.get_attribute("aria-label") or "")
    assert page.locator("main img").count() == 0
    assert page.title() == "Memory – Holdfast"
    page.get_by_role("row").filter(has_text=MARKUP).last.get_by_role(
        "button", name="Rename"
    ).click()
    assert page.title() == "Memory – Holdfast"


def test_markup_in_running_requests_is_shown_as_text(
    visitor: Visitor, server: ServerProcess
) -> None:
    page = visitor.open("/page/now")
    page.get_by_text("No request is under way.").wait_for()
    body = {
        "model": "scripted",
        "stream": True,
        "messages": [{"role": "user", "content": MARKUP}],
    }
    headers = {"X-Session-ID": MARKUP, "X-Request-ID": MARKUP}
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60
    ) as answer:
        lines = answer.iter_lines()  # if it were collected, the answer would be closed
        next(lines)
        page.get_by_role("row").filter(has_text=MARKUP).wait_for()
        assert page.locator("main img").count() == 0
        assert page.title() == "Now – Holdfast"


def test_a_conversation_with_markup_is_exported_and_listed_as_text(
    visitor: Visitor, tmp_path: Path
) -> None:
    page = visitor.open()
    visitor.ask(f"../../{MARKUP}")
    page.get_by_role("button", name="Stop").click()
    visitor.until_answered()
    assert page.locator("main img").count() == 0
    page.get_by_text("Settings").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as Markdown").click()
    name = download.value.suggested_filename
    assert name.endswith(".md")
    assert not set(name) & set("<>/='")
    download.value.save_as(tmp_path / "exported.md")
    assert MARKUP in (tmp_path / "exported.md").read_text()
    assert page.title() == "Chat – Holdfast"

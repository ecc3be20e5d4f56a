"""A browser for tests of the page, confined to this machine.

Chromium must be installed (on Debian: `apt install chromium-headless-shell`, which needs half the
processor time of `chromium`); tests that need it are skipped otherwise.
"""

from __future__ import annotations

import base64
import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Request, expect, sync_playwright

from tests.fakes.server_process import steps_at_full_speed

PROGRAMS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--in-process-gpu",
    "--renderer-process-limit=1",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Hosts of the pattern are this machine, but browsers treat them as remote: without HTTPS, their
    # pages are not secure contexts. No other host is reached.
    "--host-resolver-rules=MAP *.example 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
MISSING = "no Chromium is installed: `sudo apt install chromium-headless-shell`"
WAIT_MILLISECONDS = 30_000
# messages that Chromium writes to the console although the page is correct
HARMLESS = (
    "Failed to load resource",
    # over plain HTTP from another host; the header matters behind a TLS proxy
    "The Cross-Origin-Opener-Policy header has been ignored",
)
# creates files from base64, pastes or drops them, and returns whether the browser would also
# handle the event
_BRING = """
([kind, images, place]) => {
  const transfer = new DataTransfer();
  for (const image of images) {
    const bytes = Uint8Array.from(atob(image), (character) => character.charCodeAt(0));
    transfer.items.add(new File([bytes], 'picture.png', { type: 'image/png' }));
  }
  const options = { bubbles: true, cancelable: true };
  const target = document.querySelector(place);
  return target.dispatchEvent(
    kind === 'paste'
      ? new ClipboardEvent('paste', { ...options, clipboardData: transfer })
      : new DragEvent('drop', { ...options, dataTransfer: transfer }),
  );
}
"""


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """A headless Chromium; the test is skipped if none is installed."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(MISSING)
    expect.set_options(timeout=WAIT_MILLISECONDS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Visitor:
    """A browser window with the page of one server, and all its errors."""

    url: str
    context: BrowserContext
    page: Page
    allowed: Sequence[str] = ()
    complaints: list[str] = field(default_factory=list)

    def open(self, path: str = "/") -> Page:
        self.page.goto(f"{self.url}{path}")
        return self.page

    def view(self, name: str) -> Page:
        """Open a view by its link."""
        navigation = self.page.get_by_role("navigation", name="Views")
        navigation.get_by_role("link", name=name, exact=True).click()
        self.page.get_by_role("heading", name=name, level=1).wait_for()
        return self.page

    def ask(self, text: str) -> None:
        self.page.get_by_label("Message").fill(text)
        self.page.get_by_role("button", name="Send").click()

    def bring(self, kind: str, *images: bytes, place: str = "#message") -> bool:
        """Paste or drop images. Returns whether the browser would handle the event, too."""
        files = [base64.b64encode(each).decode() for each in images]
        return bool(self.page.evaluate(_BRING, [kind, files, place]))

    def until_answered(self, answers: int = 1) -> str:
        """Wait for the end of the last answer, with the steps at full speed; returns its visible text,
        empty if it was stopped before any.
        """
        article = self.page.get_by_role("article").nth(answers - 1)
        with steps_at_full_speed():
            article.get_by_role("button", name="Regenerate").wait_for()
        expect(article.locator("markdown-text[aria-busy]")).to_have_count(0)  # all is drawn
        return "\n".join(article.locator("markdown-text").all_inner_texts())


def check_accessible(page: Page) -> None:
    found = Axe().run(page).response["violations"]
    assert [(each["id"], node["html"]) for each in found for node in each["nodes"]] == []


def check_fits(page: Page) -> None:
    """The page cannot be scrolled sideways."""
    document = page.locator("html")
    assert document.evaluate("(html) => html.scrollWidth <= html.clientWidth")


@contextlib.contextmanager
def visiting(
    browser: Browser, url: str, *, width: int = 1200, height: int = 800, is_dark: bool = False
) -> Iterator[Visitor]:
    """A new window. At its end, fails if a script or the policy reported an error, or a request
    went to another host.
    """
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if is_dark else "light",
        accept_downloads=True,
    )
    context.set_default_timeout(WAIT_MILLISECONDS)
    page = context.new_page()
    visitor = Visitor(url, context, page)

    def check(request: Request) -> None:
        if not request.url.startswith((url, "blob:", "data:")):
            visitor.complaints.append(f"asked for {request.url}")

    context.on("request", check)  # no route: with one, the browser would keep no file of the page
    page.on("pageerror", lambda error: visitor.complaints.append(f"error: {error}"))
    page.on(
        "console",
        lambda message: (
            visitor.complaints.append(f"console: {message.text}")
            if message.type == "error" and not message.text.startswith(HARMLESS)
            else None
        ),
    )
    try:
        yield visitor
        assert visitor.complaints == []
    finally:
        context.close()

"""The Performance and Logs views, with a real server whose history has answers from three hours
ago.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from playwright.sync_api import Browser, expect

from holdfast.config import ServerSettings
from holdfast.front.server.access import KeyRing, named_key, write_keys
from holdfast.front.telemetry.history import Cell, PerformanceHistory
from holdfast.front.telemetry.history_file import write_history
from holdfast.models.quality import save_quality
from tests.fakes.browser import Visitor, check_accessible, check_fits, visiting
from tests.fakes.http_clients import served_on_a_thread
from tests.fakes.quality_report import REPORT
from tests.fakes.scripted_gateway import INFO, ScriptedDirectory, model_status
from tests.fakes.scripted_model import write_scripted
from tests.fakes.server_process import ServerProcess, running_server, unused_port
from tests.fakes.slow import slow

ANSWER = " ".join(f"word{number}" for number in range(100))
ATTACK = "<img/src=x/onerror=document.title='stolen'>"
HOURS_AGO = 3
WIDE_AND_LIGHT, NARROW_AND_DARK = (1280, False), (360, True)


def earlier_answers() -> PerformanceHistory:
    """Answers of two models that no server serves, three hours ago."""
    now = [time.time() - HOURS_AGO * 3600]
    history = PerformanceHistory(clock=lambda: now[0])
    for number in range(20):
        now[0] += 60
        cell = Cell(answers=1, prompt_tokens=1000, cached_tokens=750, generated_tokens=100)
        cell.drafted_tokens, cell.accepted_tokens = 80, 20
        cell.add_duration("queue", 0.01)
        cell.add_duration("prefill", 0.2)
        cell.add_duration("first_token", 1.0 + 0.01 * number)
        cell.add_duration("gap", 0.02)
        cell.speed.add(50.0)
        history.add(f"earlier-{number % 2}", cell)
    return history


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    state = tmp_path_factory.mktemp("state")
    port = unused_port()
    file = state / "holdfast" / "performance" / f"server-{port}.history"
    file.parent.mkdir(parents=True)
    write_history(file, earlier_answers().serialize())
    model = write_scripted(tmp_path_factory.mktemp("scripted") / "model", (ANSWER,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(state))
        arguments = (str(model), "--name", "scripted", "--store", "off")
        with running_server(*arguments, port=port) as server:
            yield server


@pytest.fixture
def visitor(browser: Browser, server: ServerProcess) -> Iterator[Visitor]:
    with visiting(browser, server.url) as visitor:
        yield visitor


def test_an_earlier_servers_history_is_shown_as_plots_and_tables(visitor: Visitor) -> None:
    page = visitor.open("/page/performance?range=6h&model=earlier-0")
    phases = page.get_by_role("region", name="Phases")
    expect(phases.get_by_role("row", name="First token")).to_contain_text("10")
    expect(
        page.get_by_text("Speculation: 800 tokens drafted, 200 accepted (25 %).")
    ).to_be_visible()
    for plot in page.locator("line-plot").all():
        expect(plot.get_by_role("img")).to_be_visible()
        expect(plot.locator("canvas")).to_be_visible()
        assert plot.get_by_role("row").count() >= 2
    share = page.get_by_role("region", name="Numbers of prompt tokens from the cache")
    expect(share.get_by_role("cell", name="75 %").first).to_be_visible()
    few = page.get_by_role("region", name="Phases").last.get_by_role("row", name="First token")
    expect(few.get_by_role("cell").nth(2)).to_have_text("–")  # no p99
    expect(few.get_by_role("cell").nth(1)).to_contain_text(" s")
    expect(few.get_by_title("With fewer than 100 values")).to_have_count(1)
    # few points are large
    first = page.locator("line-plot").first
    assert first.evaluate("(plot) => plot.plot.series[1].points.size") == 9
    page.get_by_label("Model").select_option("All models")
    expect(page.get_by_role("region", name="By model").get_by_role("row")).to_have_count(3)
    assert "model=" not in page.url


def test_a_chat_answer_appears_in_the_performance_view(visitor: Visitor) -> None:
    page = visitor.open()
    visitor.ask("Say many words.")
    visitor.until_answered()
    visitor.view("Performance")
    page.get_by_label("Model").select_option("scripted")
    row = page.get_by_role("region", name="Phases").get_by_role("row", name="Gap between tokens")
    expect(row.get_by_role("cell").first).to_contain_text("ms")
    page.get_by_role("button", name="15 min").click()
    expect(page.get_by_role("button", name="15 min")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("line-plot").first.get_by_role("row")).not_to_have_count(1)
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("scripted")
    expect(page.get_by_role("button", name="15 min")).to_have_attribute("aria-pressed", "true")


def test_an_unknown_model_shows_all_models(visitor: Visitor) -> None:
    page = visitor.open("/page/performance?range=6h&model=nope")
    expect(page.get_by_text("There is no model nope here; all models are shown.")).to_be_visible()
    expect(page.get_by_role("region", name="Phases").last).to_be_visible()
    expect(page.get_by_role("combobox", name="Model")).to_have_value("")
    assert "model=" not in page.url


def test_without_answers_the_view_says_what_to_do(visitor: Visitor) -> None:
    page = visitor.open("/page/performance?range=15m&model=earlier-1")
    page.get_by_role("heading", name="No answers in this period").wait_for()
    expect(page.get_by_text("holdfast quality MODEL")).to_be_visible()
    page.get_by_role("button", name="6 h").click()
    page.get_by_role("heading", name="Over time").wait_for()


def test_measured_quality_of_kv_forms_is_shown(
    browser: Browser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_quality(REPORT, {"XDG_CACHE_HOME": str(tmp_path)})
    info = msgspec.structs.replace(INFO, fingerprint=REPORT.fingerprint)
    directory = ScriptedDirectory(models=(model_status(info=info),))
    settings = ServerSettings(port=0, shutdown_seconds=0)
    with (
        served_on_a_thread(settings=settings, directory=directory) as url,
        visiting(browser, url) as visitor,
    ):
        page = visitor.open("/page/performance")
        table = page.get_by_role("region", name="Quality of demo")
        expect(table.get_by_role("row", name="native")).to_contain_text("90 of 104")
        expect(table.get_by_role("row", name="8 4.020")).to_be_visible()
        expect(table).to_contain_text("its heads have 48 dimensions")


@pytest.mark.parametrize(("view", "words"), [("performance", "These figures"), ("logs", "The log")])
def test_an_ordinary_key_is_told_to_use_an_admin_key(
    browser: Browser, tmp_path: Path, view: str, words: str
) -> None:
    key = named_key("ann", "sesame", is_admin=False, priority="interactive", max_requests=None)
    write_keys(tmp_path / "keys.json", (key,))
    keys = KeyRing(str(tmp_path / "keys.json"))
    settings = ServerSettings(port=0, shutdown_seconds=0)
    with (
        served_on_a_thread(settings=settings, keys=keys) as url,
        visiting(browser, url) as visitor,
    ):
        page = visitor.open(f"/page/{view}")
        page.get_by_label("API key").fill("sesame")
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_role("main")).to_contain_text(words)
        expect(page.get_by_role("main")).to_contain_text("you need an admin key")
        expect(page.get_by_role("main").get_by_role("combobox")).to_have_count(0)


def test_the_log_grows_and_is_filtered(visitor: Visitor) -> None:
    httpx.get(f"{visitor.url}/v1/models")
    page = visitor.open("/page/logs")
    log = page.get_by_role("region", name="Lines of the log")
    expect(log).to_contain_text("GET /v1/models 200")
    answered = httpx.get(f"{visitor.url}/v1/nowhere", headers={"x-request-id": "req-nowhere-1"})
    assert answered.status_code == 404
    expect(log).to_contain_text("GET /v1/nowhere 404")
    httpx.get(f"{visitor.url}/v1/{ATTACK}", headers={"x-request-id": "attack-1"})
    line = log.get_by_role("listitem").filter(has_text="attack-1")
    expect(line).to_contain_text(ATTACK)  # as text
    assert log.locator("img").count() == 0
    assert page.title() == "Logs – Holdfast"
    log.get_by_role("button", name="req-nowhere-1").click()
    expect(page.get_by_label("Request")).to_have_value("req-nowhere-1")
    expect(log.get_by_role("listitem")).to_have_count(1)
    page.get_by_label("Request").fill("")
    page.get_by_label("Text").fill("NOWHERE")
    expect(log.get_by_role("listitem")).to_have_count(1)
    page.get_by_label("Level").select_option("Errors")
    page.get_by_role("heading", name="No line matches").wait_for()
    page.reload()
    page.get_by_role("heading", name="No line matches").wait_for()
    page.get_by_role("button", name="remove the filter").click()
    expect(log).to_contain_text("GET /v1/models 200")
    assert page.url.endswith("/page/logs")


def test_the_pages_polling_does_not_fill_the_log(visitor: Visitor) -> None:
    visitor.open()
    visitor.view("Memory").get_by_role("heading", name="Sessions").wait_for()
    page = visitor.view("Models")
    page.get_by_role("button", name="Load scripted", exact=True).wait_for()
    httpx.get(f"{visitor.url}/v1/sessions")  # another client
    page = visitor.view("Logs")
    log = page.get_by_role("region", name="Lines of the log")
    log.get_by_text("GET /v1/sessions").first.wait_for()
    for path in ("/admin/caller", "/admin/store"):
        expect(log.get_by_text(f"GET {path}")).to_have_count(0)


def test_a_paused_log_shows_new_lines_only_when_resumed(visitor: Visitor) -> None:
    httpx.get(f"{visitor.url}/v1/models")
    page = visitor.open("/page/logs")
    log = page.get_by_role("region", name="Lines of the log")
    expect(log).to_contain_text("GET /v1/models 200")
    page.get_by_role("button", name="Pause").click()
    httpx.get(f"{visitor.url}/v1/while-paused")
    expect(page.get_by_text("Paused; 1 new line")).to_be_visible()
    expect(log).not_to_contain_text("while-paused")
    page.get_by_role("button", name="Pause").click()
    expect(log).to_contain_text("GET /v1/while-paused 404")


# pixels between the shown lines and the end of the log
LEFT = """() => {
  const log = document.querySelector('.log');
  return log.scrollHeight - log.scrollTop - log.clientHeight;
}"""
IS_AT_END = f"() => document.querySelector('.log').scrollTop > 0 && ({LEFT})() < 2"


def test_the_log_follows_its_end_until_scrolled_back(visitor: Visitor) -> None:
    for number in range(60):  # lines of two or three rows
        path = f"/v1/long-{number}-" + "long/" * 60
        httpx.get(f"{visitor.url}{path}", headers={"x-request-id": f"long-{number}"})
    page = visitor.open("/page/logs")
    log = page.get_by_role("region", name="Lines of the log")
    expect(log).to_contain_text("long-59-")
    page.wait_for_function(IS_AT_END)
    for number in range(60, 80):
        httpx.get(f"{visitor.url}/v1/long-{number}-" + "long/" * 60)
    expect(log).to_contain_text("long-79-")
    page.wait_for_function(IS_AT_END)
    page.set_viewport_size({"width": 700, "height": 800})  # the lines become higher
    page.wait_for_function(IS_AT_END)
    log.hover()
    page.mouse.wheel(0, -400)
    page.wait_for_function(f"() => ({LEFT})() > 100")
    before = log.evaluate("(log) => log.scrollTop")
    httpx.get(f"{visitor.url}/v1/last-one")
    expect(log).to_contain_text("last-one")
    assert abs(log.evaluate("(log) => log.scrollTop") - before) < 200
    page.mouse.wheel(0, 100_000)
    page.wait_for_function(IS_AT_END)
    httpx.get(f"{visitor.url}/v1/really-last")
    expect(log).to_contain_text("really-last")
    page.wait_for_function(IS_AT_END)


@pytest.mark.parametrize(
    ("view", "width", "is_dark"),
    [
        ("performance?range=6h", *WIDE_AND_LIGHT),
        ("performance?model=earlier-1", *NARROW_AND_DARK),
        ("logs", *NARROW_AND_DARK),
        *slow(
            ("performance?range=6h", *NARROW_AND_DARK),
            ("performance?model=earlier-1", *WIDE_AND_LIGHT),
            ("logs", *WIDE_AND_LIGHT),
        ),
    ],
)
def test_the_views_fit_and_are_accessible(
    browser: Browser, server: ServerProcess, view: str, width: int, is_dark: bool
) -> None:
    httpx.get(f"{server.url}/v1/a-line-of-the-log")
    with visiting(browser, server.url, width=width, is_dark=is_dark) as visitor:
        page = visitor.open(f"/page/{view}")
        expect(page.locator("line-plot canvas, .log-line, .empty").first).to_be_visible()
        check_accessible(page)
        check_fits(page)


def test_everything_can_be_done_with_the_keyboard(visitor: Visitor) -> None:
    page = visitor.open()
    links = page.get_by_role("navigation", name="Views").get_by_role("link").all_inner_texts()
    assert links == ["Chat", "Now", "Performance", "Memory", "Models", "Connect", "Logs"]
    page.get_by_role("link", name="Performance").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Performance", level=1).wait_for()
    page.get_by_label("Model").focus()
    for _ in range(3):  # to the third time range
        page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="6 h")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("line-plot").first).to_be_visible()
    seen = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.getAttribute('aria-label')"))
    assert {"Phases", "Numbers of time to first token"} <= seen

    page.get_by_role("link", name="Logs").focus()
    page.keyboard.press("Enter")
    page.get_by_role("region", name="Lines of the log").wait_for()
    page.get_by_label("Text").focus()
    page.keyboard.type("caller")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Pause")).to_have_attribute("aria-pressed", "true")

"""Interruptions of a chat: users leave and return, open a second tab, connect from another host or
with a key; the server refuses a request, loads a model, or is down. Typed text is never lost.

All tests share one server, with two keys, models that are loaded on demand, and a model with a
short context.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from holdfast.front.server.access import named_key, write_keys
from tests.fakes.browser import Visitor, check_accessible, visiting
from tests.fakes.cut_connection import relayed
from tests.fakes.images import png
from tests.fakes.page_script import ANSWERS
from tests.fakes.scripted_model import write_scripted
from tests.fakes.server_process import (
    ServerProcess,
    children_running,
    running_server,
    slow_steps,
    until,
)

OTHER_HOST = "harbour.example"
ADMIN, USER = "key-of-the-harbour-master", "key-of-a-sailor"
PHONE = 390  # pixels
SHORT_CONTEXT = 600  # tokens
MOST_TOKENS = 16_384  # of an answer
MOST_BYTES = 300_000  # of a request
LONG = " ".join(f"word{number}" for number in range(600))
TEXT = "When does the ferry to the island leave on Monday"


def without_template(model: Path) -> Path:
    """The same model as a base model."""
    folder = shutil.copytree(model, model.with_name("base"))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["chat_template"]
    file.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("interruptions")
    model = write_scripted(folder / "model", (LONG, *ANSWERS[1:]))
    (folder / "models.toml").write_text(
        f"[models.scripted]\npath = '{model}'\n"
        f"[models.short]\npath = '{model}'\ncontext = {SHORT_CONTEXT}\n"
        f"[models.base]\npath = '{without_template(model)}'\n"
    )
    keys = [
        named_key(name, secret, is_admin=secret == ADMIN, priority="interactive", max_requests=None)
        for name, secret in (("master", ADMIN), ("sailor", USER))
    ]
    write_keys(folder / "keys.json", keys)
    settings = {
        "server.keys_file": folder / "keys.json",
        "server.allowed_hosts": OTHER_HOST,
        "limits.max_body_bytes": MOST_BYTES,
        "residency.hang_seconds": 600,  # a test suspends a worker
        "residency.load_seconds": 0,  # a request for an unloaded model is refused immediately
        "model.speculation": "off",
    }
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    arguments = ("--models", str(folder / "models.toml"), "--store", "off", *options)
    with running_server(*arguments, environ=slow_steps()) as server:
        yield server


@pytest.fixture(autouse=True)
def end_of_all_answers(server: ServerProcess) -> Iterator[None]:
    """End the answers that a test leaves running: they prevent other models from being loaded."""
    yield
    headers = {"Authorization": f"Bearer {ADMIN}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        for each in client.get("/admin/requests").raise_for_status().json()["requests"]:
            client.delete(f"/admin/requests/{each['id']}")


@contextlib.contextmanager
def visit(
    browser: Browser, url: str, *, key: str = USER, width: int = 1200, model: str = "scripted"
) -> Iterator[Visitor]:
    """A visitor who has entered a key and chosen a model."""
    with visiting(browser, url, width=width) as visitor:
        page = visitor.open()
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Use this key").click()
        page.get_by_role("combobox", name="Model").select_option(model)
        yield visitor


def another_tab(visitor: Visitor) -> Page:
    """The same conversation in another tab, where the key has been entered too."""
    page = visitor.context.new_page()
    page.goto(visitor.page.url)
    page.get_by_label("API key").fill(USER)
    page.get_by_role("button", name="Use this key").click()
    page.get_by_label("Message").wait_for()
    return page


# uses these stores until the tab is closed, so that all other tabs wait for them
_USE_STORES = """
(stores) => new Promise((resolve, reject) => {
  const opening = indexedDB.open('holdfast');
  opening.onerror = reject;
  opening.onsuccess = () => {
    const used = opening.result.transaction(stores, 'readwrite').objectStore(stores[0]);
    const use = () => {
      used.get('').onsuccess = use;
      resolve();
    };
    used.get('').onsuccess = use;
  };
})
"""
# claims that it sends every message
_CLAIM = """
() => {
  const channel = new BroadcastChannel('holdfast');
  channel.onmessage = ({ data: { what, id } }) => {
    if (what !== 'who sends') return;
    channel.postMessage({ what: 'I send', id });
    window.hasClaimed = true;
  };
}
"""
# stops an answer that another tab has deleted, which changes nothing
_STOP_DELETED = "import('/page/files/chat-state.js').then(({ chat }) => chat.stop('deleted'))"
_IS_STOP_SAVED = """async () => {
  const stored = await import('/page/files/conversations.js');
  return (await stored.runningTurns()).some(({ answer }) => answer.wantsStop);
}"""


def bare_tab(visitor: Visitor) -> Page:
    """A tab that shares the browser's database with the page, but does not run it."""
    tab = visitor.context.new_page()
    tab.goto(f"{visitor.url}/page/files/icon.svg")
    return tab


def workers(server: ServerProcess) -> list[psutil.Process]:
    return children_running("holdfast.worker", psutil.Process(server.process.pid))


# makes the page believe that models take images, which it may assume of models that are not loaded
_SEEING = """
const ask = window.fetch;
window.fetch = async (path, options) => {
  const answer = await ask(path, options);
  if (path !== '/v1/models' || !sessionStorage.getItem('sees')) return answer;
  const models = await answer.json();
  for (const model of models.data) model.architecture.input_modalities = ['text', 'image'];
  return Response.json(models);
};
sessionStorage.setItem('sees', 'yes');
"""


def let_models_see(page: Page) -> None:
    page.context.add_init_script(_SEEING)
    page.reload()
    page.get_by_label("Attach images").wait_for()


def attached(page: Page) -> Locator:
    return page.get_by_role("list", name="Attached images").get_by_role("img")


def test_a_message_is_sent_over_plain_http_from_another_host(
    browser: Browser, server: ServerProcess
) -> None:
    url = server.url.replace("127.0.0.1", OTHER_HOST)
    with visit(browser, url, width=PHONE) as visitor:
        page = visitor.page
        assert page.evaluate("isSecureContext") is False
        visitor.ask(TEXT)
        page.get_by_role("article").get_by_text("word5 ").wait_for()
        page.reload()
        page.get_by_role("article").get_by_text("word20 ").wait_for()
        page.get_by_role("button", name="Stop").click()
        assert LONG.startswith(visitor.until_answered())
        page.get_by_role("button", name="Copy").first.click()
        page.get_by_label("Message").press("Control+V")
        expect(page.get_by_label("Message")).to_have_value(TEXT)
        check_accessible(page)


@pytest.mark.slow
def test_a_message_typed_while_the_browser_is_slow_is_kept(
    browser: Browser, server: ServerProcess
) -> None:
    with visit(browser, server.url, width=PHONE) as visitor:
        page = visitor.page
        box = page.get_by_label("Message")
        box.wait_for()
        other = hold(visitor, "drafts")
        page.reload()
        box.fill(TEXT)  # before the draft is read
        other.close()
        read_any_draft(page)
        expect(box).to_have_value(TEXT)

        other = hold(visitor, "conversations")
        page.get_by_role("button", name="Send").click()
        expect(box).to_have_value("")
        box.fill("The next one")  # before the message is stored
        other.close()
        page.get_by_role("button", name="Stop").click()
        visitor.until_answered()
        expect(box).to_have_value("The next one")
        expect(page.get_by_role("group", name="You")).to_contain_text(TEXT)
        page.reload()
        expect(box).to_have_value("The next one")


def test_drafts_survive_other_views_reloads_and_other_conversations(
    browser: Browser, server: ServerProcess
) -> None:
    with visit(browser, server.url, width=PHONE) as visitor:
        page = visitor.page
        box = page.get_by_label("Message")
        let_models_see(page)
        box.fill(TEXT)
        page.reload()  # immediately after typing
        expect(box).to_have_value(TEXT)
        visitor.bring("paste", png(1), png(2))
        expect(attached(page)).to_have_count(2)
        for name in ("Models", "Chat"):
            visitor.view(name)
        expect(box).to_have_value(TEXT)
        expect(attached(page)).to_have_count(2)

        page.get_by_text("Conversations").click()
        page.get_by_role("link", name="New conversation").click()
        expect(box).to_have_value("")
        expect(attached(page)).to_have_count(0)
        box.fill("Another question")
        page.get_by_role("link", name=f"{TEXT} not sent").click()
        expect(box).to_have_value(TEXT)
        expect(attached(page)).to_have_count(2)
        expect(page.get_by_role("link", name="Another question not sent")).to_be_visible()
        check_accessible(page)

        for number in (2, 1):
            page.get_by_role("button", name=f"Remove image {number}").click()
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("article").get_by_text("Stopped.").wait_for()
        page.reload()
        visitor.until_answered()
        expect(box).to_have_value("")
        page.get_by_role("button", name="Edit").click()
        page.get_by_label("Edited message").fill("In other words")
        visitor.view("Models")
        visitor.view("Chat")
        expect(page.get_by_label("Edited message")).to_have_value("In other words")
        page.get_by_role("button", name="Cancel").click()
        page.reload()
        expect(page.get_by_role("group", name="You")).to_contain_text(TEXT)
        assert page.get_by_label("Edited message").count() == 0


def hold(visitor: Visitor, *stores: str) -> Page:
    """Make all tabs wait for these stores of the browser's database, until the returned tab is closed."""
    tab = bare_tab(visitor)
    tab.evaluate(_USE_STORES, list(stores))
    return tab


def read_any_draft(page: Page) -> None:
    """Returns when everything that was asked of the drafts before has been answered."""
    page.evaluate("import('/page/files/conversations.js').then((it) => it.readDraft('any'))")


def stored_draft(page: Page) -> str:
    """The stored text of the open conversation's draft."""
    return str(
        page.evaluate(
            """async () => {
              const { chat } = await import('/page/files/chat-state.js');
              const { readDraft } = await import('/page/files/conversations.js');
              return (await readDraft(chat.id))?.text ?? '';
            }"""
        )
    )


@pytest.mark.slow
def test_a_draft_of_another_tab_never_changes_what_is_typed(
    browser: Browser, server: ServerProcess
) -> None:
    with visit(browser, server.url) as visitor:
        first = visitor.page
        visitor.ask(TEXT)
        first.get_by_role("button", name="Stop").click()
        visitor.until_answered()
        second = another_tab(visitor)
        box = second.get_by_label("Message")
        box.focus()
        first.get_by_label("Message").fill("From the first")
        until(lambda: stored_draft(second) == "From the first", "the draft of the first tab")
        expect(box).to_have_value("")

        # the draft arrives after the user has begun
        box.evaluate("(box) => box.blur()")
        holder = hold(visitor, "drafts")
        conversation = second.evaluate(
            "import('/page/files/chat-state.js').then(({ chat }) => chat.id)"
        )
        holder.evaluate(
            "(id) => new BroadcastChannel('holdfast').postMessage({ what: 'draft', id })",
            conversation,
        )
        second.evaluate("() => new Promise((resolve) => setTimeout(resolve))")
        box.select_text()
        holder.close()
        read_any_draft(second)
        second.keyboard.insert_text("From the second")
        expect(box).to_have_value("From the second")
        first.get_by_role("button", name="Send").click()
        first.get_by_role("button", name="Stop").click()
        visitor.until_answered(2)
        expect(second.get_by_role("group", name="You")).to_have_count(2)
        expect(box).to_have_value("From the second")
        assert stored_draft(second) == "From the second"

        # the other tab typed last
        first.get_by_label("Message").fill("Again from the first")
        until(lambda: stored_draft(second) == "Again from the first", "its draft")
        visitor.page.get_by_role("button", name="Send").click()
        first.get_by_role("button", name="Stop").click()
        visitor.until_answered(3)
        until(lambda: stored_draft(second) == "From the second", "the draft of the second tab")
        second.reload()
        expect(box).to_have_value("From the second")


@pytest.mark.slow
def test_a_message_sent_in_one_tab_leaves_the_form_of_the_other(
    browser: Browser, server: ServerProcess
) -> None:
    with visit(browser, server.url) as visitor:
        first = visitor.page
        visitor.ask(TEXT)
        first.get_by_role("button", name="Stop").click()
        visitor.until_answered()
        second = another_tab(visitor)
        box = second.get_by_label("Message")
        first.get_by_label("Message").fill("Sent only once")
        expect(box).to_have_value("Sent only once")
        box.focus()
        first.get_by_role("button", name="Send").click()
        expect(box).to_have_value("")
        first.get_by_role("button", name="Stop").click()
        visitor.until_answered(2)


@pytest.mark.slow
def test_a_new_conversation_of_a_duplicated_tab_is_new(
    browser: Browser, server: ServerProcess
) -> None:
    with visit(browser, server.url) as visitor:
        first = visitor.page
        second = another_tab(visitor)
        kept = first.evaluate("({ ...sessionStorage })")
        second.evaluate("(kept) => Object.assign(sessionStorage, kept)", kept)
        second.goto(visitor.url)
        second.get_by_label("Message").wait_for()
        visitor.ask(TEXT)
        first.get_by_role("button", name="Stop").click()
        visitor.until_answered()
        other = Visitor(visitor.url, visitor.context, second)
        other.until_answered()
        second.get_by_role("link", name="New conversation").click()
        expect(second.get_by_role("article")).to_have_count(0)
        other.ask("Of another conversation")
        expect(second.get_by_role("group", name="You")).to_have_text([re.compile("Of another")])
        second.get_by_role("button", name="Stop").click()
        other.until_answered()


@pytest.mark.slow
def test_a_stored_draft_is_kept_if_the_user_types_before_it_is_read(
    browser: Browser, server: ServerProcess
) -> None:
    with visit(browser, server.url) as visitor:
        page = visitor.page
        box = page.get_by_label("Message")
        box.fill("Typed yesterday")
        until(lambda: stored_draft(page) == "Typed yesterday", "the draft")
        holder = hold(visitor, "drafts")
        page.reload()
        box.fill("Typed today")
        holder.close()
        expect(box).to_have_value("Typed yesterday\n\nTyped today")
        until(lambda: stored_draft(page) == "Typed yesterday\n\nTyped today", "the draft")


def test_settings_can_be_typed_while_an_answer_is_written(
    browser: Browser, server: ServerProcess
) -> None:
    with visit(browser, server.url) as visitor:
        page = visitor.page
        visitor.ask(TEXT)
        article = page.get_by_role("article")
        article.get_by_text("word5 ").wait_for()
        page.get_by_text("Settings").click()
        texts = {
            "Instructions": "Answer briefly.",
            "Temperature": "0.5",
            "Maximum answer length (tokens)": "20",
            "Title": "Ferries",
        }
        for number, (name, text) in enumerate(texts.items(), start=1):
            field = page.get_by_label(name, exact=True)
            field.focus()
            field.select_text()
            page.keyboard.insert_text(text)  # unlike `fill`, without the event `change`
            article.get_by_text(f"word{5 + 10 * number} ").wait_for()
            expect(field).to_have_value(text)
        page.get_by_label("Title", exact=True).fill("")
        page.get_by_label("Title", exact=True).press("Tab")
        expect(page.get_by_label("Title", exact=True)).to_have_value("Conversation")
        page.get_by_role("button", name="Stop").click()
        visitor.until_answered()
        page.reload()
        page.get_by_text("Settings").click()
        for name, text in texts.items() - {("Title", "Ferries")}:
            expect(page.get_by_label(name, exact=True)).to_have_value(text)


def test_the_page_says_what_is_too_large_for_a_request(
    browser: Browser, server: ServerProcess
) -> None:
    with visit(browser, server.url) as visitor:
        page = visitor.page
        visitor.ask("x" * MOST_BYTES)
        failure = page.get_by_role("article").last
        expect(failure.get_by_text("Shorten the message with Edit")).to_be_visible()
        page.get_by_role("button", name="Edit").click()
        page.get_by_label("Edited message").fill(TEXT)
        page.get_by_role("button", name="Send again").click()
        page.get_by_role("button", name="Stop").click()
        visitor.until_answered()

        let_models_see(page)
        visitor.bring("paste", png(1), png(2) + bytes(MOST_BYTES))
        expect(attached(page)).to_have_count(2)
        visitor.ask("What is this?")
        expect(failure.get_by_text("The largest one is image 2.")).to_be_visible()
        page.get_by_role("button", name="Edit").last.click()
        page.get_by_role("button", name="Remove image 2").click()
        expect(page.get_by_label("Edited message")).to_have_value("What is this?")
        check_accessible(page)


def test_an_address_with_a_last_slash_shows_its_view(
    browser: Browser, server: ServerProcess
) -> None:
    with visit(browser, server.url) as visitor:
        visitor.open("/page/now/")
        expect(visitor.page.get_by_role("heading", name="Now", level=1)).to_be_visible()


@pytest.mark.slow
def test_two_tabs_share_one_conversation(browser: Browser, server: ServerProcess) -> None:
    with visit(browser, server.url) as visitor:
        first = visitor.page
        visitor.ask(TEXT)
        first.get_by_role("article").get_by_text("word5 ").wait_for()
        second = another_tab(visitor)
        other = Visitor(visitor.url, visitor.context, second)
        second.get_by_role("article").get_by_text("word20 ").wait_for()  # while it is written
        second.get_by_role("button", name="Stop").click()
        text = other.until_answered()
        visitor.until_answered()
        expect(first.locator("markdown-text")).to_have_text(text)

        visitor.ask("Asked in the first tab")
        expect(second.get_by_text("Asked in the first tab")).to_be_visible()
        visitor.until_answered(2)
        # both at the same time: one is sent; the other stays in its form or is sent next
        boxes = [page.get_by_label("Message") for page in (first, second)]
        for box, text in zip(boxes, ("From the first", "From the second"), strict=True):
            box.fill(text)
        for box in boxes:
            box.evaluate("(box) => box.form.requestSubmit()")
        visitor.until_answered(3)
        for box, page in zip(boxes, (first, second), strict=True):
            expect(page.get_by_role("button", name="Send")).to_be_enabled()  # no request is running
            if box.input_value():
                page.get_by_role("button", name="Send").click()
        for each in (visitor, other):
            each.until_answered(4)
            questions = each.page.locator("chat-question .text").all_text_contents()
            assert questions[:2] == [TEXT, "Asked in the first tab"]
            assert set(questions[2:]) == {"From the first", "From the second"}
            assert each.page.locator(".branches").count() == 0  # no message is hidden

        boxes[1].fill("Not sent yet")
        first.get_by_text("Settings").click()
        first.get_by_role("button", name="Delete").click()
        first.get_by_role("button", name="Delete").click()
        expect(second.get_by_text("was deleted in another tab")).to_be_visible()
        expect(boxes[1]).to_have_value("Not sent yet")
        first.reload()
        assert first.get_by_role("article").count() == 0


def test_a_message_waits_for_its_model_and_is_sent_automatically(
    browser: Browser, server: ServerProcess
) -> None:
    with visit(browser, server.url, width=PHONE) as visitor:
        page = visitor.page
        stop = page.get_by_role("button", name="Stop")
        headers = {"authorization": f"Bearer {ADMIN}"}
        unload = f"{server.url}/admin/models/scripted/unload"
        httpx.post(unload, headers=headers, timeout=60).raise_for_status()
        others = workers(server)
        with page.expect_response("**/v1/responses"):
            visitor.ask(TEXT)
        until(lambda: len(workers(server)) > len(others), "a worker that loads the model")
        (worker,) = set(workers(server)) - set(others)
        worker.suspend()
        try:
            waits = page.get_by_text("Your message is saved and will be sent as soon as it is")
            expect(waits).to_be_visible()
            page.reload()
            expect(waits).to_be_visible()
            stop.click()
            visitor.until_answered()
            # stopped before the server refuses it
            held: list[Route] = []
            page.route("**/v1/responses", lambda route: held.append(route), times=1)
            with page.expect_request("**/v1/responses"):
                page.get_by_role("button", name="Regenerate").click()
            stop.click()
            held[0].continue_()
            visitor.until_answered()
            page.get_by_role("button", name="Regenerate").click()
            expect(waits).to_be_visible()
        finally:
            worker.resume()
        page.get_by_role("article").get_by_text("word5 ").wait_for()
        expect(waits).to_have_count(0)
        stop.click()
        visitor.until_answered()
        expect(page.get_by_role("group", name="You")).to_have_count(1)
        expect(page.get_by_role("combobox", name="Model").locator("option").first).to_have_text(
            "scripted"
        )


def test_an_answer_stopped_before_it_is_accepted_stays_stopped(
    browser: Browser, server: ServerProcess
) -> None:
    with visit(browser, server.url, width=PHONE) as visitor:
        page = visitor.page
        stop = page.get_by_role("button", name="Stop")
        held: list[Route] = []
        page.route("**/v1/responses", lambda route: held.append(route))
        with page.expect_request("**/v1/responses"):
            visitor.ask(TEXT)
        stop.click()
        page.wait_for_function(_IS_STOP_SAVED)
        page.reload()
        visitor.until_answered()
        expect(page.get_by_text("Stopped.")).to_be_visible()

        # stopped while the page finds out whether another tab sends the message
        with page.expect_request("**/v1/responses"):
            page.get_by_role("button", name="Regenerate").click()
        other = bare_tab(visitor)
        other.evaluate(_CLAIM)
        page.reload()
        other.wait_for_function("window.hasClaimed")
        stop.click()
        page.wait_for_function(_IS_STOP_SAVED)
        other.close()
        visitor.until_answered()
        expect(page.get_by_text("Stopped.")).to_be_visible()
        assert len(held) == 2  # no message is sent again
        page.evaluate(_STOP_DELETED)
        assert page.get_by_role("article").count() == 1


def test_a_full_context_is_explained_with_remedies(browser: Browser, server: ServerProcess) -> None:
    with visit(browser, server.url, width=PHONE, model="short") as visitor:
        page = visitor.page
        visitor.ask("Say many words. " + "one two three " * 40)
        visitor.until_answered()
        expect(page.get_by_text("Stopped at the length limit.")).to_be_visible()
        visitor.ask(TEXT)
        expect(
            page.get_by_text(f"longer than short can read at once ({SHORT_CONTEXT}")
        ).to_be_visible()
        assert page.get_by_text("truncation").count() == 0
        check_accessible(page)
        page.get_by_role("button", name="Start a new conversation").click()
        expect(page.get_by_label("Message")).to_have_value(TEXT)
        expect(page.get_by_role("article")).to_have_count(0)
        page.go_back()
        page.get_by_role("button", name="Leave out the middle").click()
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Regenerate")).to_have_count(2)
        expect(page.get_by_role("article")).to_have_count(2)
        assert page.get_by_text("longer than").count() == 0
        page.get_by_text("Settings").click()
        expect(page.get_by_label("Leave out the middle")).to_be_checked()


def test_a_refused_image_is_not_resent_and_can_be_removed(
    browser: Browser, server: ServerProcess
) -> None:
    with visit(browser, server.url) as visitor:
        page = visitor.page
        let_models_see(page)
        page.get_by_label("Message").fill("What is this?")
        page.evaluate(
            "addEventListener('paste', () => document.querySelector('#message').form.requestSubmit())"
        )
        visitor.bring("paste", png(1))  # and send it immediately
        expect(page.get_by_text("Image 1 of your message cannot be used")).to_be_visible()
        question = page.get_by_role("group", name="You").first
        expect(question).to_contain_text("Left out: this model reads text only")
        check_accessible(page)
        visitor.ask("And without it?")
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Regenerate").wait_for()

        question.get_by_role("button", name="Edit").click()
        question.get_by_role("button", name="Remove image 1").click()
        expect(attached(page)).to_have_count(0)
        question.get_by_role("button", name="Cancel").click()
        question.get_by_role("button", name="Remove image 1").click()
        expect(question.get_by_role("img")).to_have_count(0)
        page.get_by_role("button", name="Try again").click()
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Regenerate")).to_have_count(2)
        page.reload()
        expect(page.get_by_role("button", name="Regenerate")).to_have_count(2)
        assert page.get_by_text("cannot be used").count() == 0


def test_earlier_images_are_not_sent_to_a_text_model(
    browser: Browser, server: ServerProcess
) -> None:
    with visit(browser, server.url) as visitor:
        page = visitor.page
        let_models_see(page)
        visitor.bring("paste", png(1))
        visitor.ask("What is this?")
        page.get_by_role("button", name="Try again without this image").wait_for()
        page.evaluate(
            """async () => {
                const { chat } = await import('/page/files/chat-state.js');
                const stored = await import('/page/files/conversations.js');
                const turn = chat.path[0];
                delete turn.leftOut;  // as after an answer of a vision model
                await stored.change(chat.id, (conversation) => ({ conversation, changed: [turn] }));
            }"""
        )
        page.evaluate("sessionStorage.removeItem('sees')")
        visitor.view("Models")
        visitor.view("Chat")
        with page.expect_request("**/v1/responses") as sent:
            visitor.ask("Go on.")
        body = sent.value.post_data_json
        assert body["input"][0]["content"][0] == {
            "type": "input_text",
            "text": "[image left out: this model reads text only]",
        }
        assert body["max_output_tokens"] == MOST_TOKENS
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Regenerate").wait_for()


def test_the_key_dialog_can_be_dismissed_and_reports_refused_keys(
    browser: Browser, server: ServerProcess
) -> None:
    with visiting(browser, server.url, width=PHONE) as visitor:
        page = visitor.open()
        key = page.get_by_label("API key")
        for _ in range(2):
            key.wait_for()
            assert page.get_by_text("no longer accepts").count() == 0
            key.fill("never known")
            page.get_by_role("button", name="Use this key").click()
            expect(page.get_by_text("The server does not know this key.")).to_be_visible()
            page.reload()
        key.press("Escape")
        expect(key).to_be_hidden()
        expect(page.get_by_role("heading", name="This server needs a key")).to_be_visible()
        expect(page.get_by_role("combobox", name="Model")).to_be_hidden()
        check_accessible(page)
        page.get_by_role("button", name="Enter a key").click()
        key.fill(USER)
        page.get_by_role("button", name="Use this key").click()
        page.get_by_label("Message").fill(TEXT)
        expect(page.get_by_text("This server needs a key")).to_have_count(0)
        page.evaluate("sessionStorage.setItem('holdfast.key', 'withdrawn')")
        page.reload()
        expect(page.get_by_text("no longer accepts the key of this tab")).to_be_visible()
        key.fill(USER)
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_label("Message")).to_have_value(TEXT)


def test_views_and_messages_wait_until_the_server_is_back(
    browser: Browser, server: ServerProcess
) -> None:
    with relayed(server.url) as relay, visit(browser, relay.url) as visitor:
        page = visitor.page
        page.get_by_label("Message").wait_for()
        relay.cut()
        visitor.ask(TEXT)
        waits = page.get_by_text("The server does not answer. Your message is saved")
        expect(waits).to_be_visible()
        for name in ("Models", "Now"):
            page.get_by_role("link", name=name, exact=True).click()
            expect(
                page.get_by_text(f"{name} appears as soon as the server answers")
            ).to_be_visible()
        relay.mend()
        page.get_by_role("heading", name="Now", level=1).wait_for()
        expect(page.get_by_role("row").filter(has_text="/v1/responses")).to_have_count(1)
        visitor.view("Models")
        visitor.view("Chat")
        page.get_by_role("article").get_by_text("word5 ").wait_for()
        expect(page.get_by_role("article")).to_have_count(1)
        page.get_by_role("button", name="Stop").click()
        visitor.until_answered()


@pytest.mark.slow
def test_another_tab_sends_a_waiting_message_of_a_closed_tab(
    browser: Browser, server: ServerProcess
) -> None:
    with relayed(server.url) as relay, visit(browser, relay.url) as visitor:
        visitor.ask(TEXT)
        visitor.page.get_by_role("article").get_by_text("word5 ").wait_for()
        visitor.page.get_by_role("button", name="Stop").click()
        visitor.until_answered()
        second = another_tab(visitor)
        other = Visitor(visitor.url, visitor.context, second)
        other.until_answered()
        relay.cut()
        visitor.ask("Is the ferry late?")
        expect(second.get_by_text("Your message is saved")).to_be_visible()
        visitor.page.close()
        relay.mend()
        assert "Ferry" in other.until_answered(2)
        second.reload()
        other.until_answered(2)
        expect(second.get_by_role("group", name="You")).to_have_count(2)


@pytest.mark.slow
def test_an_answer_of_a_closed_tab_is_found_and_stopped(
    browser: Browser, server: ServerProcess
) -> None:
    with visit(browser, server.url, width=PHONE) as visitor:
        visitor.ask(TEXT)
        visitor.page.get_by_role("article").get_by_text("word5 ").wait_for()
        address = visitor.page.url
        visitor.page.close()
        page = visitor.page = visitor.context.new_page()
        visitor.open()
        page.get_by_label("API key").fill(USER)
        page.get_by_role("button", name="Use this key").click()
        page.get_by_text("1 answering").click()
        stop = page.get_by_role("button", name=f"Stop the answer of {TEXT}")
        expect(stop).to_be_visible()
        check_accessible(page)

        visitor.view("Now")  # an ordinary key may cancel its own requests
        page.get_by_role("button", name="Cancel the request").click()
        expect(page.get_by_text("No request is under way.")).to_be_visible()
        page.goto(address)
        assert LONG.startswith(visitor.until_answered())
        expect(page.get_by_text("Stopped.")).to_be_visible()
        page.get_by_role("button", name="Regenerate").click()
        page.get_by_role("article").get_by_text("word5 ").wait_for()
        page.get_by_text("Conversations").click()
        page.get_by_role("link", name="New conversation").click()
        stop.click()
        expect(stop).to_have_count(0)
        expect(page.get_by_text("1 answering")).to_have_count(0)


@pytest.mark.parametrize("key", [USER, ADMIN])
def test_a_base_model_is_marked_as_unable_to_chat(
    browser: Browser, server: ServerProcess, key: str
) -> None:
    with visit(browser, server.url, key=key, model="base") as visitor:
        page = visitor.page
        chosen = page.get_by_role("combobox", name="Model").locator("option:checked")
        expect(chosen).to_contain_text("base (base model, cannot chat; unloaded)")
        page = visitor.view("Models")
        mark = page.get_by_text("base model: completes text, cannot chat")
        expect(mark).to_have_count(1)
        expect(
            page.get_by_role("rowheader").or_(page.get_by_role("heading")).filter(has=mark)
        ).to_contain_text("base ")

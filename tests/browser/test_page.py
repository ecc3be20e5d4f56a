"""The page in a browser, with a real server and a model that keeps to a script; a conversation
survives what happens to the worker, the server and the connection.

All in one file, so that browser and server start once.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.fakes.browser import Visitor, visiting
from tests.fakes.cut_connection import relayed
from tests.fakes.page_script import LONG
from tests.fakes.server_process import ServerProcess


def begin_answer(visitor: Visitor) -> Page:
    visitor.ask("Say many words.")
    visitor.page.get_by_role("article").get_by_text("word5 ").wait_for()
    return visitor.page


def begin_and_stop_answer(visitor: Visitor) -> Page:
    """The next answer is the second one of the model."""
    page = begin_answer(visitor)
    page.get_by_role("button", name="Stop").click()
    visitor.until_answered()
    return page


def test_an_answer_survives_a_reload_while_streaming(visitor: Visitor) -> None:
    page = begin_answer(visitor)
    page.reload()
    assert page.get_by_role("article").count() <= 1
    assert visitor.until_answered() == LONG
    page.reload()
    assert visitor.until_answered() == LONG
    assert page.get_by_role("group", name="You").count() == 1
    facts = page.get_by_role("article").inner_text()
    assert "300 tokens" not in facts  # words are several tokens
    assert "prompt tokens cached" in facts


def test_markdown_is_rendered_and_active_content_is_not(visitor: Visitor) -> None:
    page = begin_and_stop_answer(visitor)
    for number, question in enumerate(("two", "three", "four"), start=2):
        visitor.ask(question)
        visitor.until_answered(number)
    _, markdown, attack, thought = page.get_by_role("article").all()

    expect(markdown.get_by_role("heading", name="Ferry")).to_have_count(1)
    expect(markdown.get_by_role("cell", name="Monday")).to_have_count(1)
    assert markdown.locator("img").count() == 0
    assert markdown.get_by_role("link", name="a page").get_attribute("rel") == "noopener noreferrer"

    assert '<script>document.title = "stolen"</script>' in attack.inner_text()
    assert attack.locator("markdown-text :is(script, img, svg, iframe, form, style)").count() == 0
    (link,) = attack.get_by_role("link").all()  # an address in the text
    assert link.get_attribute("href") == "http://evil.example/"
    assert page.title() == "Chat – Holdfast"

    assert thought.locator("markdown-text").inner_text() == "It is pier 3."
    reasoning = thought.get_by_text("The user wants to know")
    assert not reasoning.is_visible()
    thought.get_by_text("Reasoning").click()
    assert reasoning.is_visible()


def test_a_stopped_answer_keeps_its_text_and_its_message_can_be_edited(visitor: Visitor) -> None:
    page = begin_answer(visitor)
    page.get_by_role("button", name="Stop").click()
    text = visitor.until_answered()
    assert LONG.startswith(text)
    assert len(text) < len(LONG)
    page.get_by_text("Stopped.").wait_for()
    assert page.get_by_role("button", name="Send").is_enabled()

    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("another one")
    page.get_by_role("button", name="Send again").click()
    page.get_by_role("button", name="Stop").click()
    visitor.until_answered()
    question = page.get_by_role("group", name="You")
    expect(question).to_contain_text("another one")
    expect(question).to_contain_text("2 of 2")
    page.get_by_role("button", name="Previous version").click()
    expect(question).to_contain_text("1 of 2")
    expect(question).not_to_contain_text("another one")
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_role("button", name="Stop").click()
    visitor.until_answered()
    expect(page.get_by_role("article")).to_contain_text("2 of 2")


def test_a_guest_without_a_key_chats_over_plain_http(
    browser: Browser, scripted_server: ServerProcess
) -> None:
    with visiting(browser, scripted_server.url.replace("127.0.0.1", "harbour.example")) as visitor:
        # behind a proxy, no client counts as local
        visitor.context.set_extra_http_headers({"x-forwarded-for": "192.0.2.7"})
        page = visitor.open()
        expect(page.get_by_text("user", exact=True)).to_be_visible()
        begin_answer(visitor)
        page.get_by_role("link", name="New conversation").click()
        page.get_by_role("button", name="Stop the answer of Say many words.").click()
        page.get_by_role("link", name="Say many words.").click()
        assert LONG.startswith(visitor.until_answered())


def test_each_view_shows_the_servers_activity(visitor: Visitor) -> None:
    page = begin_answer(visitor)
    visitor.view("Now")
    assert page.url.endswith("/page/now")
    row = page.get_by_role("row").filter(has_text="/v1/responses")
    row.get_by_role("button", name="Cancel the request").wait_for()
    page.get_by_role("region", name="Steps of scripted").wait_for()

    visitor.view("Memory")
    row = page.get_by_role("row").filter(has_text="chat-").first
    row.get_by_role("button", name="Pin").wait_for()

    visitor.view("Models")
    page.get_by_role("heading", name="scripted ready").wait_for()
    assert page.get_by_role("button", name="Unload scripted").is_enabled()

    visitor.view("Connect")
    page.get_by_text(f"holdfast launch --url {visitor.url} claude").wait_for()

    page.go_back()
    page.get_by_role("heading", name="Models", level=1).wait_for()
    visitor.view("Chat")
    page.get_by_role("link", name="Say many words.").first.click()
    assert visitor.until_answered() == LONG


# shows these steps in the view Now; returns its text about them
SHOW_STEPS = """
async (steps) => {
  const view = document.querySelector('now-view');
  view.activity = {
    models: [
      {
        model: 'shown', running: 1, max_running: 2, queued: 0, kv_reserved_bytes: 0,
        kv_budget_bytes: 1, step_tokens: 512, recent_steps: steps,
      },
    ],
  };
  await view.updateComplete;
  return view.querySelector('.steps-figure .hint').textContent;
}
"""


def step(seconds: float, *, prompt_tokens: int = 0) -> dict[str, float]:
    return {"at": 0, "seconds": seconds, "sequences": 1, "prompt_tokens": prompt_tokens} | {
        "generated_tokens": 1
    }


def test_only_a_step_slow_for_its_kind_is_a_stall(visitor: Visitor) -> None:
    page = visitor.view("Now")
    decode = [step(0.02)] * 100
    short, long = step(0.1, prompt_tokens=32), step(1.5, prompt_tokens=512)
    for prefill in ([long] * 7, [*[short] * 10, long]):
        assert "No step has stalled." in page.evaluate(SHOW_STEPS, [*decode, *prefill])
    slow = step(2.0, prompt_tokens=32)
    assert "1 stall," in page.evaluate(SHOW_STEPS, [*decode, *[short] * 10, slow])
    assert "1 stall," in page.evaluate(SHOW_STEPS, [*decode, step(0.6)])


def test_cache_details_are_in_words_without_zeros(visitor: Visitor) -> None:
    page = begin_answer(visitor)
    visitor.until_answered()
    visitor.ask("Show a table.")
    visitor.until_answered(2)
    details = page.get_by_role("article").nth(1).locator("details.cache")
    details.locator("summary").click()
    names = details.locator("dt").all_inner_texts()
    assert {"From memory", "Prefilled", "Until the first text"} <= set(names)
    assert not {"accept", "waited for another", "From disk"} & set(names)


def test_a_session_is_pinned_renamed_and_closed(visitor: Visitor) -> None:
    page = begin_and_stop_answer(visitor)
    session = f"chat-{page.url.partition('conversation=')[2]}"
    visitor.view("Memory")
    row = page.get_by_role("row").filter(has_text=session)
    row.get_by_role("button", name="Pin").click()
    row.get_by_role("button", name="Unpin").wait_for()
    row.get_by_role("button", name="Rename").click()
    row.get_by_label("Name").fill("<b>ferry</b>")
    row.get_by_role("button", name="Save").click()
    row.get_by_text("<b>ferry</b>").wait_for()
    row.get_by_role("button", name="Close").click()
    row.get_by_role("button", name="Close").click()
    expect(row).to_have_count(0)


def test_a_model_is_pinned_unpinned_and_unloaded(visitor: Visitor) -> None:
    page = visitor.page
    visitor.view("Models")
    page.get_by_role("button", name="Pin scripted").click()
    page.get_by_text("pinned", exact=True).wait_for()
    assert page.get_by_role("button", name="Unload scripted").is_disabled()
    page.get_by_role("button", name="Unpin scripted").click()
    page.get_by_role("button", name="Unload scripted").click()
    page.get_by_role("heading", name="scripted unloaded").wait_for()
    page.get_by_role("button", name="Load scripted", exact=True).click()
    page.get_by_role("heading", name="scripted ready").wait_for()


def check_whole(visitor: Visitor) -> None:
    """The page has one question and one complete answer, even after a reload."""
    page = visitor.page
    for _ in range(2):
        visitor.until_answered()
        # events that arrive together are rendered a moment later
        expect(page.get_by_role("article").locator("markdown-text")).to_have_text(LONG)
        expect(page.get_by_role("group", name="You")).to_have_count(1)
        expect(page.get_by_role("article")).to_have_count(1)
        expect(page.get_by_role("article")).not_to_contain_text("1 of 2")
        page.reload()


def test_an_answer_survives_the_death_of_its_worker(
    visitor: Visitor, scripted_server: ServerProcess
) -> None:
    begin_answer(visitor)
    pid = scripted_server.model()["pid"]
    os.kill(pid, signal.SIGKILL)
    check_whole(visitor)
    assert scripted_server.model()["pid"] != pid


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_answer_survives_a_restart_of_the_server(
    visitor: Visitor, scripted_server: ServerProcess, number: signal.Signals
) -> None:
    begin_answer(visitor)
    scripted_server.restart(number)
    check_whole(visitor)


@pytest.mark.slow
def test_a_reopened_page_finds_its_answer_after_a_server_restart(
    visitor: Visitor, scripted_server: ServerProcess
) -> None:
    begin_answer(visitor)
    address = visitor.page.url
    visitor.page.goto("about:blank")
    scripted_server.restart(signal.SIGTERM)
    visitor.page.goto(address)
    check_whole(visitor)


def test_an_answer_survives_a_lost_connection(
    browser: Browser, scripted_server: ServerProcess
) -> None:
    with relayed(scripted_server.url) as relay, visiting(browser, relay.url) as visitor:
        visitor.open()
        begin_answer(visitor)
        relay.cut()
        visitor.page.get_by_text("The connection is lost").wait_for()
        relay.mend()
        check_whole(visitor)


@pytest.mark.slow
def test_a_finished_conversation_continues_after_a_server_restart(
    visitor: Visitor, scripted_server: ServerProcess
) -> None:
    page = visitor.page
    visitor.ask("Say many words.")
    visitor.until_answered()
    scripted_server.restart(signal.SIGTERM)
    visitor.ask("And now?")
    visitor.until_answered(2)
    expect(page.get_by_role("article")).to_have_count(2)
    expect(page.get_by_role("article").last).to_contain_text("Ferry")
    assert scripted_server.model()["state"] == "ready"


_STORE = """async ({ conversation, turns }) => {
  const stored = await import('/page/files/conversations.js');
  await stored.change(conversation.id, () => ({ conversation, changed: turns }));
}"""


def stored(answers: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """A conversation whose answers have these items, each after a question."""
    turns: list[dict[str, Any]] = []
    for number, items in enumerate(answers):
        for role in ("user", "assistant"):
            place = len(turns)
            turns.append(
                {
                    "id": f"t{place}",
                    "conversation": "c",
                    "parent": f"t{place - 1}" if place else None,
                    "chosen": f"t{place + 1}",
                    "created": place,
                    "role": role,
                }
            )
            if role == "user":
                turns[-1]["text"] = f"Question {number}"
            else:
                turns[-1]["answer"] = {
                    "model": "scripted",
                    "status": "completed",
                    "responseId": "",
                    "seen": 1,
                    "items": items,
                    "error": "",
                }
    turns[-1]["chosen"] = None
    settings = {"model": "scripted", "instructions": "", "temperature": None, "maxTokens": None}
    conversation = {"id": "c", "title": "Stored", "changed": 1, "chosen": "t0"}
    return {"conversation": {**conversation, "settings": settings}, "turns": turns}


def said(text: str) -> list[dict[str, Any]]:
    return [{"type": "message", "content": [{"type": "output_text", "text": text}]}]


def test_tool_calls_are_shown_with_their_arguments(visitor: Visitor) -> None:
    page = visitor.page
    call = {"type": "function_call", "name": "look_up", "arguments": '{"word": "<b>pier</b>"}'}
    page.evaluate(_STORE, stored([[call, *said("It is pier 3.")]]))
    page.goto(f"{visitor.url}/?conversation=c")
    answer = page.get_by_role("article")
    expect(answer).to_contain_text("Tool call: look_up")
    expect(answer.locator("pre")).to_have_text('{\n  "word": "<b>pier</b>"\n}')
    expect(answer).to_contain_text("It is pier 3.")


def test_only_the_visible_part_of_a_long_conversation_is_rendered(visitor: Visitor) -> None:
    page = visitor.page
    code = "```python\n# no **bold** here\n\n\nprint(1)\n```"
    paragraph = (
        f"This is **bold**.\n\n{code}\n\n1. one\n2. two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    )
    page.evaluate(_STORE, stored([said(paragraph * 40 + f"The end of {n}.") for n in range(40)]))
    page.goto(f"{visitor.url}/?conversation=c")
    answers = page.get_by_role("article")
    expect(answers).to_have_count(40)
    expect(answers.first.locator("strong")).to_have_count(40)
    # the code is in one piece, wherever the text was split
    expect(answers.first.locator("pre")).to_have_count(40)
    assert set(answers.first.locator("pre").all_inner_texts()) == {
        "# no **bold** here\n\n\nprint(1)\n"
    }
    assert answers.last.locator("strong").count() == 0
    assert "This is **bold**." in (answers.last.text_content() or "")
    strong = answers.last.locator("strong")
    for _ in range(60):  # content rendered above may move it out of view again
        answers.last.scroll_into_view_if_needed()
        if strong.count():
            break
        page.wait_for_timeout(500)
    expect(strong).to_have_count(40)
    expect(answers.last.locator("table")).to_have_count(40)
    expect(answers.last).to_contain_text("The end of 39.")

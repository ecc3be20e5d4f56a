"""The page in a browser, with a real server and a model that keeps to a script.

All in one file, so that browser and server start once.
"""

from __future__ import annotations

from playwright.sync_api import Browser, expect

from tests.fakes.browser import Visitor, visiting
from tests.fakes.page_script import LONG
from tests.fakes.server_process import ServerProcess


def test_an_answer_survives_a_reload_while_streaming(visitor: Visitor) -> None:
    page = visitor.page
    visitor.ask("Say many words.")
    page.get_by_role("article").get_by_text("word20 ").wait_for()
    page.reload()
    assert page.get_by_role("article").count() <= 1
    page.get_by_text(LONG.rsplit(maxsplit=1)[-1]).wait_for()
    assert visitor.until_answered() == LONG
    page.reload()
    assert visitor.until_answered() == LONG
    assert page.get_by_role("group", name="You").count() == 1
    facts = page.get_by_role("article").inner_text()
    assert "1,000 tokens" not in facts  # words are several tokens
    assert "prompt tokens cached" in facts


def test_a_stopped_answer_keeps_its_text(visitor: Visitor) -> None:
    page = visitor.page
    visitor.ask("Say many words.")
    page.get_by_role("article").get_by_text("word20 ").wait_for()
    page.get_by_role("button", name="Stop").click()
    text = visitor.until_answered()
    assert LONG.startswith(text)
    assert len(text) < len(LONG)
    page.get_by_text("Stopped.").wait_for()
    assert page.get_by_role("button", name="Send").is_enabled()


def test_markdown_is_rendered_and_active_content_is_not(visitor: Visitor) -> None:
    page = visitor.page
    visitor.ask("one")
    page.get_by_role("button", name="Stop").click()
    visitor.until_answered()
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


def test_a_message_can_be_edited_and_an_answer_regenerated(visitor: Visitor) -> None:
    page = visitor.page
    visitor.ask("one")
    page.get_by_role("button", name="Stop").click()
    visitor.until_answered()
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
        visitor.ask("Say many words.")
        page.get_by_role("article").get_by_text("word5 ").wait_for()
        page.get_by_role("link", name="New conversation").click()
        page.get_by_role("button", name="Stop the answer of Say many words.").click()
        page.get_by_role("link", name="Say many words.").click()
        assert LONG.startswith(visitor.until_answered())


def test_each_view_shows_the_servers_activity(visitor: Visitor) -> None:
    page = visitor.page
    visitor.ask("Say many words.")
    page.get_by_role("article").get_by_text("word5 ").wait_for()
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


def test_a_request_can_be_cancelled(visitor: Visitor) -> None:
    page = visitor.page
    visitor.ask("Say many words.")
    page.get_by_role("article").get_by_text("word5 ").wait_for()
    visitor.view("Now")
    row = page.get_by_role("row").filter(has_text="/v1/responses")
    row.get_by_role("button", name="Cancel the request").click()
    expect(page.get_by_text("No request is under way.")).to_be_visible()


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
    page = visitor.page
    visitor.ask("Say many words.")
    page.get_by_role("button", name="Stop").click()
    visitor.until_answered()
    visitor.ask("Show a table.")
    visitor.until_answered(2)
    details = page.get_by_role("article").nth(1).locator("details.cache")
    details.locator("summary").click()
    names = details.locator("dt").all_inner_texts()
    assert {"From memory", "Prefilled", "Until the first text"} <= set(names)
    assert not {"accept", "waited for another", "From disk"} & set(names)


def test_all_views_are_visible_in_a_narrow_window(visitor: Visitor) -> None:
    page = visitor.page
    page.set_viewport_size({"width": 360, "height": 800})
    navigation = page.get_by_role("navigation", name="Views")
    for link in navigation.get_by_role("link").all():
        box = link.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    assert navigation.evaluate("(nav) => nav.scrollWidth <= nav.clientWidth")


def test_a_session_is_pinned_renamed_and_closed(visitor: Visitor) -> None:
    page = visitor.page
    visitor.ask("Say many words.")
    page.get_by_role("button", name="Stop").click()
    visitor.until_answered()
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

"""Conversations that are already in the browser: long ones, and answers with tool calls."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

from tests.fakes.browser import Visitor

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

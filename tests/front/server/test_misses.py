from __future__ import annotations

import gc
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.front.images.sources import ImageSource, image_part
from holdfast.front.output import ChoiceFinished
from holdfast.front.request import ChatPrompt, GenerationRequest
from holdfast.front.server import misses
from holdfast.front.server.explanation import Explanation, explain_choice
from holdfast.front.server.misses import RecentMisses, TextChange, change_between, parts_of
from holdfast.front.telemetry.request_log import RequestRecord
from holdfast.wire.events import CacheOutcome, CacheReport, FinishReason

SYSTEM = "You help.\nThe day is Monday.\nBe brief."


def asked(*messages: tuple[str, Any], tenant: str = "", **prompt: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        model="m",
        tenant=tenant,
        prompt=ChatPrompt(
            messages=tuple({"role": role, "content": text} for role, text in messages), **prompt
        ),
    )


def explained(
    outcome: CacheOutcome = CacheOutcome.DIVERGED,
    *,
    prompt_tokens: int = 1000,
    cached: int = 4,
    unused: int = misses.LEAST_LOST,
) -> Explanation:
    end = ChoiceFinished(
        index=0,
        reason=FinishReason.STOP,
        prompt_tokens=prompt_tokens,
        completion_tokens=1,
        cache_report=CacheReport(outcome=outcome, ram_tokens=cached, unused_tokens=unused),
    )
    return explain_choice(end, accept_seconds=0.0, first_text_seconds=None)


def noted(*requests: GenerationRequest) -> RecentMisses:
    """The prompts remembered of requests that all missed."""
    found = RecentMisses()
    for request in requests:
        found.add_answer(request, explained(), RequestRecord(method="POST", path="/", client="c"))
    return found


def last_change(*requests: GenerationRequest) -> TextChange | None:
    return next(iter(noted(*requests))).change


def test_the_changed_line_of_the_system_prompt_is_shown() -> None:
    change = last_change(
        asked(("system", SYSTEM), ("user", "Hello")),
        asked(("system", SYSTEM.replace("Monday", "Tuesday")), ("user", "Hello")),
    )
    assert change == TextChange(
        kind="changed",
        summary="Line 2 of the system prompt changed.",
        place="line 2 of the system prompt",
        before="You help.",
        cached="The day is Monday.",
        now="The day is Tuesday.",
    )


def test_a_changed_message_is_named_by_number_and_role() -> None:
    change = last_change(
        asked(("user", "one"), ("assistant", "two"), ("user", "three")),
        asked(("user", "one"), ("assistant", "2"), ("user", "three")),
    )
    assert change is not None
    assert (change.place, change.cached, change.now) == (
        "line 1 of message 2 (assistant)",
        "two",
        "2",
    )


@pytest.mark.parametrize(
    ("cached", "now", "summary", "lines"),
    [
        ("a\nb", "a\nb\nc", "A line was added: line 3 of", ("", "c")),
        ("a\nb\nc", "a\nb", "A line was left out: line 3 of", ("c", "")),
        ("a\nb", "a\nbc", "Line 2 of", ("b", "bc")),
        ("a\ncb", "a\nb", "Line 2 of", ("cb", "b")),
        ("", "a", "A line was added: line 1 of", ("", "a")),
        ("a\n\nb", "a\nb", "A line was left out: line 2 of", ("", "")),
        ("a\nd", "a\nb\nc\nd", "2 lines were added: from line 2 of", ("", "b")),
    ],
)
def test_added_and_removed_lines_are_found(
    cached: str, now: str, summary: str, lines: tuple[str, str]
) -> None:
    change = last_change(asked(("user", cached)), asked(("user", now)))
    assert change is not None
    assert change.summary.startswith(f"{summary} message 1 (user)")
    assert (change.cached, change.now) == lines


@pytest.mark.parametrize(
    ("cached", "now", "summary", "lines"),
    [
        (
            (("system", SYSTEM), ("user", "Hello")),
            (("user", "Hello"),),
            "A system prompt was left out.",
            ("You help.", ""),
        ),
        (
            (("user", "Hello"),),
            (("system", SYSTEM), ("user", "Other")),
            "A system prompt was added.",
            ("", "You help."),
        ),
        (
            (("user", "one"), ("assistant", "two"), ("user", "three")),
            (("user", "one"), ("user", "three")),
            "Message 2 (assistant) was left out.",
            ("two", ""),
        ),
        (
            (("user", "one"), ("user", "three")),
            (("user", "one"), ("assistant", "two"), ("user", "three")),
            "Message 2 (assistant) was added.",
            ("", "two"),
        ),
        (
            (("user", "one"), ("user", "three")),
            (("user", "one"), ("assistant", "two")),
            "Message 2 (assistant) changed.",
            ("three", "two"),
        ),
    ],
)
def test_added_and_removed_messages_are_described(
    cached: tuple[tuple[str, str], ...],
    now: tuple[tuple[str, str], ...],
    summary: str,
    lines: tuple[str, str],
) -> None:
    change = last_change(asked(*cached), asked(*now))
    assert change is not None
    assert change.summary == summary
    assert (change.cached, change.now) == lines


def test_long_lines_are_cut_around_the_difference() -> None:
    one, other = "x" * 5000 + "A" + "y" * 5000, "x" * 5000 + "B" + "y" * 5000
    change = last_change(asked(("user", one)), asked(("user", other)))
    assert change is not None
    assert "A" in change.cached and "B" in change.now
    assert len(change.cached) <= misses.LONGEST_LINE + 2


def test_changed_and_removed_tools_are_named() -> None:
    def tool(name: str, about: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "description": about}}

    plain = asked(("user", "x"), tools=(tool("a", "one"), tool("b", "two")))
    changed = last_change(plain, asked(("user", "x"), tools=(tool("a", "one"), tool("b", "2"))))
    assert changed is not None
    assert changed.place.endswith("of the definition of the tool b")
    gone = last_change(plain, asked(("user", "x"), tools=(tool("b", "two"),)))
    assert gone is not None
    assert gone.summary == "The definition of the tool a was left out."


def test_a_continued_conversation_is_unchanged() -> None:
    assert (
        change_between(
            parts_of(asked(("user", "one"))), parts_of(asked(("user", "one"), ("assistant", "two")))
        )
        is None
    )


def test_the_most_similar_earlier_prompt_is_compared() -> None:
    change = last_change(
        asked(("system", SYSTEM), ("user", "About ships")),
        asked(("system", "You are another agent."), ("user", "Hello")),
        asked(("system", SYSTEM), ("user", "About shops")),
    )
    assert change is not None
    assert change.cached == "About ships"


def with_images(*images: str | ImageSource, text: str = "What?") -> GenerationRequest:
    """A request whose third message has a text and these images, as base64 or as sources."""
    sources = [
        ImageSource(field="f", media_type="image/png", text=each) if isinstance(each, str) else each
        for each in images
    ]
    content = [{"type": "text", "text": "See:"}, *map(image_part, sources)]
    return asked(
        ("system", SYSTEM),
        ("user", "Hello"),
        ("user", [*content, {"type": "text", "text": text}]),
        ("assistant", "A cat."),
    )


@pytest.mark.parametrize(
    ("cached", "now", "kind", "summary"),
    [
        (["one", "two"], ["one", "2"], "changed", "Image 2 of message 3 (user) changed."),
        (["one"], ["one", "two"], "added", "An image was added: image 2 of message 3 (user)."),
        (
            ["one", "two"],
            ["one"],
            "left_out",
            "An image was left out: image 2 of message 3 (user).",
        ),
    ],
)
def test_a_changed_image_is_named_by_its_number(
    cached: list[str], now: list[str], kind: str, summary: str
) -> None:
    change = last_change(with_images(*cached), with_images(*now))
    assert change is not None
    assert (change.kind, change.summary) == (kind, summary)
    assert change.cached != change.now


def test_images_by_url_and_by_bytes_are_compared() -> None:
    by_url = [ImageSource(field="f", url=f"https://a.example/{number}") for number in range(2)]
    change = last_change(*(with_images(source) for source in by_url))
    assert change is not None
    assert change.summary == "Image 1 of message 3 (user) changed."
    same = [with_images(ImageSource(field=field, data=b"cat")) for field in ("a", "b")]
    assert last_change(*same) is None
    assert last_change(with_images("one"), with_images("one", text="Why?")) == TextChange(
        kind="changed",
        summary="Line 3 of message 3 (user) changed.",
        place="line 3 of message 3 (user)",
        before=f"See:\n[image {ImageSource(field='f', text='one').digest()}]",
        cached="What?",
        now="Why?",
    )


NOTES = "".join(f"Note {number} of the harbour master.\n" for number in range(100))


def is_listed(
    earlier: GenerationRequest | None,
    now: GenerationRequest,
    outcome: CacheOutcome = CacheOutcome.DIVERGED,
    *,
    cached: int,
    unused: int = 0,
) -> bool:
    """Whether a prompt of 1,000 tokens, some of them cached, is a miss."""
    found = RecentMisses()
    record = RequestRecord(method="POST", path="/", client="c")
    if earlier is not None:
        found.add_answer(earlier, explained(CacheOutcome.COMPLETE), record)
    found.add_answer(now, explained(outcome, cached=cached, unused=unused), record)
    return bool(list(found))


def test_a_prompt_without_a_predecessor_is_not_a_miss() -> None:
    first = asked(("system", NOTES), ("user", "one"))
    assert not is_listed(None, first, CacheOutcome.NOTHING_STORED, cached=0)
    assert not is_listed(None, first, cached=1)
    assert not is_listed(asked(("user", "Something else.")), first, cached=1)


def test_another_question_about_the_same_text_is_not_a_miss() -> None:
    one, two = (
        asked(("system", NOTES), ("user", "one")),
        asked(("system", NOTES), ("user", "two")),
    )
    assert not is_listed(one, two, cached=990)
    at_the_end = [asked(("user", NOTES + question)) for question in ("one?", "and two?")]
    assert not is_listed(*at_the_end, cached=990)


def test_a_change_before_long_text_is_a_miss() -> None:
    one, two = (
        asked(("system", f"It is {day}.\n{NOTES}"), ("user", day)) for day in ("Monday", "Tuesday")
    )
    assert is_listed(one, two, cached=3)
    one, two = (
        asked(("system", f"It is {day}."), ("user", NOTES)) for day in ("Monday", "Tuesday")
    )
    assert is_listed(one, two, cached=3)
    left_out = asked(("user", NOTES))
    assert is_listed(one, left_out, cached=1)


def test_only_prefilled_tokens_count_as_lost() -> None:
    one, two = (
        asked(("system", f"It is {day}.\n{NOTES}"), ("user", "x")) for day in ("Monday", "Tuesday")
    )
    assert not is_listed(one, two, cached=1000 - misses.LEAST_LOST + 1)


def test_evicted_and_unusable_tokens_count_as_lost() -> None:
    prompt = asked(("user", NOTES))
    least = misses.LEAST_LOST
    assert is_listed(None, prompt, CacheOutcome.EVICTED, cached=100, unused=least)
    assert not is_listed(None, prompt, CacheOutcome.EVICTED, cached=100, unused=least - 1)
    assert is_listed(None, prompt, CacheOutcome.FAILED, cached=0)


def test_a_different_rendering_of_the_same_messages_is_a_miss() -> None:
    one = asked(("user", NOTES), ("assistant", "two"), ("user", "three"))
    two = asked(
        ("user", NOTES), ("assistant", "two"), ("user", "three"), ("assistant", "4"), ("user", "5")
    )
    assert is_listed(one, two, cached=500)
    assert not is_listed(one, two, cached=950)


def test_tenants_and_models_are_never_compared_with_each_other() -> None:
    assert last_change(asked(("user", "secret"), tenant="a"), asked(("user", "x"))) is None
    other = GenerationRequest(request_id="r", model="other", prompt="y")
    assert last_change(asked(("user", "x")), other) is None


@pytest.mark.parametrize("outcome", [CacheOutcome.COMPLETE, CacheOutcome.NEW_TOKENS])
def test_cached_prompts_are_not_misses_but_later_compared_with(outcome: CacheOutcome) -> None:
    found = RecentMisses()
    record = RequestRecord(method="POST", path="/", client="c")
    found.add_answer(asked(("user", "one")), explained(outcome), record)
    assert list(found) == []
    found.add_answer(asked(("user", "two")), explained(), record)
    (miss,) = found
    assert miss.change is not None


def test_remembered_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "MOST_BYTES", 4000)
    monkeypatch.setattr(misses, "MOST_TENANTS", 3)
    found = noted(
        *(
            asked(("user", f"{number:050}"), tenant=str(number % 7))
            for number in range(10 * misses.MOST_MISSES)
        )
    )
    assert found.resident_bytes <= 4000
    assert len({miss.tenant for miss in found}) <= 3
    assert len(list(found)) <= 3 * misses.MOST_MISSES


def test_a_continued_prompt_is_stored_once() -> None:
    first, next_turn = (
        asked(("user", "one")),
        asked(("user", "one"), ("assistant", "two"), ("user", "three")),
    )
    found = noted(first, next_turn)
    assert found.resident_bytes == noted(next_turn).resident_bytes
    found.check_invariants()


def test_texts_are_made_only_after_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(misses, "_text_of", lambda message: made.append(message) or ("", ()))
    found = RecentMisses()
    record = RequestRecord(method="POST", path="/", client="c")
    turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    for length in (1, 3, 4):
        found.add_answer(asked(*turns[:length]), explained(CacheOutcome.COMPLETE), record)
        found.check_invariants()
    assert made == []
    found.add_answer(asked(*turns), explained(), record)
    assert len(made) >= len(turns)


def test_common_parts_of_prompts_are_stored_once() -> None:
    tools = tuple(
        {"type": "function", "function": {"name": f"tool {number}", "description": NOTES}}
        for number in range(60)
    )
    alone = noted(asked(("user", "one"), tools=tools)).resident_bytes
    several = noted(*(asked(("user", str(number)), tools=tools) for number in range(20)))
    assert several.resident_bytes < 1.1 * alone
    several.check_invariants()


def test_the_memory_of_many_short_messages_counts_their_parts() -> None:
    count = 4000
    tracemalloc.start()
    try:
        found = noted(asked(*(("user", f"{number}") for number in range(count))))
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / 2 < found.resident_bytes < taken * 2


@pytest.mark.parametrize("character", ["a", "é", "ж", "字", "🙂"])
def test_sizes_include_what_texts_take_once_they_are_encoded(character: str) -> None:
    found = RecentMisses()
    record = RequestRecord(method="POST", path="/", client="c")

    def note(outcome: CacheOutcome, characters: int, *, tenant: str = "") -> None:
        description = f"{character * characters} "
        tool = {"type": "function", "function": {"name": "f", "description": description}}
        request = asked(("user", f"{characters} 🙂"), tools=(tool,), tenant=tenant)
        found.add_answer(request, explained(outcome), record)
        found.check_invariants()

    for number in range(60):  # a miss encodes the texts of an earlier hit as JSON
        tenant = str(number % 7)
        note(CacheOutcome.COMPLETE, 100_000 + 2 * number, tenant=tenant)
        note(CacheOutcome.DIVERGED, 100_001 + 2 * number, tenant=tenant)
    kept = {
        id(item): item
        for tenant in found._tenants.values()
        for prompts in tenant.prompts.values()
        for prompt in prompts
        for item in prompt.items
    }
    taken = sum(map(taken_bytes, kept.values()))
    assert taken < found.resident_bytes <= misses.MOST_BYTES
    assert found.resident_bytes < 3 * taken


def taken_bytes(value: object) -> int:
    """The memory that a value takes now."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sys.getsizeof(value) + sum(map(taken_bytes, inner))


def test_misses_may_be_noted_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "MOST_BYTES", 8000)
    found = RecentMisses()
    record = RequestRecord(method="POST", path="/", client="c")

    def note(thread: int) -> None:
        for number in range(100):
            request = asked(("user", SYSTEM), ("user", f"{number % 7}"), tenant=str(thread % 3))
            found.add_answer(request, explained(), record)
            assert list(found)

    with ThreadPoolExecutor(4) as threads:
        for noting in [threads.submit(note, thread) for thread in range(4)]:
            noting.result()
    assert found.resident_bytes <= 8000
    found.check_invariants()


def test_multipart_texts_and_token_ids_are_prompts_too() -> None:
    parts = parts_of(asked(("user", [{"type": "text", "text": "a"}, {"type": "é"}])))
    assert parts[0].text == 'a\n{\n "type": "é"\n}'
    ids = GenerationRequest(request_id="r", model="m", prompt=(1, 2))
    assert parts_of(ids) == ()
    assert len(list(noted(ids))) == 1

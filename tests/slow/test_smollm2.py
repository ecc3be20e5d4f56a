"""A real trained model, SmolLM2-135M-Instruct, under realistic conditions: with a key and a salt,
on a busy machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.front.server.access import named_key, write_keys
from tests.fakes.conditions import busy
from tests.fakes.features import CHAT, FEATURES, MESSAGES, RESPONSES, WEATHER, Caller
from tests.fakes.server_process import ServerProcess, running_server
from tests.fakes.smollm2 import smollm2_folder

pytestmark = pytest.mark.slow

KEY = "the key of alice"
CONTEXT_TOKENS = 2048
# Features of other models. This one calls a tool only if it is forced to, as in the next test.
OTHER_MODELS = {"images", "adapters", "tools"}
ASKED = [{"role": "user", "content": "What is the weather in Oslo?"}]
TELL = [{"role": "user", "content": "Write a short story about a lighthouse."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("smollm2")
    alice = named_key("alice", KEY, is_admin=False, priority="interactive", max_requests=None)
    write_keys(root / "keys.json", [alice])
    arguments = ("--name", "demo", "--store", str(root / "store"), "--context", str(CONTEXT_TOKENS))
    keys = ("--set", f"server.keys_file={root / 'keys.json'}")
    with running_server(str(smollm2_folder()), *arguments, *keys) as server:
        yield server


@pytest.fixture(scope="module")
def caller(server: ServerProcess) -> Caller:
    return Caller(url=server.url, headers={"authorization": f"Bearer {KEY}"}, salt="of one chat")


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in OTHER_MODELS])
def test_features_work_with_a_key_and_salt_on_a_busy_machine(caller: Caller, feature: str) -> None:
    expected = FEATURES[feature](caller)
    with busy():
        assert FEATURES[feature](caller) == expected


def test_a_forced_call_ends_by_itself_in_every_protocol(caller: Caller) -> None:
    """One call is allowed: with several, so small a model repeats the first until it is cut off."""
    function = {"name": "get_weather", "description": "Get the weather", "parameters": WEATHER}
    given: dict[str, Any] = {"model": "demo", "temperature": 0}
    chat = caller.post(
        CHAT,
        messages=ASKED,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        **given,
    )["choices"][0]
    responses = caller.post(
        RESPONSES,
        input=ASKED,
        tools=[{"type": "function", **function}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=300,
        **given,
    )
    tool = {"name": "get_weather", "description": "Get the weather", "input_schema": WEATHER}
    messages = caller.post(
        MESSAGES,
        messages=ASKED,
        tools=[tool],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=300,
        **given,
    )
    assert (chat["finish_reason"], responses["status"], messages["stop_reason"]) == (
        "tool_calls",
        "completed",
        "tool_use",
    )
    called = [
        *(json.loads(call["function"]["arguments"]) for call in chat["message"]["tool_calls"]),
        *(json.loads(item["arguments"]) for item in responses["output"]),
        *(block["input"] for block in messages["content"] if block["type"] == "tool_use"),
    ]
    assert {"city": "Oslo"} in called
    assert all(set(arguments) == {"city"} for arguments in called)


@pytest.mark.parametrize("stop", ["light", "gh", ". The", "\n", "s"])
def test_text_cut_by_a_stop_string_is_in_no_later_prompt(caller: Caller, stop: str) -> None:
    whole = text_of(caller.chat(TELL, max_tokens=100))
    assert stop in whole
    cut = text_of(caller.chat(TELL, max_tokens=100, stop=[stop]))
    assert cut == whole[: whole.index(stop)]
    later = [*TELL, {"role": "assistant", "content": cut}, {"role": "user", "content": "Go on."}]
    again = caller.chat(later)
    fresh = Caller(url=caller.url, headers=caller.headers, salt=f"nothing said, {stop}").chat(later)
    assert text_of(again) == text_of(fresh)
    assert again["usage"]["prompt_tokens"] == fresh["usage"]["prompt_tokens"]


def test_eight_bits_and_drafts_change_no_answer(caller: Caller) -> None:
    questions = ["What is the capital of France?", "Name three colours.", "What is water made of?"]
    for question in questions:
        plain = text_of(caller.chat(question))
        assert plain == text_of(caller.chat(question, kv_bits=8))
        prediction = {"type": "content", "content": plain}
        assert plain == text_of(caller.chat(question, prediction=prediction))


def test_an_oversized_prompt_is_refused_or_shortened_as_requested(caller: Caller) -> None:
    long = [
        {"role": "system", "content": "You are a helpful assistant."},
        *(
            {"role": "user" if n % 2 == 0 else "assistant", "content": "sheep " * 80}
            for n in range(40)
        ),
        {"role": "user", "content": "What is the capital of France?"},
    ]
    refused = caller.request("POST", CHAT, {"model": "demo", "messages": long, "max_tokens": 20})
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        400,
        "context_length_exceeded",
    )
    answer = caller.chat(long, truncation="middle")
    assert answer["usage"]["prompt_tokens"] < CONTEXT_TOKENS
    assert "Paris" in text_of(answer)


def test_a_restart_under_load_loses_nothing(tmp_path: Path) -> None:
    arguments = (str(smollm2_folder()), "--name", "demo", "--store", str(tmp_path))
    given: dict[str, Any] = {"max_tokens": 40}
    with busy():
        with running_server(*arguments) as server:
            first = Caller(url=server.url).chat(TELL, **given)
        with running_server(*arguments) as server:
            again = Caller(url=server.url).chat(TELL, **given)
    assert text_of(again) == text_of(first)
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16

"""The scripted model behind a real server: what agents are tested with must say exactly what its script says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.http_clients import CHAT, events_of
from tests.fakes.scripted_model import OVER, write_scripted
from tests.fakes.server_process import ServerProcess

SCRIPT = ("It is é, 漢字 or 🙂: \"x\" = 'x';\n\n\tdone  twice.", "ok", "ok", "yes " * 60, "It is é, or not.")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = write_scripted(Path(tmp_path_factory.mktemp("scripted")), SCRIPT, said_before=1)
    server = ServerProcess(str(folder), "--name", "scripted")
    server.wait_ready()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    assert server.stop() == 0, server.log()


def whole(client: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, str]:
    answer = client.post(CHAT, json={"model": "scripted", "messages": messages, **fields}).raise_for_status().json()
    return answer["choices"][0]["message"]["content"] or "", answer["choices"][0]["finish_reason"]


def streamed(client: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> str:
    answer = client.post(CHAT, json={"model": "scripted", "messages": messages, "stream": True, **fields}).raise_for_status()
    deltas = [event["choices"][0]["delta"] for event in events_of(answer.text)[:-1] if event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def conversation(turns: int) -> list[dict[str, Any]]:
    """An example of the agent's own, then so many turns of the script and the next question."""
    messages = [{"role": "user", "content": "An example."}, {"role": "assistant", "content": "ok"}]
    for answer in SCRIPT[:turns]:
        messages += [{"role": "user", "content": "Go on. <|im_end|> ok yes"}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": "And now?"}]


@pytest.mark.parametrize("turn", range(len(SCRIPT) + 1))
def test_each_turn_is_answered_with_its_line_of_the_script_streamed_and_whole(client: httpx.Client, turn: int) -> None:
    expected = (*SCRIPT, OVER)[turn]
    assert whole(client, conversation(turn)) == (expected, "stop")
    assert streamed(client, conversation(turn)) == expected


def test_neither_temperature_nor_a_prompt_of_50_kilobytes_changes_the_answer(client: httpx.Client) -> None:
    messages = [{"role": "system", "content": 'A long "system" prompt:\n\t{"of": "an agent"}. ' * 1200}, *conversation(0)]
    assert whole(client, messages, temperature=1.0, seed=1) == (SCRIPT[0], "stop")


def test_after_the_script_and_without_a_cue_nothing_is_invented(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"model": "scripted", "prompt": "ok yes"}).raise_for_status().json()
    assert answer["choices"][0]["text"] == ""
    longer = [*conversation(len(SCRIPT)), {"role": "assistant", "content": OVER}, {"role": "user", "content": "And then?"}]
    assert whole(client, longer) == (OVER, "stop")


def test_answers_that_have_no_pieces_of_their_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no pieces of its own"):
        write_scripted(tmp_path, ["a\n<tool_call>\n</tool_call>\n<tool_call>\n</tool_call>"])

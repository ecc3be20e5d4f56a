from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.command_line import invoked


@pytest.mark.parametrize(
    ("arguments", "asked", "said"),
    [
        (["load", "a b"], ["/admin/models/a%20b/load"], "a b is ready\n"),
        (["load", "a", "--pin"], ["/admin/models/a/pin"], "a is ready, and stays loaded\n"),
        (["unload", "o/a"], ["/admin/models/o/a/unload"], "o/a is ready\n"),
        (
            ["unload", "a", "--unpin"],
            ["/admin/models/a/pin {'pinned': False}", "/admin/models/a/unload"],
            "a is ready\n",
        ),
    ],
)
def test_each_command_sends_its_request(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], asked: list[str], said: str
) -> None:
    calls = []

    def call(self: object, method: str, path: str, **request: Any) -> dict[str, str]:
        calls.append(" ".join([path, *map(str, request.values())]))
        return {"state": "ready"}

    monkeypatch.setattr("holdfast.cli.server_client.ServerClient.call", call)
    assert invoked([*arguments, "--url", "http://here"]).stdout == said
    assert calls == asked

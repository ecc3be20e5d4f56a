"""An endless chat template prevents the server neither from serving nor from stopping."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.fakes.server_process import ServerProcess, children_running, running_server, until
from tests.fakes.tiny_models import write_tiny

ENDLESS_FOR_SOME = """
{%- if messages[0].content == 'loop' -%}
  {%- for a in range(100000) -%}{%- for b in range(100000) -%}{%- endfor -%}{%- endfor -%}
{%- endif -%}
{%- for message in messages -%}{{ message.content }}{%- endfor -%}
"""


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_tiny(tmp_path_factory.mktemp("endless") / "demo", "llama")
    (folder / "chat_template.jinja").write_text(ENDLESS_FOR_SOME)
    with running_server(str(folder), "--name", "demo", "--store", "off") as running:
        yield running


def ask(server: ServerProcess, content: str) -> httpx.Response:
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def busy_renderers(server: ServerProcess) -> list[psutil.Process]:
    renderers = children_running(
        "holdfast.front.prompt.template_worker", psutil.Process(server.process.pid)
    )
    return [
        each for each in renderers if each.is_running() and each.status() == psutil.STATUS_RUNNING
    ]


@pytest.mark.slow
def test_an_endless_template_fails_only_its_own_request(
    server: ServerProcess,
) -> None:
    with ThreadPoolExecutor(2) as threads:
        refused = threads.submit(ask, server, "loop")
        until(lambda: bool(busy_renderers(server)), "the template is being rendered")
        assert ask(server, "Hi").status_code == 200
        error = refused.result()
        assert error.status_code == 500
        assert error.json()["error"]["code"] == "chat_template_overrun"
        assert "chat template 'default' took longer than 5 s" in error.json()["error"]["message"]

        threads.submit(ask, server, "loop")
        until(lambda: bool(busy_renderers(server)), "the template is being rendered again")
        assert server.stop() == 0

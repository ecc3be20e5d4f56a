"""Simon Willison's `llm`: its command line with a model from extra-openai-models.yaml, and its
library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from conversations import SUM_QUESTION, WEATHER, WEATHER_QUESTION, Server, called, run, summed, told

TOOLS = f"""
def get_weather(city: str) -> str:
    "Get the weather of a city"
    assert city == "Oslo", city
    return {WEATHER!r}
"""


def command(server: Server, home: Path, *arguments: str) -> str:
    model = {
        "model_id": "here",
        "model_name": server.model,
        "api_base": server.base_url,
        "api_key_name": "here",
    }
    features = "  supports_tools: true\n  supports_schema: true\n"
    lines = "".join(f"  {name}: {value}\n" for name, value in model.items())
    (home / "extra-openai-models.yaml").write_text(
        "- " + lines.strip() + "\n" + features, encoding="utf-8"
    )
    (home / "keys.json").write_text(json.dumps({"here": server.api_key}), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments, "-m", "here", "-o", "temperature", "0"],
        env={**os.environ, "LLM_USER_PATH": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_a_home(server: Server, *arguments: str) -> str:
    with tempfile.TemporaryDirectory() as home:
        return command(server, Path(home), *arguments)


def tool_loop(server: Server) -> None:
    told(in_a_home(server, WEATHER_QUESTION, "--functions", TOOLS, "--no-stream"))


def tool_loop_streamed(server: Server) -> None:
    told(in_a_home(server, WEATHER_QUESTION, "--functions", TOOLS))


def thinking(server: Server) -> None:
    summed(in_a_home(server, SUM_QUESTION, "--no-stream"))


def thinking_streamed(server: Server) -> None:
    summed(in_a_home(server, SUM_QUESTION))


def structure(server: Server) -> None:
    made = json.loads(
        in_a_home(server, "Write JSON.", "--schema", "city, degrees int", "--no-stream")
    )
    assert set(made) == {"city", "degrees"}


def library(server: Server) -> None:
    from llm.default_plugins.openai_models import Chat

    def get_weather(city: str) -> str:
        """Get the weather of a city"""
        return called("get_weather", {"city": city})

    model: Any = Chat(
        "here", model_name=server.model, api_base=server.base_url, supports_tools=True
    )
    model.key = server.api_key
    for stream in (True, False):
        told(
            model.chain(
                WEATHER_QUESTION, tools=[get_weather], stream=stream, options={"temperature": 0}
            ).text()
        )


if __name__ == "__main__":
    run(
        tool_loop,
        tool_loop_streamed,
        thinking,
        thinking_streamed,
        structure,
        library,
        packages=("llm", "openai"),
    )

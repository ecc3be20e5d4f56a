"""instructor: typed answers, by a forced call and by a schema, whole and as they come."""

from __future__ import annotations

from typing import Any

import instructor
from conversations import CITY, SUM_QUESTION, WEATHER_QUESTION, Server, run
from openai import OpenAI
from pydantic import BaseModel


class GetWeather(BaseModel):
    """Get the weather of a city"""

    city: str


# Not its mode JSON: there the schema stands in the prompt alone, and the bundled model does not follow instructions.
MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)


def ask(server: Server, mode: Any, **options: Any) -> Any:
    client = instructor.from_openai(OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0), mode=mode)
    return client.chat.completions, {"model": server.model, "temperature": 0, "max_tokens": 300, "max_retries": 0, **options}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def forced_call(server: Server) -> None:
    completions, options = ask(server, instructor.Mode.TOOLS)
    assert completions.create(messages=user(WEATHER_QUESTION), response_model=GetWeather, **options).city == CITY


def forced_call_streamed(server: Server) -> None:
    completions, options = ask(server, instructor.Mode.TOOLS)
    *_, last = completions.create_partial(messages=user(WEATHER_QUESTION), response_model=GetWeather, **options)
    assert last.city == CITY


def all_modes(server: Server) -> None:
    for mode in MODES:
        completions, options = ask(server, mode)
        made = completions.create(messages=user("Write JSON."), response_model=GetWeather, **options)
        assert isinstance(made, GetWeather), mode


def all_modes_streamed(server: Server) -> None:
    for mode in MODES:
        completions, options = ask(server, mode)
        parts = list(completions.create_partial(messages=user("Write JSON."), response_model=GetWeather, **options))
        assert parts[-1].city is not None, mode


def thinking(server: Server) -> None:
    completions, options = ask(server, instructor.Mode.JSON_SCHEMA)
    made, raw = completions.create_with_completion(messages=user(SUM_QUESTION), response_model=GetWeather, **options)
    assert isinstance(made, GetWeather)
    assert raw.usage.completion_tokens_details.reasoning_tokens >= 0


if __name__ == "__main__":
    run(forced_call, forced_call_streamed, all_modes, all_modes_streamed, thinking, packages=("instructor", "openai"))

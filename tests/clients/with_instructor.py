"""instructor: typed answers, by a forced call and by a schema, whole and streamed, through all
protocols.
"""

from __future__ import annotations

from typing import Any

import instructor
from anthropic import Anthropic
from conversations import CITY, SUM_QUESTION, WEATHER_QUESTION, Server, run
from openai import OpenAI
from pydantic import BaseModel


class GetWeather(BaseModel):
    """Get the weather of a city"""

    city: str


# By protocol, the one that forces a call first. Without its modes JSON and MD_JSON, where only the
# prompt contains the schema and the bundled model does not follow instructions. The same is true of
# JSON_SCHEMA with the current Anthropic client.
MODES = {
    "chat": (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA),
    "responses": (instructor.Mode.RESPONSES_TOOLS,),
    "messages": (instructor.Mode.TOOLS,),
    # its way to Ollama is Ollama's /v1
    "ollama": (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA),
}


def ask(server: Server, protocol: str, mode: Any) -> Any:
    options = {"model": server.model, "temperature": 0, "max_tokens": 300, "max_retries": 0}
    if protocol == "messages":
        del options["temperature"]
        client = instructor.from_anthropic(
            Anthropic(base_url=server.root, api_key=server.api_key, max_retries=0), mode=mode
        )
        return client, {**options, "extra_body": {"temperature": 0}}
    if protocol == "responses":
        options["max_output_tokens"] = options.pop("max_tokens")
    if protocol == "ollama":
        made = instructor.from_provider(
            f"ollama/{server.model}", base_url=server.base_url, mode=mode
        )
        del options["model"]
        return made, options
    client = instructor.from_openai(
        OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0), mode=mode
    )
    return client, options


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def forced_call(server: Server, protocol: str) -> None:
    client, options = ask(server, protocol, MODES[protocol][0])
    assert (
        client.create(messages=user(WEATHER_QUESTION), response_model=GetWeather, **options).city
        == CITY
    )


def forced_call_streamed(server: Server, protocol: str) -> None:
    client, options = ask(server, protocol, MODES[protocol][0])
    *_, last = client.create_partial(
        messages=user(WEATHER_QUESTION), response_model=GetWeather, **options
    )
    assert last.city == CITY


def all_modes(server: Server, protocol: str) -> None:
    for mode in MODES[protocol]:
        client, options = ask(server, protocol, mode)
        made = client.create(messages=user("Write JSON."), response_model=GetWeather, **options)
        assert isinstance(made, GetWeather), mode


def all_modes_streamed(server: Server, protocol: str) -> None:
    for mode in MODES[protocol]:
        client, options = ask(server, protocol, mode)
        parts = list(
            client.create_partial(
                messages=user("Write JSON."), response_model=GetWeather, **options
            )
        )
        assert parts[-1].city is not None, mode


def thinking(server: Server, protocol: str) -> None:
    client, options = ask(server, protocol, MODES[protocol][-1])
    made, raw = client.create_with_completion(
        messages=user(SUM_QUESTION), response_model=GetWeather, **options
    )
    assert isinstance(made, GetWeather)
    assert raw.usage


if __name__ == "__main__":
    run(
        forced_call,
        forced_call_streamed,
        all_modes,
        all_modes_streamed,
        thinking,
        packages=("instructor", "openai", "anthropic"),
        protocols=tuple(MODES),
    )

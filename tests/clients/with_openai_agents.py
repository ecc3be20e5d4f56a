"""openai-agents: agents over Responses and over chat completions."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from agents import set_tracing_disabled as switch_tracing_off
from conversations import (
    SUM_QUESTION,
    WEATHER_QUESTION,
    Server,
    called,
    run,
    summed,
    thought,
    through,
    told,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

MODELS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
switch_tracing_off(disabled=True)


class Report(BaseModel):
    city: str
    degrees: int


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return called("get_weather", {"city": city})


def agent_of(server: Server, protocol: str, **options: Any) -> Agent:
    client = AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=300)
    return Agent(
        "weather", model=MODELS[protocol](server.model, client), model_settings=settings, **options
    )


async def tool_loop(server: Server, protocol: str) -> None:
    told(
        (
            await Runner.run(agent_of(server, protocol, tools=[get_weather]), WEATHER_QUESTION)
        ).final_output
    )


async def tool_loop_streamed(server: Server, protocol: str) -> None:
    running, text = (
        Runner.run_streamed(agent_of(server, protocol, tools=[get_weather]), WEATHER_QUESTION),
        "",
    )
    async for event in running.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    told(text)
    told(running.final_output)


async def thinking(server: Server, protocol: str) -> None:
    done = await Runner.run(agent_of(server, protocol), SUM_QUESTION)
    summed(done.final_output)
    (item,) = [item.raw_item for item in done.new_items if item.type == "reasoning_item"]
    thought("".join(part.text for part in item.content or item.summary))
    again = await Runner.run(
        agent_of(server, protocol),
        [*done.to_input_list(), {"role": "user", "content": "What is 12 + 30?"}],
    )
    summed(again.final_output)


async def thinking_streamed(server: Server, protocol: str) -> None:
    running, thoughts = Runner.run_streamed(agent_of(server, protocol), SUM_QUESTION), ""
    async for event in running.stream_events():
        if (
            event.type == "raw_response_event"
            and event.data.type.startswith("response.reasoning")
            and "delta" in event.data.type
        ):
            thoughts += event.data.delta
    summed(running.final_output)
    thought(thoughts)


async def structure(server: Server, protocol: str) -> None:
    assert isinstance(
        (
            await Runner.run(agent_of(server, protocol, output_type=Report), "Write JSON.")
        ).final_output,
        Report,
    )


@through("responses")
async def stored_conversation(server: Server, protocol: str) -> None:
    agent = agent_of(server, protocol, tools=[get_weather])
    first = await Runner.run(agent, WEATHER_QUESTION, auto_previous_response_id=True)
    told(first.final_output)
    summed(
        (
            await Runner.run(agent, SUM_QUESTION, previous_response_id=first.last_response_id)
        ).final_output
    )


if __name__ == "__main__":
    run(
        tool_loop,
        tool_loop_streamed,
        thinking,
        thinking_streamed,
        structure,
        stored_conversation,
        packages=("openai-agents", "openai"),
        protocols=tuple(MODELS),
    )

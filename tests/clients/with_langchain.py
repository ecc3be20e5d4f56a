"""LangChain: its OpenAI chat model, and its agent."""

from __future__ import annotations

from typing import Any

from conversations import CITY, SUM_QUESTION, WEATHER_QUESTION, Server, called, run, summed, told
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return called("get_weather", {"city": city})


class Report(BaseModel):
    """A report."""

    city: str
    degrees: int


def model_of(server: Server, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=server.base_url, api_key=server.api_key, model=server.model, temperature=0, max_retries=0, **options
    )


def tool_loop(server: Server) -> None:
    model = model_of(server).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(WEATHER_QUESTION)]
    first = model.invoke(messages)
    (call,) = first.tool_calls
    assert call["args"] == {"city": CITY}
    assert first.response_metadata["finish_reason"] == "tool_calls"
    messages += [first, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    told(model.invoke(messages).content)


def tool_loop_streamed(server: Server) -> None:
    model = model_of(server, stream_usage=True).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(WEATHER_QUESTION)]
    first: Any = None
    for chunk in model.stream(messages):
        first = chunk if first is None else first + chunk
    (call,) = first.tool_calls
    assert not first.invalid_tool_calls
    messages += [first, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    told("".join(chunk.content for chunk in model.stream(messages)))


def agent(server: Server) -> None:
    done = create_agent(model_of(server), [get_weather]).invoke({"messages": [HumanMessage(WEATHER_QUESTION)]})
    told(done["messages"][-1].content)


def agent_streamed(server: Server) -> None:
    text = ""
    events = create_agent(model_of(server), [get_weather]).stream(
        {"messages": [HumanMessage(WEATHER_QUESTION)]}, stream_mode="messages"
    )
    for message, _ in events:
        text += message.content if message.type == "AIMessageChunk" else ""
    told(text)


def thinking(server: Server) -> None:
    answer = model_of(server).invoke(SUM_QUESTION)
    summed(answer.content)
    assert answer.usage_metadata["output_token_details"]["reasoning"] > 0


def thinking_streamed(server: Server) -> None:
    answer: Any = None
    for chunk in model_of(server, stream_usage=True).stream(SUM_QUESTION):
        answer = chunk if answer is None else answer + chunk
    summed(answer.content)
    assert answer.usage_metadata["output_token_details"]["reasoning"] > 0


def structure(server: Server) -> None:
    for method in ("json_schema", "function_calling"):
        report = model_of(server, max_tokens=200).with_structured_output(Report, method=method).invoke("Write JSON.")
        assert isinstance(report, Report), method


if __name__ == "__main__":
    run(
        tool_loop,
        tool_loop_streamed,
        agent,
        agent_streamed,
        thinking,
        thinking_streamed,
        structure,
        packages=("langchain", "langchain-openai", "openai"),
    )

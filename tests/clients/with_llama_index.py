"""LlamaIndex: its model for OpenAI-like servers, and its agent."""

from __future__ import annotations

from typing import Any

from conversations import SUM_QUESTION, WEATHER_QUESTION, Server, called, run, summed, told
from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Report(BaseModel):
    """A report."""

    city: str
    degrees: int


def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return called("get_weather", {"city": city})


def model_of(server: Server, **options: Any) -> OpenAILike:
    return OpenAILike(
        model=server.model,
        api_base=server.base_url,
        api_key=server.api_key,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_retries=0,
        context_window=32768,
        **options,
    )


def tool_loop(server: Server) -> None:
    model, tool = model_of(server), FunctionTool.from_defaults(get_weather, description="Get the weather of a city")
    messages = [ChatMessage(role="user", content=WEATHER_QUESTION)]
    first = model.chat_with_tools([tool], chat_history=messages)
    (call,) = model.get_tool_calls_from_response(first)
    result = called(call.tool_name, call.tool_kwargs)
    messages += [first.message, ChatMessage(role="tool", content=result, additional_kwargs={"tool_call_id": call.tool_id})]
    told(model.chat_with_tools([tool], chat_history=messages).message.content)


def tool_loop_streamed(server: Server) -> None:
    model, tool = model_of(server), FunctionTool.from_defaults(get_weather, description="Get the weather of a city")
    messages = [ChatMessage(role="user", content=WEATHER_QUESTION)]
    *_, first = model.stream_chat_with_tools([tool], chat_history=messages)
    (call,) = model.get_tool_calls_from_response(first)
    result = called(call.tool_name, call.tool_kwargs)
    messages += [first.message, ChatMessage(role="tool", content=result, additional_kwargs={"tool_call_id": call.tool_id})]
    told("".join(part.delta or "" for part in model.stream_chat_with_tools([tool], chat_history=messages)))


async def agent(server: Server) -> None:
    tool = FunctionTool.from_defaults(get_weather, description="Get the weather of a city")
    told(str(await FunctionAgent(tools=[tool], llm=model_of(server), streaming=False).run(WEATHER_QUESTION)))


async def agent_streamed(server: Server) -> None:
    tool = FunctionTool.from_defaults(get_weather, description="Get the weather of a city")
    running = FunctionAgent(tools=[tool], llm=model_of(server)).run(WEATHER_QUESTION)
    text = "".join([event.delta async for event in running.stream_events() if isinstance(event, AgentStream)])
    told(text)
    told(str(await running))


def thinking(server: Server) -> None:
    answer: Any = model_of(server).chat([ChatMessage(role="user", content=SUM_QUESTION)])
    summed(answer.message.content)
    assert answer.raw.choices[0].message.reasoning_content


def thinking_streamed(server: Server) -> None:
    parts: Any = model_of(server).stream_chat([ChatMessage(role="user", content=SUM_QUESTION)])
    summed("".join(part.delta or "" for part in parts))


def structure(server: Server) -> None:
    report = model_of(server, max_tokens=200).structured_predict(Report, PromptTemplate("Write JSON."))
    assert isinstance(report, Report)


if __name__ == "__main__":
    run(
        tool_loop,
        tool_loop_streamed,
        agent,
        agent_streamed,
        thinking,
        thinking_streamed,
        structure,
        packages=("llama-index-core", "llama-index-llms-openai-like", "openai"),
    )

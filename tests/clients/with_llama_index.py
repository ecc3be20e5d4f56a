"""LlamaIndex: its models for all protocols, and its agent."""

from __future__ import annotations

from typing import Any

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
from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.base.llms.types import ThinkingBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.tools import FunctionTool
from llama_index.llms.anthropic import Anthropic
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel

PROTOCOLS = ("chat", "responses", "messages", "ollama")


class Report(BaseModel):
    """A report."""

    city: str
    degrees: int


def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return called("get_weather", {"city": city})


def weather_tool() -> FunctionTool:
    return FunctionTool.from_defaults(get_weather, description="Get the weather of a city")


def model_of(
    server: Server, protocol: str, *, max_tokens: int = 1000, thinks: bool = False
) -> FunctionCallingLLM:
    if protocol == "ollama":
        options = {"num_predict": max_tokens}
        return Ollama(
            model=server.model,
            base_url=server.root,
            temperature=0,
            thinking=True,
            context_window=8192,
            additional_kwargs=options,
        )
    shared: dict[str, Any] = {
        "model": server.model,
        "api_key": server.api_key,
        "temperature": 0,
        "max_retries": 0,
    }
    if protocol == "messages":
        if thinks:  # Messages requires a request for a thought
            shared |= {"thinking_dict": {"type": "enabled", "budget_tokens": 1024}}
            max_tokens = 2000
        made = NamedModel(base_url=server.root, max_tokens=max_tokens, **shared)
        # with thoughts, it always uses temperature 1, and the bundled model may then get a wrong
        # sum
        made.temperature = 0
        return made
    shared |= {
        "api_base": server.base_url,
        "is_chat_model": True,
        "is_function_calling_model": True,
        "context_window": 32768,
    }
    if protocol == "responses":
        if thinks:  # it shows thoughts as summaries only
            shared["reasoning_options"] = {"effort": "medium", "summary": "auto"}
        return OpenAILikeResponses(max_output_tokens=max_tokens, **shared)
    return OpenAILike(max_tokens=max_tokens, **shared)


class NamedModel(Anthropic):
    """Its model for Messages, which knows context lengths by model name: any other name is an
    error.
    """

    @property
    def metadata(self) -> Any:
        return OpenAILike(
            model=self.model, is_chat_model=True, is_function_calling_model=True
        ).metadata


def then(model: FunctionCallingLLM, first: Any) -> list[ChatMessage]:
    (call,) = model.get_tool_calls_from_response(first)
    result = called(call.tool_name, call.tool_kwargs)
    return [
        first.message,
        ChatMessage(role="tool", content=result, additional_kwargs={"tool_call_id": call.tool_id}),
    ]


def tool_loop(server: Server, protocol: str) -> None:
    model, messages = (
        model_of(server, protocol),
        [ChatMessage(role="user", content=WEATHER_QUESTION)],
    )
    messages += then(model, model.chat_with_tools([weather_tool()], chat_history=messages))
    told(model.chat_with_tools([weather_tool()], chat_history=messages).message.content)


def tool_loop_streamed(server: Server, protocol: str) -> None:
    model, messages = (
        model_of(server, protocol),
        [ChatMessage(role="user", content=WEATHER_QUESTION)],
    )
    *_, first = model.stream_chat_with_tools([weather_tool()], chat_history=messages)
    messages += then(model, first)
    told(
        "".join(
            part.delta or ""
            for part in model.stream_chat_with_tools([weather_tool()], chat_history=messages)
        )
    )


async def agent(server: Server, protocol: str) -> None:
    made = FunctionAgent(tools=[weather_tool()], llm=model_of(server, protocol), streaming=False)
    told(str(await made.run(WEATHER_QUESTION)))


async def agent_streamed(server: Server, protocol: str) -> None:
    running = FunctionAgent(tools=[weather_tool()], llm=model_of(server, protocol)).run(
        WEATHER_QUESTION
    )
    text = "".join(
        [event.delta async for event in running.stream_events() if isinstance(event, AgentStream)]
    )
    told(text)
    told(str(await running))


def thinking(server: Server, protocol: str) -> None:
    answer: Any = model_of(server, protocol, thinks=True).chat(
        [ChatMessage(role="user", content=SUM_QUESTION)]
    )
    summed(answer.message.content)
    if protocol == "chat":
        assert answer.raw.choices[0].message.reasoning_content
    else:
        thought(
            "".join(
                block.content or ""
                for block in answer.message.blocks
                if isinstance(block, ThinkingBlock)
            )
        )


def thinking_streamed(server: Server, protocol: str) -> None:
    parts: Any = model_of(server, protocol, thinks=True).stream_chat(
        [ChatMessage(role="user", content=SUM_QUESTION)]
    )
    summed("".join(part.delta or "" for part in parts))


# Not through Messages: there it does not force the call, and the bundled model does not follow
# instructions.
@through("chat", "responses", "ollama")
def structure(server: Server, protocol: str) -> None:
    report = model_of(server, protocol, max_tokens=200).structured_predict(
        Report, PromptTemplate("Write JSON.")
    )
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
        packages=(
            "llama-index-core",
            "llama-index-llms-openai-like",
            "llama-index-llms-anthropic",
            "llama-index-llms-ollama",
        ),
        protocols=PROTOCOLS,
    )

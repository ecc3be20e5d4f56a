"""pydantic-ai: agents with tools, thoughts and typed results, through all its protocols."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic
from conversations import SUM_QUESTION, WEATHER_QUESTION, Server, called, run, summed, thought, told
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import PartStartEvent, ThinkingPart, ThinkingPartDelta
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.ollama import OllamaModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider

# its model for Ollama speaks chat completions
PROTOCOLS = ("chat", "responses", "messages", "ollama")


class Report(BaseModel):
    city: str
    degrees: int


def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return called("get_weather", {"city": city})


def agent_of(server: Server, protocol: str, *, thinks: bool = False, **options: object) -> Agent:
    openai: Any = OpenAIProvider(base_url=server.base_url, api_key=server.api_key)
    anthropic: Any = AnthropicProvider(
        anthropic_client=AsyncAnthropic(base_url=server.root, api_key=server.api_key, max_retries=0)
    )
    model: Any = {
        "chat": lambda: OpenAIChatModel(server.model, provider=openai),
        "responses": lambda: OpenAIResponsesModel(server.model, provider=openai),
        # it knows by name which models follow a schema
        "messages": lambda: AnthropicModel(
            server.model, provider=anthropic, profile={"supports_json_schema_output": True}
        ),
        "ollama": lambda: OllamaModel(
            server.model, provider=OllamaProvider(base_url=server.base_url)
        ),
    }[protocol]()
    # Responses: summaries only
    settings: dict[str, Any] = {"temperature": 0, "openai_reasoning_summary": "auto"}
    if thinks and protocol == "messages":  # it requires a request for a thought
        settings |= {
            "anthropic_thinking": {"type": "enabled", "budget_tokens": 1024},
            "max_tokens": 2000,
        }
    return Agent(model, model_settings=settings, retries=0, **options)


def tool_loop(server: Server, protocol: str) -> None:
    told(agent_of(server, protocol, tools=[get_weather]).run_sync(WEATHER_QUESTION).output)


async def tool_loop_streamed(server: Server, protocol: str) -> None:
    async with agent_of(server, protocol, tools=[get_weather]).run_stream(
        WEATHER_QUESTION
    ) as stream:
        text = "".join([piece async for piece in stream.stream_text(delta=True)])
    told(text)


def thinking(server: Server, protocol: str) -> None:
    done = agent_of(server, protocol, thinks=True).run_sync(SUM_QUESTION)
    summed(done.output)
    (part,) = [part for part in done.all_messages()[-1].parts if isinstance(part, ThinkingPart)]
    thought(part.content)
    again = agent_of(server, protocol, thinks=True).run_sync(
        "What is 12 + 30?", message_history=done.all_messages()
    )
    summed(again.output)


async def thinking_streamed(server: Server, protocol: str) -> None:
    thoughts = ""
    async with agent_of(server, protocol, thinks=True).iter(SUM_QUESTION) as steps:
        async for node in steps:
            if Agent.is_model_request_node(node):
                async with node.stream(steps.ctx) as events:
                    async for event in events:
                        piece = getattr(
                            event, "part" if isinstance(event, PartStartEvent) else "delta", None
                        )
                        thoughts += piece.content if isinstance(piece, ThinkingPart) else ""
                        thoughts += (
                            piece.content_delta or ""
                            if isinstance(piece, ThinkingPartDelta)
                            else ""
                        )
    summed(steps.result.output)
    thought(thoughts)


def structure(server: Server, protocol: str) -> None:
    for kind in (NativeOutput, ToolOutput):
        agent = agent_of(server, protocol, output_type=kind(Report))
        assert isinstance(
            agent.run_sync("Write JSON.", model_settings={"max_tokens": 200}).output, Report
        ), kind


if __name__ == "__main__":
    run(
        tool_loop,
        tool_loop_streamed,
        thinking,
        thinking_streamed,
        structure,
        packages=("pydantic-ai-slim", "openai", "anthropic"),
        protocols=PROTOCOLS,
    )

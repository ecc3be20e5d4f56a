"""LangChain: its chat models for all protocols, and its agent."""

from __future__ import annotations

from typing import Any

from conversations import (
    CITY,
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
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

PROTOCOLS = ("chat", "responses", "messages", "ollama")


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return called("get_weather", {"city": city})


class Report(BaseModel):
    """A report."""

    city: str
    degrees: int


def model_of(server: Server, protocol: str, *, max_tokens: int = 1000) -> BaseChatModel:
    shared: dict[str, Any] = {"model": server.model, "temperature": 0}
    if protocol == "ollama":
        return ChatOllama(base_url=server.root, num_predict=max_tokens, reasoning=True, **shared)
    shared |= {"api_key": server.api_key, "max_retries": 0, "max_tokens": max_tokens}
    if protocol == "messages":
        return ChatAnthropic(base_url=server.root, **shared)
    if protocol == "responses":  # it shows thoughts as summaries only
        shared |= {"use_responses_api": True, "reasoning": {"effort": "medium", "summary": "auto"}}
    return ChatOpenAI(base_url=server.base_url, stream_usage=True, **shared)


def joined(chunks: Any) -> Any:
    whole: Any = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    return whole


def thought_of(message: Any) -> str:
    blocks = [block for block in message.content_blocks if block["type"] == "reasoning"]
    return "".join(block.get("reasoning") or "" for block in blocks)


def tool_loop(server: Server, protocol: str) -> None:
    model = model_of(server, protocol).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(WEATHER_QUESTION)]
    first = model.invoke(messages)
    (call,) = first.tool_calls
    assert call["args"] == {"city": CITY}
    messages += [first, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    told(model.invoke(messages).text)


def tool_loop_streamed(server: Server, protocol: str) -> None:
    model = model_of(server, protocol).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(WEATHER_QUESTION)]
    first = joined(model.stream(messages))
    (call,) = first.tool_calls
    assert not first.invalid_tool_calls
    messages += [first, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    told("".join(chunk.text for chunk in model.stream(messages)))


def agent(server: Server, protocol: str) -> None:
    done = create_agent(model_of(server, protocol), [get_weather]).invoke(
        {"messages": [HumanMessage(WEATHER_QUESTION)]}
    )
    told(done["messages"][-1].text)


def agent_streamed(server: Server, protocol: str) -> None:
    text = ""
    events = create_agent(model_of(server, protocol), [get_weather]).stream(
        {"messages": [HumanMessage(WEATHER_QUESTION)]}, stream_mode="messages"
    )
    for message, _ in events:
        text += message.text if message.type == "AIMessageChunk" else ""
    told(text)


def thinking(server: Server, protocol: str) -> None:
    _thought_about(thinker_of(server, protocol).invoke(SUM_QUESTION), protocol)


def thinking_streamed(server: Server, protocol: str) -> None:
    _thought_about(joined(thinker_of(server, protocol).stream(SUM_QUESTION)), protocol)


def thinker_of(server: Server, protocol: str) -> Any:
    if protocol != "messages":
        return model_of(server, protocol)
    # Messages requires a request for a thought, without a temperature
    thinking = {"type": "enabled", "budget_tokens": 1024}
    return ChatAnthropic(
        base_url=server.root,
        model=server.model,
        api_key=server.api_key,
        max_tokens=2000,
        thinking=thinking,
    )


def _thought_about(answer: Any, protocol: str) -> None:
    summed(answer.text)
    if protocol != "chat":  # its model of chat completions leaves reasoning_content out
        thought(thought_of(answer))
    if protocol in ("chat", "responses"):
        assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
    assert answer.usage_metadata["input_tokens"] > 0


def structure(server: Server, protocol: str) -> None:
    for method in ("json_schema", "function_calling"):
        structured = model_of(server, protocol, max_tokens=200).with_structured_output(
            Report, method=method, include_raw=True
        )
        answer: Any = structured.invoke("Write JSON.")
        assert answer["parsing_error"] is None, method
        if answer["raw"].tool_calls or not (method == "function_calling" and protocol == "ollama"):
            assert isinstance(answer["parsed"], Report), method
        else:  # Ollama's API cannot force a call: the model may write text instead
            assert answer["raw"].text, method


@through("chat", "ollama")
def embeddings(server: Server, protocol: str) -> None:
    if protocol == "ollama":
        embedder: Any = OllamaEmbeddings(base_url=server.root, model=server.model)
    else:
        embedder = OpenAIEmbeddings(base_url=server.base_url, api_key=server.api_key, model=server.model, max_retries=0,
                                    check_embedding_ctx_length=False)  # fmt: skip
    one, other = embedder.embed_documents(["hello", "weather"])
    assert len(one) == len(other) > 0
    assert one != other


if __name__ == "__main__":
    run(
        tool_loop,
        tool_loop_streamed,
        agent,
        agent_streamed,
        thinking,
        thinking_streamed,
        structure,
        embeddings,
        packages=("langchain", "langchain-openai", "langchain-anthropic", "langchain-ollama"),
        protocols=PROTOCOLS,
    )

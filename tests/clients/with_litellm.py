"""litellm, as a library: its OpenAI-compatible, Anthropic and Ollama providers, and its Responses."""

from __future__ import annotations

import gc
from typing import Any

import litellm
from conversations import (
    SUM_QUESTION,
    WEATHER_QUESTION,
    WEATHER_TOOL,
    Server,
    called,
    run,
    summed,
    thought,
    told,
)
from pydantic import BaseModel

# Of its providers: prefix of the model's name, and whether the base URL ends with /v1.
PROVIDERS = {
    "chat": ("hosted_vllm/", True),
    "responses": ("openai/responses/", True),
    "messages": ("anthropic/", False),
    "ollama": ("ollama_chat/", False),
}


class Report(BaseModel):
    city: str
    degrees: int


def ask(server: Server, protocol: str, messages: list[Any], **options: Any) -> Any:
    prefix, is_versioned = PROVIDERS[protocol]
    # for an unknown model, it requests whole answers and turns them into streams
    if protocol == "responses":
        known = {
            "litellm_provider": "openai",
            "mode": "responses",
            "supports_native_streaming": True,
            "supports_reasoning": True,
        }
        litellm.register_model({f"openai/{server.model}": known})
        # it shows thoughts as summaries only
        options["reasoning_effort"] = {"effort": "medium", "summary": "auto"}
    # Messages requires a request for a thought
    if protocol == "messages" and not {"tools", "response_format"} & set(options):
        options |= {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
        options["allowed_openai_params"] = ["thinking"]  # it does not know if this model can
    return litellm.completion(
        model=prefix + server.model,
        api_base=server.base_url if is_versioned else server.root,
        api_key=server.api_key,
        temperature=0,
        num_retries=0,
        messages=messages,
        **options,
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool_loop(server: Server, protocol: str) -> None:
    messages: list[Any] = [user(WEATHER_QUESTION)]
    first = ask(server, protocol, messages, tools=[WEATHER_TOOL]).choices[0]
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls"
    result = called(call.function.name, call.function.arguments)
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    told(ask(server, protocol, messages, tools=[WEATHER_TOOL]).choices[0].message.content)


def tool_loop_streamed(server: Server, protocol: str) -> None:
    messages: list[Any] = [user(WEATHER_QUESTION)]
    first = litellm.stream_chunk_builder(
        list(ask(server, protocol, messages, tools=[WEATHER_TOOL], stream=True))
    ).choices[0]
    (call,) = first.message.tool_calls
    result = called(call.function.name, call.function.arguments)
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    chunks = ask(server, protocol, messages, tools=[WEATHER_TOOL], stream=True)
    told("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))


def thinking(server: Server, protocol: str) -> None:
    message = ask(server, protocol, [user(SUM_QUESTION)]).choices[0].message
    summed(message.content)
    thought(message.reasoning_content)


def thinking_streamed(server: Server, protocol: str) -> None:
    chunks = list(ask(server, protocol, [user(SUM_QUESTION)], stream=True))
    message = litellm.stream_chunk_builder(chunks).choices[0].message
    summed(message.content)
    thought(message.reasoning_content)


def structure(server: Server, protocol: str) -> None:
    answer = ask(server, protocol, [user("Write JSON.")], max_tokens=200, response_format=Report)
    assert Report.model_validate_json(answer.choices[0].message.content)


if __name__ == "__main__":
    # litellm abandons streams before their end. When the garbage collector closes one while httpcore
    # 1.0.9 holds its pool's lock, the thread waits for itself (encode/httpcore#996).
    gc.disable()
    run(
        tool_loop,
        tool_loop_streamed,
        thinking,
        thinking_streamed,
        structure,
        packages=("litellm", "openai"),
        protocols=tuple(PROVIDERS),
    )

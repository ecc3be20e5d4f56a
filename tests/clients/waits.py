"""Clients of every protocol with a server that is silent for long before and during an answer,
except for keep-alives.

`python waits.py BASE_URL MODEL` with a server whose answers are all `Hello`
(`tests/fakes/waiting_server.py`).
"""

from __future__ import annotations

from typing import Any

import litellm
from anthropic import Anthropic, AsyncAnthropic
from conversations import Server, run
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from ollama import Client
from openai import OpenAI
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from with_llama_index import NamedModel

HI: list[Any] = [{"role": "user", "content": "Hi"}]


def own(server: Server, protocol: str) -> str:
    openai = OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0)
    if protocol == "chat":
        chunks = openai.chat.completions.create(model=server.model, messages=HI, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    if protocol == "responses":
        with openai.responses.stream(model=server.model, input="Hi", store=False) as events:
            return "".join(
                event.delta for event in events if event.type == "response.output_text.delta"
            )
    if protocol == "messages":
        client = Anthropic(base_url=server.root, api_key=server.api_key, max_retries=0)
        with client.messages.stream(model=server.model, messages=HI, max_tokens=9) as events:
            return "".join(events.text_stream)
    parts = Client(host=server.root).chat(model=server.model, messages=HI, stream=True)
    return "".join(part.message.content or "" for part in parts)


def langchain(server: Server, protocol: str) -> str:
    if protocol == "ollama":
        model: Any = ChatOllama(base_url=server.root, model=server.model)
    elif protocol == "messages":
        model = ChatAnthropic(
            base_url=server.root,
            api_key=server.api_key,
            model=server.model,
            max_retries=0,
            max_tokens=9,
        )
    else:
        responses = {"use_responses_api": True} if protocol == "responses" else {}
        model = ChatOpenAI(
            base_url=server.base_url,
            api_key=server.api_key,
            model=server.model,
            max_retries=0,
            **responses,
        )
    return "".join(chunk.text for chunk in model.stream("Hi"))


def llama_index(server: Server, protocol: str) -> str:
    shared = {
        "api_base": server.base_url,
        "api_key": server.api_key,
        "is_chat_model": True,
        "max_retries": 0,
    }
    model: Any = {
        "chat": lambda: OpenAILike(model=server.model, **shared),
        "responses": lambda: OpenAILikeResponses(model=server.model, **shared),
        "messages": lambda: NamedModel(
            model=server.model, base_url=server.root, api_key=server.api_key, max_retries=0
        ),
        "ollama": lambda: Ollama(model=server.model, base_url=server.root, context_window=2048),
    }[protocol]()
    return "".join(
        part.delta or "" for part in model.stream_chat([ChatMessage(role="user", content="Hi")])
    )


def by_litellm(server: Server, protocol: str) -> str:
    prefix, url = {
        "chat": ("hosted_vllm/", server.base_url),
        "responses": ("openai/responses/", server.base_url),
        "messages": ("anthropic/", server.root),
        "ollama": ("ollama_chat/", server.root),
    }[protocol]
    litellm.register_model(
        {
            f"openai/{server.model}": {
                "litellm_provider": "openai",
                "supports_native_streaming": True,
            }
        }
    )
    options = {"api_base": url, "api_key": server.api_key, "num_retries": 0, "stream": True}
    chunks = litellm.completion(model=prefix + server.model, messages=HI, max_tokens=9, **options)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def pydantic_ai(server: Server, protocol: str) -> str:
    if protocol == "messages":
        client = AsyncAnthropic(base_url=server.root, api_key=server.api_key, max_retries=0)
        model: Any = AnthropicModel(
            server.model, provider=AnthropicProvider(anthropic_client=client)
        )
    else:
        kind = OpenAIResponsesModel if protocol == "responses" else OpenAIChatModel
        model = kind(
            server.model, provider=OpenAIProvider(base_url=server.base_url, api_key=server.api_key)
        )
    async with Agent(model, retries=0).run_stream("Hi") as stream:
        return "".join([piece async for piece in stream.stream_text(delta=True)])


def waiting(ask: Any) -> Any:
    """Check that a client's text is exactly the answer."""

    async def check(server: Server, protocol: str) -> None:
        said = ask(server, protocol)
        said = said if isinstance(said, str) else await said
        assert said == "Hello", f"heard {said!r}"

    check.__name__ = ask.__name__
    return check


if __name__ == "__main__":
    run(
        *(waiting(ask) for ask in (own, langchain, llama_index, by_litellm, pydantic_ai)),
        packages=(
            "openai",
            "anthropic",
            "ollama",
            "langchain",
            "llama-index-core",
            "litellm",
            "pydantic-ai-slim",
        ),
        protocols=("chat", "responses", "messages", "ollama"),
    )

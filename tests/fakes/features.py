"""Every user-visible feature, as one function each: it uses the feature, checks the answer, and
returns what must be the same in every condition.

The functions use only what a client has: a URL, headers and fields. To add a feature, write a
function and add a line to FEATURES.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.fakes.images import data_url, png

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
NOTES = "Notes:\n" + "".join(
    f"- The code of shed {shed} is {shed * 37}.\n" for shed in range(1, 15)
)
QUESTION = "What is the code of shed 7?"
CAT, DOG = png(1, size=(64, 48)), png(2, size=(48, 64))
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
SCHEMA = {
    "type": "object",
    "properties": {"shed": {"type": "integer"}, "colour": {"enum": ["red", "blue"]}},
    "required": ["shed", "colour"],
    "additionalProperties": False,
}
TEXT = (
    "Ada lives in Paris. The red lamp is in the kitchen. The meeting is on Friday. Tom is 41 years "
    "old. The port of the mirror is 8080. Mia works as a baker. The code of the shed is 4711."
)
MODELS = ("demo", "seeing")  # and the adapter `demo:sql`


@dataclass(frozen=True, kw_only=True)
class Caller:
    """A client of a server: the URL, and additions to each request."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    salt: str = ""

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, **more: Any
    ) -> httpx.Response:
        salt = {"cache_salt": self.salt} if self.salt else {}
        given: dict[str, Any] = {"params": salt} if body is None else {"json": {**body, **salt}}
        headers = {**self.headers, **more.pop("headers", {})}
        return httpx.request(
            method, f"{self.url}{path}", headers=headers, timeout=180, **given, **more
        )

    def get(self, path: str) -> Any:
        response = self.request("GET", path)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, headers: Mapping[str, str] | None = None, **body: Any) -> Any:
        response = self.request("POST", path, body, headers=dict(headers or {}))
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
        return response.json()

    def lines(self, path: str, **body: Any) -> list[Any]:
        """The objects of a stream, of server-sent events or JSON lines."""
        response = self.request("POST", path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def chat(self, content: Any, **body: Any) -> Any:
        """The answer to one message, greedy and short unless `body` says otherwise."""
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        given = {"model": "demo", "temperature": 0, "max_tokens": 24, **body}
        return self.post(CHAT, messages=messages, **given)


@dataclass(frozen=True, kw_only=True)
class TextProtocol:
    """How a protocol requests text, and where the text is in its answers and streams."""

    path: str
    body: Callable[[str], dict[str, Any]]
    whole: Callable[[Any], str]
    piece: Callable[[Any], str]


def _user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


TEXT_PROTOCOLS = {
    "chat completions": TextProtocol(
        path=CHAT,
        body=lambda text: {"messages": _user(text), "max_tokens": 24, "temperature": 0},
        whole=lambda answer: answer["choices"][0]["message"]["content"],
        piece=lambda event: event["choices"][0]["delta"].get("content") or "",
    ),
    "completions": TextProtocol(
        path="/v1/completions",
        body=lambda text: {"prompt": text, "max_tokens": 24, "temperature": 0},
        whole=lambda answer: answer["choices"][0]["text"],
        piece=lambda event: event["choices"][0]["text"],
    ),
    "responses": TextProtocol(
        path=RESPONSES,
        body=lambda text: {"input": text, "max_output_tokens": 24, "temperature": 0},
        whole=lambda answer: answer["output"][0]["content"][0]["text"],
        piece=lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
    "messages": TextProtocol(
        path=MESSAGES,
        body=lambda text: {"messages": _user(text), "max_tokens": 24, "temperature": 0},
        whole=lambda answer: answer["content"][0]["text"],
        piece=lambda event: event.get("delta", {}).get("text", ""),
    ),
    "ollama chat": TextProtocol(
        path="/api/chat",
        body=lambda text: {
            "messages": _user(text),
            "options": {"num_predict": 24, "temperature": 0},
        },
        whole=lambda answer: answer["message"]["content"],
        piece=lambda event: event["message"]["content"],
    ),
    "ollama generate": TextProtocol(
        path="/api/generate",
        body=lambda text: {"prompt": text, "options": {"num_predict": 24, "temperature": 0}},
        whole=lambda answer: answer["response"],
        piece=lambda event: event["response"],
    ),
}


def chat(caller: Caller) -> dict[str, str]:
    texts = {
        name: each.whole(
            caller.post(each.path, model="demo", stream=False, **each.body(NOTES + QUESTION))
        )
        for name, each in TEXT_PROTOCOLS.items()
    }
    assert texts["chat completions"] == texts["responses"] == texts["messages"]
    assert texts["chat completions"] == texts["ollama chat"]
    return texts


def streams(caller: Caller) -> dict[str, str]:
    return {
        name: "".join(
            each.piece(event)
            for event in caller.lines(each.path, model="demo", **each.body(NOTES + QUESTION))
        )
        for name, each in TEXT_PROTOCOLS.items()
    }


def tools(caller: Caller) -> list[Any]:
    function = {"name": "get_weather", "description": "Get the weather", "parameters": WEATHER}
    asked = _user("What is the weather in Oslo?")
    given: dict[str, Any] = {"tools": [{"type": "function", "function": function}]}
    calls = []
    for choice in ("auto", "required"):
        message = caller.chat(asked, tool_choice=choice, max_tokens=80, **given)["choices"][0][
            "message"
        ]
        (call,) = message["tool_calls"]
        calls.append(json.loads(call["function"]["arguments"]))
    assert calls == [{"city": "Oslo"}] * 2
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny, 21 degrees"}
    told = caller.chat([*asked, message, result], max_tokens=40, **given)
    assert "21 degrees" in told["choices"][0]["message"]["content"]
    return [calls, told["choices"][0]["message"]["content"]]


def structure(caller: Caller) -> Any:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "shed", "strict": True, "schema": SCHEMA},
    }
    answer = caller.chat("Write as JSON: shed 7, colour red", response_format=form, max_tokens=60)
    document = json.loads(answer["choices"][0]["message"]["content"])
    assert isinstance(document["shed"], int)
    assert document["colour"] in ("red", "blue")
    return document


def _picture(data: bytes) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": data_url(data)}},
    ]


def images(caller: Caller) -> dict[str, Any]:
    """The model sees each image in every protocol, and tells two images apart."""
    given: dict[str, Any] = {"model": "seeing", "max_tokens": 8}
    seen = {
        name: caller.chat(_user(_picture(data)), **given)["choices"][0]["message"]["content"]
        for name, data in (("cat", CAT), ("dog", DOG))
    }
    assert seen["cat"] != seen["dog"]
    url = data_url(CAT)
    encoded = url.partition(",")[2]
    parts = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": url},
    ]
    responses = caller.post(
        RESPONSES,
        model="seeing",
        input=_user(parts),
        max_output_tokens=8,
        temperature=0,
    )
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    blocks = [{"type": "text", "text": "What is this?"}, {"type": "image", "source": source}]
    messages = caller.post(
        MESSAGES, model="seeing", messages=_user(blocks), max_tokens=8, temperature=0
    )
    ollama = {
        name: caller.post(
            "/api/chat",
            model="seeing",
            messages=[{**_user("What is this?")[0], "images": [data]}],
            stream=False,
            options={"num_predict": 8, "temperature": 0},
        )["message"]["content"]
        for name, data in (("cat", encoded), ("dog", data_url(DOG).partition(",")[2]))
    }
    assert responses["output"][0]["content"][0]["text"] == seen["cat"]
    assert messages["content"][0]["text"] == seen["cat"]
    assert ollama["cat"] != ollama["dog"]
    return {"chat": seen, "ollama": ollama}


def adapters(caller: Caller) -> list[str]:
    texts = [
        caller.chat(NOTES + QUESTION, model=model, ignore_eos=True)["choices"][0]["message"][
            "content"
        ]
        for model in ("demo", "demo:sql")
    ]
    assert texts[0] != texts[1]
    return texts


def sessions(caller: Caller) -> list[Any]:
    session = {"X-Session-ID": "matrix"}
    body = {"prompt": NOTES, "max_tokens": 4, "temperature": 0, "model": "demo"}
    text = caller.post("/v1/completions", headers=session, **body)["choices"][0]["text"]
    found = caller.get("/v1/sessions/matrix")
    assert found["kept_tokens"] == found["tokens"] > 100
    assert "matrix" in [each["id"] for each in caller.get("/v1/sessions")["data"]]
    assert caller.request("DELETE", "/v1/sessions/matrix").status_code == 200
    assert caller.request("GET", "/v1/sessions/matrix").status_code == 404
    return [text, found["tokens"]]


def stored_responses(caller: Caller) -> list[str]:
    given: dict[str, Any] = {"model": "demo", "max_output_tokens": 16, "temperature": 0}
    first = caller.post(RESPONSES, input=NOTES + QUESTION, **given)
    second = caller.post(RESPONSES, input="And of 8?", previous_response_id=first["id"], **given)
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 100
    assert caller.get(f"/v1/responses/{first['id']}")["output"] == first["output"]
    assert caller.request("DELETE", f"/v1/responses/{first['id']}").status_code == 200
    assert caller.request("GET", f"/v1/responses/{first['id']}").status_code == 404
    return [each["output"][0]["content"][0]["text"] for each in (first, second)]


def known_answers(caller: Caller) -> list[str]:
    """In the next turn, the whole last turn is cached, including its answer."""
    asked = _user(NOTES + QUESTION)
    first = caller.chat(asked)
    said = first["choices"][0]["message"]["content"]
    second = caller.chat([*asked, {"role": "assistant", "content": said}, *_user("And of shed 8?")])
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["total_tokens"] - 1
    return [said, second["choices"][0]["message"]["content"]]


def drafts(caller: Caller) -> str:
    text = f"Repeat exactly: {TEXT}"
    answer = caller.chat(text, max_tokens=80, prediction={"type": "content", "content": TEXT})
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    plain = caller.chat(text, max_tokens=80)
    assert answer["choices"][0]["message"] == plain["choices"][0]["message"]
    return str(plain["choices"][0]["message"]["content"])


def embeddings(caller: Caller) -> list[float]:
    answer = caller.post("/v1/embeddings", model="demo", input=["Hello", "Goodbye", "Hello"])
    first, other, again = (
        [round(value, 3) for value in each["embedding"]] for each in answer["data"]
    )
    assert first == again != other
    return first


def rerank(caller: Caller) -> list[int]:
    documents = ["Bananas are yellow.", "What is the capital of France?"]
    answer = caller.post(
        "/v1/rerank", model="demo", query="What is the capital of France?", documents=documents
    )
    order = [each["index"] for each in answer["results"]]
    assert order == [1, 0]
    return order


def warm_up(caller: Caller) -> str:
    prompt = "Warm. " + NOTES + QUESTION
    warmed = caller.chat(prompt, max_tokens=0)
    assert warmed["choices"][0]["finish_reason"] == "length"
    answer = caller.chat(prompt)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == answer["usage"]["prompt_tokens"] - 1
    return str(answer["choices"][0]["message"]["content"])


def quantized_kv(caller: Caller) -> list[str]:
    texts = []
    for bits in (8, 4):
        first, again = (caller.chat(NOTES + QUESTION, kv_bits=bits) for _ in range(2))
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        assert first["choices"][0]["message"] == again["choices"][0]["message"]
        texts.append(first["choices"][0]["message"]["content"])
    return texts


def token_counts(caller: Caller) -> list[Any]:
    """Token counts in advance equal those of the request."""
    messages = _user(NOTES + QUESTION)
    counted = caller.post("/v1/messages/count_tokens", model="demo", messages=messages)
    usage = caller.post(MESSAGES, model="demo", messages=messages, max_tokens=1)["usage"]
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert counted["input_tokens"] == sum(usage[kind] for kind in kinds)
    tokens = caller.post("/tokenize", model="demo", prompt=QUESTION)["tokens"]
    assert caller.post("/detokenize", model="demo", tokens=tokens)["prompt"] == QUESTION
    return [counted, tokens]


def cancelled(caller: Caller) -> None:
    """A client that leaves its stream does not delay its next request until the stream has ended."""
    body = {"model": "demo", "messages": _user("Tell a story."), "max_tokens": 2000, "stream": True}
    given = {**body, "ignore_eos": True, **({"cache_salt": caller.salt} if caller.salt else {})}
    with httpx.stream(
        "POST", f"{caller.url}{CHAT}", json=given, headers=dict(caller.headers), timeout=180
    ) as response:
        assert response.status_code == 200
        assert next(response.iter_lines()).startswith("data: ")
    assert caller.chat("Hello", max_tokens=2)["choices"]


FEATURES: Mapping[str, Callable[[Caller], Any]] = {
    "chat": chat,
    "streams": streams,
    "a stream that its client leaves": cancelled,
    "tools": tools,
    "structure": structure,
    "images": images,
    "adapters": adapters,
    "sessions": sessions,
    "stored responses": stored_responses,
    "known answers": known_answers,
    "drafts": drafts,
    "embeddings": embeddings,
    "rerank": rerank,
    "warm-up": warm_up,
    "quantized KV": quantized_kv,
    "token counts": token_counts,
}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a client has before a restart and must find again afterwards."""

    chat: Any
    picture: Any
    response: str

    @classmethod
    def by(cls, caller: Caller) -> Kept:
        """Create it through a caller."""
        session = {"X-Session-ID": "kept"}
        caller.post("/v1/completions", headers=session, model="demo", prompt=NOTES, max_tokens=2)
        response = caller.post(RESPONSES, model="demo", input=NOTES, max_output_tokens=4)
        return cls(
            chat=caller.chat("Kept. " + NOTES + QUESTION),
            picture=caller.chat(_user(_picture(CAT)), model="seeing", max_tokens=8),
            response=response["id"],
        )

    def check(self, caller: Caller) -> None:
        """Check that every answer is the same, and that no token is prefilled again."""
        again: Sequence[tuple[Any, Any]] = (
            (self.chat, caller.chat("Kept. " + NOTES + QUESTION)),
            (self.picture, caller.chat(_user(_picture(CAT)), model="seeing", max_tokens=8)),
        )
        for before, after in again:
            assert after["choices"][0]["message"] == before["choices"][0]["message"]
            usage = after["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 64
        assert caller.get("/v1/sessions/kept")["requests"] >= 1
        assert caller.get(f"/v1/responses/{self.response}")["id"] == self.response

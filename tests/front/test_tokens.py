from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.prompt.tokenize import Tokenizer
from tests.fakes import toy_tokenizers
from tests.fakes.http_clients import HELLO, client_of
from tests.fakes.scripted_gateway import MODEL, PROMPT_TOKENS, ScriptedGateway

TOKENIZER = Tokenizer(toy_tokenizers.byte_level(), config={})


async def called(path: str, *, gateway: ScriptedGateway | None = None, **body: Any) -> Any:
    async with client_of(gateway or ScriptedGateway()) as client:
        return await client.post(path, json=body)


async def test_a_text_becomes_its_models_tokens() -> None:
    body = (await called("/tokenize", content="hello world")).json()
    expected = TOKENIZER.encode("hello world", add_special_tokens=False)
    assert body == {
        "tokens": expected,
        "count": len(expected),
        "max_model_len": 2048,
        "token_strs": None,
    }


async def test_pieces_are_texts_or_bytes_of_a_partial_character() -> None:
    body = (
        await called("/tokenize", content="hello 😀", with_pieces=True, return_token_strs=True)
    ).json()
    pieces = [token["piece"] for token in body["tokens"]]
    joined = b"".join(
        piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces
    )
    assert joined.decode() == "hello 😀"
    assert any(isinstance(piece, list) for piece in pieces)
    assert body["token_strs"][0] == "hello"
    assert body["count"] == len(pieces) == len(body["token_strs"])


@given(st.text(max_size=30))
def test_the_bytes_of_all_pieces_are_the_text(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    joined = b"".join(TOKENIZER.pieces.all_bytes(token_id) for token_id in token_ids)
    assert joined.decode() == TOKENIZER.decode(token_ids, skip_special_tokens=False)


async def test_both_detokenize_paths_return_the_text() -> None:
    tokens = (await called("/tokenize", prompt="hello <|im_end|>")).json()["tokens"]
    assert (await called("/detokenize", tokens=tokens)).json() == {
        "content": "hello <|im_end|>",
        "prompt": "hello <|im_end|>",
    }
    assert (await called("/detokenize", tokens=[])).json()["content"] == ""


async def test_special_token_texts_are_plain_text_on_request() -> None:
    counts = [
        (await called("/tokenize", content="<|im_end|>", parse_special=parses)).json()["count"]
        for parses in (True, False)
    ]
    assert counts[0] == 1 < counts[1]


async def test_a_conversation_is_counted_and_shown_as_rendered() -> None:
    gateway = ScriptedGateway()
    counted = await called("/tokenize", gateway=gateway, messages=HELLO)
    assert counted.json()["count"] == PROMPT_TOKENS
    shown = await called("/apply-template", gateway=gateway, messages=HELLO, model=MODEL)
    assert shown.json() == {"prompt": "a prompt"}
    assert [request.model for request in gateway.requests] == [MODEL, MODEL]

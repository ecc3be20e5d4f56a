from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.ollama.answer import decode_context, encode_context
from holdfast.front.request import ChatPrompt
from holdfast.front.server.problem import RequestRefused
from holdfast.wire.requests import SamplingParams
from tests.fakes.http_clients import client_of
from tests.fakes.ollama_bodies import GENERATE, asked, lines_of
from tests.fakes.scripted_gateway import MODEL, ScriptedControl, ScriptedGateway, answer, calling


async def test_a_prompt_becomes_a_user_message_after_the_system_message() -> None:
    gateway = ScriptedGateway(script=calling(thought="hm", said="Hello"))
    lines = lines_of(await asked(gateway, GENERATE, system="Be brief."))
    assert gateway.request.prompt == ChatPrompt(
        messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"})
    )
    assert (
        "".join(line["response"] for line in lines),
        "".join(line.get("thinking", "") for line in lines),
    ) == ("Hello", "hm")
    assert lines[-1]["done_reason"] == "stop"


async def test_streamed_and_whole_answers_are_equal() -> None:
    whole = (
        await asked(ScriptedGateway(script=answer("Hel", "lo")), GENERATE, stream=False)
    ).json()
    assert (whole["response"], whole["done"], whole["eval_count"]) == ("Hello", True, 2)


async def test_a_raw_prompt_is_continued_unchanged() -> None:
    gateway = ScriptedGateway()
    await asked(gateway, GENERATE, raw=True, prompt="Once upon")
    assert (gateway.request.prompt, gateway.request.prompt_field) == ("Once upon", "prompt")


@pytest.mark.parametrize("field", ["system", "context", "template", "images"])
async def test_a_raw_prompt_excludes_other_fields(field: str) -> None:
    value: Any = {"context": [1, 2], "images": ["aGk="]}.get(field, "x")
    response = await asked(ScriptedGateway(), GENERATE, raw=True, **{field: value})
    assert (response.status_code, f"`{field}`" in response.json()["error"]) == (400, True)


async def test_fields_without_effect_are_accepted() -> None:
    nothing = {
        "suffix": "",
        "images": [],
        "template": "",
        "width": 0,
        "context": [],
        "format": "",
        "options": {},
        "system": "",
    }
    assert (await asked(ScriptedGateway(), GENERATE, **nothing)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({}, "load"), ({"keep_alive": 0}, "unload"), ({"keep_alive": "0m"}, "unload")],
)
@pytest.mark.parametrize("prompt", ["", None])
async def test_without_a_prompt_the_model_is_only_loaded(
    prompt: Any, fields: dict[str, Any], reason: str
) -> None:
    whole = (await asked(ScriptedGateway(), GENERATE, prompt=prompt, **fields)).json()
    assert (whole["response"], whole["done"], whole["done_reason"]) == ("", True, reason)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    ("headers", "keep_alive", "done"),
    [({}, 0, [("let go", MODEL)]), ({}, "5m", []), ({"x-forwarded-for": "192.0.2.1"}, 0, [])],
)
async def test_an_administrator_may_unload_a_model_after_its_answer(
    streams: bool, headers: dict[str, str], keep_alive: Any, done: list[Any]
) -> None:
    control = ScriptedControl()
    body = {"model": MODEL, "prompt": "hello", "keep_alive": keep_alive, "stream": streams}
    async with client_of(ScriptedGateway(), control=control) as client:
        answer = await client.post(GENERATE, json=body, headers=headers)
    assert (answer.status_code, control.done) == (200, done)


async def options_of(**options: Any) -> Any:
    gateway = ScriptedGateway()
    response = await asked(gateway, GENERATE, options=options)
    assert response.status_code == 200, response.text
    return gateway.request


async def test_sampling_options_have_ollamas_names() -> None:
    request = await options_of(
        temperature=0,
        top_k=40.0,
        top_p=0.9,
        min_p=0.1,
        seed=7,
        repeat_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
    )
    assert request.sampling == SamplingParams(
        temperature=0,
        top_k=40,
        top_p=0.9,
        min_p=0.1,
        seed=7,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
    )
    assert request.unset_sampling == ("logit_bias",)  # no option of Ollama


async def test_omitted_options_use_the_models_defaults() -> None:
    request = await options_of(top_k=-1, seed=-1, repeat_last_n=0, repeat_penalty=1.5)
    assert (request.sampling, request.max_tokens) == (SamplingParams(), None)
    assert set(request.unset_sampling) == {
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    }


@pytest.mark.parametrize(
    ("given", "found"), [(-1, None), (-2, None), (5, 5), (5.0, 5), (0, None), (None, None)]
)
async def test_num_predict_limits_the_answer_or_fills_the_context(
    given: Any, found: int | None
) -> None:
    assert (await options_of(num_predict=given)).max_tokens == found


@pytest.mark.parametrize(
    ("given", "found"), [("END", ("END",)), (["a", "b"], ("a", "b")), ([], ()), (None, ())]
)
async def test_stop_may_be_one_text_or_several(given: Any, found: tuple[str, ...]) -> None:
    assert (await options_of(stop=given)).stop == found


async def test_options_for_ollamas_engine_are_ignored() -> None:
    plain = await options_of()
    tuned = await options_of(
        num_ctx=8192, num_gpu=99, mirostat=2, tfs_z=0.5, numa=True, num_thread=8, something_new=1
    )
    assert (tuned.sampling, tuned.max_tokens) == (plain.sampling, plain.max_tokens)


async def test_a_conversation_continues_from_its_context() -> None:
    first = (
        await asked(
            ScriptedGateway(script=calling(thought="hm", said="Hello")),
            GENERATE,
            system="Be brief.",
            stream=False,
        )
    ).json()
    streamed = lines_of(
        await asked(
            ScriptedGateway(script=calling(thought="hm", said="Hello")),
            GENERATE,
            system="Be brief.",
        )
    )
    assert streamed[-1]["context"] == first["context"]
    gateway = ScriptedGateway(script=answer("Fine"))
    await asked(gateway, GENERATE, prompt="How are you?", context=first["context"])
    past = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "hm"},
    )
    assert gateway.request.prompt == ChatPrompt(
        messages=(*past, {"role": "user", "content": "How are you?"})
    )
    gateway = ScriptedGateway()
    await asked(gateway, GENERATE, prompt="Again", context=first["context"], system="Be long.")
    assert isinstance(gateway.request.prompt, ChatPrompt)
    assert [turn["content"] for turn in gateway.request.prompt.messages] == [
        "Be long.",
        "hello",
        "Hello",
        "Again",
    ]


async def test_a_raw_prompt_returns_no_context() -> None:
    assert (
        "context" not in (await asked(ScriptedGateway(), GENERATE, raw=True, stream=False)).json()
    )


@pytest.mark.parametrize(
    "context",
    [
        [1, 2, 3],
        [100_000],
        [-1],
        encode_context([{"role": "tool", "content": "x"}]),
        encode_context([])[:-2],
    ],
)
async def test_a_foreign_context_is_refused(context: list[int]) -> None:
    response = await asked(ScriptedGateway(), GENERATE, context=context)
    assert (response.status_code, "`context`" in response.json()["error"]) == (400, True)


def test_a_context_cannot_grow_beyond_its_bound() -> None:
    small = encode_context([{"role": "user", "content": "x" * 100_000}])
    assert len(small) < 1000
    with pytest.raises(RequestRefused):
        decode_context(small, limit_bytes=50_000)


@given(
    turns=st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()}
        )
    )
)
def test_a_context_round_trips(turns: list[dict[str, str]]) -> None:
    assert list(decode_context(encode_context(turns), limit_bytes=1 << 20)) == turns

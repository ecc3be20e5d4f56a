"""The gateway submits possible requests, streams one end per choice, and leaves nothing running."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from holdfast.config import LimitsSettings
from holdfast.errors import (
    GenerationFailed,
    InvalidRequest,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
    RenderingUnavailable,
    SessionFailure,
    SessionRefused,
    TemplateOverrun,
    TooLargeForMemory,
    UnknownModel,
    WorkerUnavailable,
)
from holdfast.front.gateway import Gateway
from holdfast.front.link.event_stream import WorkerClient
from holdfast.front.output import ChoiceFinished, OutputEvent, TextDelta
from holdfast.front.prompt import prepare as prepare_module
from holdfast.front.prompt import template_process
from holdfast.front.prompt.known_answers import KnownAnswers
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.template_process import RenderProcesses
from holdfast.front.prompt.token_memory import TokenMemory
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.prompt.tokenizer_bundle import Bundles, TokenizerBundle
from holdfast.front.request import ChatPrompt, GenerationRequest, OutputFormat, Prompt, ToolChoice
from holdfast.front.structured.answer import AnswerGrammar, answer_grammar
from holdfast.front.toolcalls.dialect import ModelDialect
from holdfast.front.toolcalls.families import FAMILIES
from holdfast.wire.events import FinishReason, RejectionKind
from holdfast.wire.requests import SamplingParams
from holdfast.wire.sessions import SessionAnswer, SessionCommand
from tests.fakes import toy_tokenizers
from tests.fakes.scripted_client import Script, ScriptedClient, answers, model_info, refuses

HELLO = ChatPrompt(messages=({"role": "user", "content": "hello"},))
WITH_TOOLS = ChatPrompt(
    messages=HELLO.messages, tools=({"type": "function", "function": {"name": "look"}},)
)


@pytest.fixture(autouse=True)
async def no_task_outlives_a_test() -> AsyncIterator[None]:
    """Runs every test in asyncio's debug mode; nothing may remain, not even an unretrieved
    exception.
    """
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    before = asyncio.all_tasks()
    gc.freeze()  # only what the test makes is searched: a collection of everything takes 0.15 s
    yield
    await asyncio.sleep(0)
    gc.collect()
    assert asyncio.all_tasks() - before - {asyncio.current_task()} == set()
    assert complaints == []


def serve(
    bundle: TokenizerBundle, script: Script, *, is_broken: bool = False, **options: Any
) -> tuple[Gateway, ScriptedClient]:
    engine = ScriptedClient(script, **options)

    @asynccontextmanager
    async def lease_of(model: str, sequences: int) -> AsyncIterator[WorkerClient]:
        if model != "toy":
            raise UnknownModel(model=model, available=("toy",))
        engine.leases += 1
        try:
            yield engine
        finally:
            engine.leases -= 1

    async def read(model: str) -> TokenizerBundle:
        if model != "toy":
            raise UnknownModel(model=model, available=("toy",))
        if is_broken:
            raise ModelLoadError("no tokenizer")
        return bundle

    return Gateway(lease_of, Bundles(read), LimitsSettings()), engine


def asks(prompt: Prompt = HELLO, **fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"request_id": "r", "model": "toy", "prompt": prompt, **fields})


def encode(bundle: TokenizerBundle, text: str) -> tuple[int, ...]:
    return tuple(bundle.tokenizer.encode(text, add_special_tokens=False))


async def collect(gateway: Gateway, request: GenerationRequest) -> list[OutputEvent]:
    async with aclosing(await gateway.generate(request)) as stream:
        return [event async for event in stream]


def text_of(events: list[OutputEvent], index: int = 0) -> str:
    return "".join(
        event.text for event in events if isinstance(event, TextDelta) and event.index == index
    )


def ends(events: list[OutputEvent]) -> list[ChoiceFinished]:
    return [event for event in events if isinstance(event, ChoiceFinished)]


async def test_an_answer_is_text_and_one_end(bundle: TokenizerBundle) -> None:
    ids = (*encode(bundle, "hello 🙂"), *bundle.tokenizer.eos_token_ids)
    gateway, engine = serve(bundle, answers(*ids))
    events = await collect(gateway, asks())
    assert text_of(events) == "hello 🙂"
    (end,) = ends(events)
    assert (end.reason, end.completion_tokens) == (FinishReason.STOP, len(ids))
    assert end.prompt_tokens == len(engine.submitted[0].prompt_token_ids)
    assert engine.cancelled == []


async def test_the_stream_has_its_prompts_token_count(bundle: TokenizerBundle) -> None:
    gateway, engine = serve(bundle, answers(1))
    async with aclosing(await gateway.generate(asks())) as stream:
        assert stream.prompt_tokens == len(engine.submitted[0].prompt_token_ids)
        assert stream.request.request_id == "r"
    await engine.close()


@pytest.mark.parametrize("choices", [1, 3])
async def test_every_choice_has_its_text_and_exactly_one_end(
    bundle: TokenizerBundle, choices: int
) -> None:
    gateway, engine = serve(bundle, answers(*encode(bundle, "hello world")))
    events = await collect(gateway, asks(choices=choices))
    assert sorted(end.index for end in ends(events)) == list(range(choices))
    assert [text_of(events, index) for index in range(choices)] == ["hello world"] * choices
    assert len({request.sampling.seed for request in engine.submitted}) == choices


async def test_choices_end_independently(bundle: TokenizerBundle) -> None:
    short, long = encode(bundle, "hello"), encode(bundle, "hello world " * 5)
    gateway, _ = serve(
        bundle, lambda request: answers(*(short if request.request_id == "r/1" else long))(request)
    )
    events = await collect(gateway, asks(choices=2))
    assert [text_of(events, index) for index in (0, 1)] == ["hello world " * 5, "hello"]
    assert [end.index for end in ends(events)] == [1, 0]


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_stop_string_cancels_the_workers_sequence(
    bundle: TokenizerBundle, choices: int
) -> None:
    gateway, engine = serve(bundle, answers(*encode(bundle, "hello world and more " * 20)))
    events = await collect(gateway, asks(choices=choices, stop=("wor",)))
    assert [text_of(events, index) for index in range(choices)] == ["hello "] * choices
    assert {end.reason for end in ends(events)} == {FinishReason.STOP}
    assert sorted(engine.cancelled) == [f"r/{index}" for index in range(choices)]
    await engine.close()


@pytest.mark.parametrize("choices", [1, 3])
async def test_closing_the_stream_cancels_all_choices(
    bundle: TokenizerBundle, choices: int
) -> None:
    gateway, engine = serve(bundle, answers(*encode(bundle, "hello world " * 50)))
    stream = await gateway.generate(asks(choices=choices))
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    assert sorted(engine.cancelled) == [f"r/{index}" for index in range(choices)]
    assert [event async for event in stream] == []
    await engine.close()


@pytest.mark.parametrize("choices", [1, 3])
async def test_closing_before_the_first_event_cancels_all_choices(
    bundle: TokenizerBundle, choices: int
) -> None:
    gateway, engine = serve(bundle, answers(*encode(bundle, "hello")))
    engine.may_go_on.clear()
    stream = await gateway.generate(asks(choices=choices))
    await stream.aclose()
    assert sorted(engine.cancelled) == [f"r/{index}" for index in range(choices)]
    await engine.close()


@pytest.mark.parametrize("choices", [1, 3])
async def test_cancelling_the_consumer_cancels_all_choices(
    bundle: TokenizerBundle, choices: int
) -> None:
    gateway, engine = serve(bundle, answers(*encode(bundle, "hello")))
    engine.may_go_on.clear()
    consumer = asyncio.create_task(collect(gateway, asks(choices=choices)))
    while len(engine.submitted) < choices:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert sorted(engine.cancelled) == [f"r/{index}" for index in range(choices)]
    await engine.close()


async def test_cancelling_before_acceptance_cancels_in_the_worker_too(
    bundle: TokenizerBundle,
) -> None:
    gateway, engine = serve(bundle, lambda request: [])
    consumer = asyncio.create_task(collect(gateway, asks(choices=2)))
    while len(engine.submitted) < 2:
        await asyncio.sleep(0)
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert sorted(engine.cancelled) == ["r/0", "r/1"]


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_failure_is_raised_and_cancels_the_other_choices(
    bundle: TokenizerBundle, choices: int
) -> None:
    fails = answers(*encode(bundle, "he"), reason=FinishReason.FAILED, error="NaN in the logits")
    lasts = answers(*encode(bundle, "hello world " * 50))
    gateway, engine = serve(
        bundle, lambda request: (fails if request.request_id == "r/0" else lasts)(request)
    )
    with pytest.raises(GenerationFailed, match="NaN"):
        await collect(gateway, asks(choices=choices))
    assert sorted(engine.cancelled) == [f"r/{index}" for index in range(1, choices)]
    await engine.close()


async def test_a_full_queue_is_refused_with_its_numbers(bundle: TokenizerBundle) -> None:
    gateway, _ = serve(bundle, refuses("queue_full"))
    with pytest.raises(QueueFull) as caught:
        await gateway.generate(asks())
    assert (caught.value.queued, caught.value.limit, caught.value.retry_after_seconds) == (9, 9, 3)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("invalid", InvalidRequest),
        ("shutting_down", WorkerUnavailable),
    ],
)
async def test_other_refusals_become_their_errors(
    bundle: TokenizerBundle, kind: RejectionKind, error: type[Exception]
) -> None:
    gateway, _ = serve(bundle, refuses(kind, message="because", field="max_tokens"))
    with pytest.raises(error, match="because"):
        await gateway.generate(asks())


async def test_a_request_that_never_fits_is_refused_with_its_numbers(
    bundle: TokenizerBundle,
) -> None:
    gateway, _ = serve(bundle, refuses("too_large"))
    with pytest.raises(TooLargeForMemory) as caught:
        await gateway.generate(asks())
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (9, 8)


async def test_one_refused_choice_cancels_the_accepted_ones(bundle: TokenizerBundle) -> None:
    refused, accepted = refuses("queue_full"), answers(*encode(bundle, "hello world"))
    gateway, engine = serve(
        bundle, lambda request: (refused if request.request_id == "r/2" else accepted)(request)
    )
    engine.may_go_on.clear()
    with pytest.raises(QueueFull):
        await gateway.generate(asks(choices=3))
    assert sorted(engine.cancelled) == ["r/0", "r/1"]
    await engine.close()


async def test_a_worker_lost_between_two_submits_leaves_nothing_running(
    bundle: TokenizerBundle,
) -> None:
    gateway, engine = serve(bundle, answers(*encode(bundle, "hello")))
    engine.refuses_after = 1
    with pytest.raises(WorkerUnavailable):
        await gateway.generate(asks(choices=2))
    assert engine.cancelled == ["r/0"]
    await engine.close()


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"model": "other"}, UnknownModel, "model"),
        ({"prompt": ChatPrompt(messages=())}, InvalidRequest, "messages"),
        ({"prompt": (1000,), "prompt_field": "prompt"}, InvalidRequest, "prompt"),
        ({"prompt": "x" * 300, "prompt_field": "prompt"}, PromptTooLong, "prompt"),
        ({"choices": 99}, InvalidRequest, "n"),
        ({"sampling": SamplingParams(logit_bias={1000: 1.0})}, InvalidRequest, "logit_bias"),
        (
            {"output_format": OutputFormat(kind="regex", pattern="(", field="guided_regex")},
            InvalidRequest,
            "guided_regex",
        ),
        (
            {"prompt": WITH_TOOLS, "tool_choice": ToolChoice(mode="required")},
            InvalidRequest,
            "tool_choice",
        ),
    ],
)
async def test_an_impossible_request_never_reaches_the_worker(
    bundle: TokenizerBundle, fields: dict[str, Any], error: type[InvalidRequest], named: str
) -> None:
    gateway, engine = serve(bundle, answers(1))
    with pytest.raises(error) as caught:
        await gateway.generate(asks(**fields))
    assert caught.value.field == named
    assert engine.submitted == []


async def test_a_model_with_a_broken_tokenizer_cannot_be_served(bundle: TokenizerBundle) -> None:
    gateway, engine = serve(bundle, answers(1), is_broken=True)
    with pytest.raises(WorkerUnavailable, match="no tokenizer"):
        await gateway.generate(asks())
    assert engine.leases == 0


@pytest.mark.parametrize("choices", [1, 2])
async def test_the_model_is_leased_until_the_answer_has_ended(
    bundle: TokenizerBundle, choices: int
) -> None:
    gateway, engine = serve(bundle, answers(*encode(bundle, "hello")))
    async with aclosing(await gateway.generate(asks(choices=choices))) as stream:
        assert engine.leases == 1
        async for event in stream:
            assert engine.leases == 1 or isinstance(event, ChoiceFinished)
        assert engine.leases == 0  # read to its end, and not yet closed
    stream = await gateway.generate(asks(choices=choices))
    await anext(stream)
    await stream.aclose()
    assert engine.leases == 0
    await engine.close()


async def test_a_refused_request_releases_its_lease(bundle: TokenizerBundle) -> None:
    gateway, engine = serve(bundle, refuses("queue_full"))
    with pytest.raises(QueueFull):
        await gateway.generate(asks())
    assert engine.leases == 0


async def test_a_long_text_is_tokenized_on_another_thread(bundle: TokenizerBundle) -> None:
    class NotingTokenizer(Tokenizer):
        threads: ClassVar[list[threading.Thread]] = []

        def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
            self.threads.append(threading.current_thread())
            return super().encode_all(texts)

    noting = replace(
        bundle,
        tokenizer=NotingTokenizer(toy_tokenizers.byte_level(), config={}),
        token_memory=TokenMemory(),
    )
    gateway, _ = serve(noting, answers(1), info=model_info(context_tokens=10**6))
    for text in ("hello", "hello " * 5000):
        await collect(gateway, asks(text))
    assert [thread is threading.main_thread() for thread in NotingTokenizer.threads] == [
        True,
        False,
    ]


async def test_conversations_are_rendered_on_another_thread(bundle: TokenizerBundle) -> None:
    class NotingTemplate(ChatTemplate):
        threads: ClassVar[list[threading.Thread]] = []

        def rendered(
            self, prompt: ChatPrompt, adapted: list[Any], *, field: str = "messages"
        ) -> tuple[str, tuple[str, ...]]:
            self.threads.append(threading.current_thread())
            return super().rendered(prompt, adapted, field=field)

    template = NotingTemplate(
        {"default": toy_tokenizers.CHATML}, special_tokens=bundle.tokenizer.special_tokens
    )
    noting = replace(bundle, template=template)
    gateway, _ = serve(noting, answers(1), info=model_info(context_tokens=10**6))
    long_answer = {"role": "assistant", "content": "{" * 30_000}
    for messages in (
        HELLO.messages,
        HELLO.messages * 400,
        (*HELLO.messages, long_answer, *HELLO.messages),
    ):
        await collect(gateway, asks(ChatPrompt(messages=messages)))
    assert [thread is threading.main_thread() for thread in NotingTemplate.threads] == [
        False,
        False,
        False,
    ]


async def test_grammars_are_made_on_another_thread_for_the_worker(
    bundle: TokenizerBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noting(*arguments: Any, **more: Any) -> AnswerGrammar:
        threads.append(threading.current_thread())
        return answer_grammar(*arguments, **more)

    monkeypatch.setattr(prepare_module, "answer_grammar", noting)
    gateway, engine = serve(bundle, answers(2))
    form = OutputFormat(kind="json_schema", schema={"type": "integer"})
    for fields in ({}, {"output_format": form, "choices": 2}):
        await collect(gateway, asks("hello", **fields))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
    assert [bool(sequence.grammar) for sequence in engine.submitted] == [False, True, True]


async def test_unwanted_calls_are_prevented_by_banning_their_opening(
    bundle: TokenizerBundle,
) -> None:
    dialect = ModelDialect(
        family="hermes", calls=FAMILIES["hermes"].calls, marker_ids={"<tool_call>": 7}
    )
    gateway, engine = serve(replace(bundle, dialect=dialect), answers(1))
    sampling = SamplingParams(logit_bias={5: 1.0})
    await collect(gateway, asks(WITH_TOOLS, tool_choice=ToolChoice(mode="none"), sampling=sampling))
    (sequence,) = engine.submitted
    assert (sequence.grammar, sequence.sampling.logit_bias) == ("", {5: 1.0, 7: -100.0})


async def test_echo_and_prompt_scores_begin_the_answer(bundle: TokenizerBundle) -> None:
    gateway, engine = serve(bundle, answers(*encode(bundle, " world")))
    request = asks("hello the", echo=True, want_logprobs=True)
    events = await collect(gateway, request)
    assert text_of(events) == "hello the world"
    assert engine.submitted[0].want_prompt_logprobs
    tokens = [token for event in events if isinstance(event, TextDelta) for token in event.logprobs]
    assert "".join(token.text for token in tokens) == "hello the world"


async def test_several_tokens_in_one_event_are_one_delta(bundle: TokenizerBundle) -> None:
    gateway, _ = serve(bundle, answers(*encode(bundle, "hello world hello"), per_event=8))
    events = await collect(gateway, asks())
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["hello world hello"]


def in_single_bytes(bundle: TokenizerBundle, text: str) -> tuple[int, ...]:
    """The text as more tokens than the tokenizer would use: one per character."""
    return tuple(token_id for character in text for token_id in encode(bundle, character))


async def test_an_answer_returns_in_the_next_turn_as_generated_tokens(
    bundle: TokenizerBundle,
) -> None:
    bundle = replace(bundle, known_answers=KnownAnswers())
    answer = "hello hello"
    generated = in_single_bytes(bundle, answer)
    assert generated != encode(bundle, answer)
    assert bundle.tokenizer.decode(generated, skip_special_tokens=False) == answer
    gateway, engine = serve(bundle, answers(*generated, *bundle.tokenizer.eos_token_ids))
    assert text_of(await collect(gateway, asks())) == answer
    said: tuple[dict[str, Any], ...] = (
        {"role": "assistant", "content": answer},
        {"role": "user", "content": answer},
    )
    await collect(gateway, asks(ChatPrompt(messages=(*HELLO.messages, *said))))
    first, second = (tuple(sequence.prompt_token_ids) for sequence in engine.submitted)
    assert second[: len(first) + len(generated)] == first + generated
    assert bundle.tokenizer.decode(second, skip_special_tokens=False).count(answer) == 2
    await collect(gateway, asks(ChatPrompt(messages=(*HELLO.messages, *said)), tenant="another"))
    assert (
        tuple(engine.submitted[2].prompt_token_ids)[: len(first) + len(generated)]
        != first + generated
    )


async def test_an_answer_cut_by_a_stop_string_is_retokenized(bundle: TokenizerBundle) -> None:
    bundle = replace(bundle, known_answers=KnownAnswers())
    gateway, engine = serve(bundle, answers(*encode(bundle, "hello hello")))
    events = await collect(gateway, asks(stop=("lo h",)))
    assert text_of(events) == "hel"
    await collect(
        gateway,
        asks(
            ChatPrompt(
                messages=(*HELLO.messages, {"role": "assistant", "content": "hel"}, *HELLO.messages)
            )
        ),
    )
    assert "hel" in bundle.tokenizer.decode(
        engine.submitted[1].prompt_token_ids, skip_special_tokens=False
    )
    assert bundle.known_answers.put_back_answers == 0


async def test_encoded_prompts_equal_submitted_ones(bundle: TokenizerBundle) -> None:
    gateway, engine = serve(bundle, answers(1))
    for prompt in (HELLO, "hello the", (1, 2, 3)):
        encoded = await gateway.encode(asks(prompt))
        await collect(gateway, asks(prompt))
        assert encoded.token_ids == engine.submitted[-1].prompt_token_ids
        assert bool(encoded.text) == (prompt != (1, 2, 3))
    assert len(engine.submitted) == 3


async def test_a_prompt_longer_than_the_window_is_still_encoded(bundle: TokenizerBundle) -> None:
    gateway, engine = serve(bundle, answers(1), info=model_info(context_tokens=8))
    assert len((await gateway.encode(asks("hello the " * 9))).token_ids) > 8
    with pytest.raises(PromptTooLong):
        await gateway.encode(asks("hello the " * 900))
    assert engine.submitted == []


async def test_a_model_with_a_hanging_template_delays_no_other(
    bundle: TokenizerBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = RenderProcesses(cpu_seconds=0.3)
    monkeypatch.setattr(template_process, "PROCESSES", processes)
    loops = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    source = (
        "{% if messages[0].content == 'loop' %}" + loops + "{% endif %}" + toy_tokenizers.CHATML
    )
    template = ChatTemplate({"default": source}, special_tokens=bundle.tokenizer.special_tokens)
    bundles = {"toy": bundle, "hostile": replace(bundle, template=template)}
    engine = ScriptedClient(answers(1))

    @asynccontextmanager
    async def lease_of(model: str, sequences: int) -> AsyncIterator[WorkerClient]:
        yield engine

    async def read(model: str) -> TokenizerBundle:
        return bundles[model]

    gateway = Gateway(lease_of, Bundles(read), LimitsSettings())
    endless = ChatPrompt(messages=({"role": "user", "content": "loop"},))
    hanging = [
        asyncio.create_task(gateway.generate(asks(endless, model="hostile"))) for _ in range(80)
    ]
    done, _ = await asyncio.wait(hanging, return_when=asyncio.FIRST_COMPLETED)
    assert {type(task.exception()) for task in done} <= {TemplateOverrun, RenderingUnavailable}
    assert ends(await collect(gateway, asks()))
    assert sum(not task.done() for task in hanging) > 32
    for task in hanging:
        task.cancel()
    outcomes = await asyncio.gather(*hanging, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {
        TemplateOverrun,
        RenderingUnavailable,
        asyncio.CancelledError,
    }
    processes.close()


async def test_impossible_encodings_are_refused_by_name(bundle: TokenizerBundle) -> None:
    gateway, _ = serve(bundle, answers(1))
    with pytest.raises(UnknownModel):
        await gateway.encode(asks(model="other"))
    with pytest.raises(InvalidRequest) as error:
        await gateway.encode(asks(ChatPrompt(messages=()), prompt_field="input"))
    assert error.value.field == "input"


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_command_waits_for_the_first_request_of_its_session(
    bundle: TokenizerBundle, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    gateway, engine = serve(bundle, answers(*encode(bundle, "hello")))
    command = SessionCommand(operation="get", call_id="c", tenant="", session_id="s")
    asked_first = asyncio.Event()

    async def ask(command: SessionCommand) -> SessionAnswer:
        asked_first.set()
        if engine.submitted:
            return SessionAnswer(call_id="c")
        return SessionAnswer(call_id="c", failure=SessionFailure.NOT_FOUND, message="none")

    monkeypatch.setattr(engine, "call", ask)
    prepare = gateway._prepare
    asking: list[asyncio.Task[Any]] = []

    async def prepared_late(*arguments: Any) -> Any:
        asking.append(asyncio.create_task(gateway.sessions("toy", command)))
        await asked_first.wait()
        if is_refused:
            raise InvalidRequest("too long")
        return await prepare(*arguments)

    monkeypatch.setattr(gateway, "_prepare", prepared_late)
    if is_refused:
        with pytest.raises(InvalidRequest):
            await collect(gateway, asks(session_id="s"))
        with pytest.raises(SessionRefused):
            await asking[0]
    else:
        assert text_of(await collect(gateway, asks(session_id="s"))) == "hello"
        assert await asking[0] == ()


@pytest.mark.parametrize("forget", [False, True])
async def test_a_session_can_be_closed_during_its_first_preparation(
    bundle: TokenizerBundle, monkeypatch: pytest.MonkeyPatch, forget: bool
) -> None:
    """The worker never learns of the session."""
    gateway, engine = serve(bundle, answers(*encode(bundle, "hello")))
    closing = SessionCommand(
        operation="close", call_id="c", tenant="", session_id="s", forget=forget
    )
    closed: list[object] = []

    async def ask(command: SessionCommand) -> SessionAnswer:
        return SessionAnswer(call_id="c", failure=SessionFailure.NOT_FOUND, message="none")

    monkeypatch.setattr(engine, "call", ask)
    prepare = gateway._prepare

    async def prepared_late(*arguments: Any) -> Any:
        closed.append(await gateway.sessions("toy", closing))
        return await prepare(*arguments)

    monkeypatch.setattr(gateway, "_prepare", prepared_late)
    events = await collect(gateway, asks(session_id="s"))
    assert text_of(events) == "hello"
    assert closed == [()]
    (submitted,) = engine.submitted
    assert (submitted.session_id, submitted.is_kept) == ("", not forget)
    assert gateway._running_answers == {}
    with pytest.raises(SessionRefused):
        await gateway.sessions("toy", closing)

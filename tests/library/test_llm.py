from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import LLM
from holdfast.errors import (
    ConfigError,
    InvalidRequest,
    ModelLoadError,
    PromptTooLong,
    SessionFailure,
    SessionRefused,
    WorkerUnavailable,
)
from holdfast.library.llm import GenerationOptions
from holdfast.worker.engine import mlx_lm_hooks
from tests.fakes.adapters import write_adapter
from tests.fakes.server_process import environment, served_model_folder
from tests.fakes.tiny_models import write_tiny

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        served_model_folder(), settings={"scheduler.max_running": 4, "scheduler.max_queued": 4}
    ) as made:
        yield made


def test_a_prompt_gives_an_answer(llm: LLM) -> None:
    answer = llm.generate("Hello", max_tokens=6, temperature=0, ignore_eos=True)
    assert answer.finish_reason == "length"
    assert answer.completion_tokens == len(answer.token_ids) == 6
    assert str(answer) == answer.text


@pytest.mark.slow
def test_prompts_beyond_the_queues_size_are_answered_in_order(llm: LLM) -> None:
    prompts = [f"number {index}" for index in range(20)]
    answers = llm.generate(prompts, max_tokens=5, temperature=0)
    assert [answer.text for answer in answers] == [
        llm.generate(prompt, max_tokens=5, temperature=0).text for prompt in prompts
    ]


def test_prompts_may_be_token_ids_or_missing(llm: LLM) -> None:
    single = llm.generate([5, 6, 7], max_tokens=3, temperature=0)
    several = llm.generate([[5, 6, 7], [8]], max_tokens=3, temperature=0)
    assert several[0].token_ids == single.token_ids
    assert several[1].prompt_tokens == 1
    assert llm.generate([]) == []


def test_an_embedding_has_length_one(llm: LLM) -> None:
    whole = llm.embed("Hello")
    assert len(whole) == llm.info.embedding_dimensions
    assert sum(value * value for value in whole) == pytest.approx(1, abs=1e-5)
    texts = ["Hello", *(f"number {index}" for index in range(20)), "Hello there"]
    vectors = llm.embed(texts)  # more than the queue takes
    assert len(vectors) == len(texts)
    assert vectors[0] == pytest.approx(whole, abs=1e-5)
    short = llm.embed("Hello", dimensions=8, pooling="mean")
    assert [value / short[0] for value in short] == pytest.approx(
        [value / whole[0] for value in whole[:8]], abs=1e-3
    )
    assert llm.embed([]) == []
    assert llm.embed([5, 6, 7], pooling="last") != pytest.approx(
        llm.embed([5, 6, 7], pooling="mean"), abs=1e-3
    )


def test_a_text_that_cannot_be_embedded_is_named(llm: LLM) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.embed(["a", "b " * llm.info.context_tokens])
    assert refused.value.field == "texts.1"
    with pytest.raises(InvalidRequest, match="mean, last"):
        llm.embed("a", pooling="cls")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unknown options: temperature"):
        llm.embed("a", temperature=0)  # type: ignore[call-overload]


def test_a_text_is_a_user_message_and_a_stream_has_the_same_text(llm: LLM) -> None:
    whole = llm.chat(HELLO, temperature=0, max_tokens=30)
    assert llm.chat("Hello", temperature=0, max_tokens=30).text == whole.text
    for asked in ("Hello", HELLO):
        with llm.stream_chat(asked, temperature=0, max_tokens=30) as stream:
            assert "".join(stream) == whole.text
            assert stream.completion.token_ids == whole.token_ids


def test_a_seed_repeats_an_answer(llm: LLM) -> None:
    draws = [
        llm.generate("Hello", max_tokens=12, temperature=1.5, seed=seed).token_ids
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_a_stop_string_ends_the_answer(llm: LLM) -> None:
    plain = llm.generate("Hello", max_tokens=20, temperature=0, ignore_eos=True)
    stop = plain.text[5:7]
    stopped = llm.generate("Hello", max_tokens=20, temperature=0, ignore_eos=True, stop=stop)
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_logprobs_are_returned_on_request(llm: LLM) -> None:
    answer = llm.generate("Hello", max_tokens=3, temperature=0, top_logprobs=2, ignore_eos=True)
    assert len(answer.logprobs) == 3
    assert all(len(token.top) == 2 and token.logprob <= 0 for token in answer.logprobs)


def test_leaving_a_stream_stops_the_work(llm: LLM) -> None:
    before = llm.statistics().cancelled
    with llm.stream("Hello", max_tokens=4000, ignore_eos=True) as stream:
        next(stream)
    assert llm.statistics().cancelled == before + 1
    assert stream.completion.finish_reason == "cancelled"


def test_threads_share_the_model(llm: LLM) -> None:
    texts: list[str] = []

    def ask() -> None:
        texts.append(llm.generate("Hello", max_tokens=8, temperature=0).text)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4
    assert len(set(texts)) == 1


def test_bad_options_are_refused_before_any_work(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        llm.generate("Hello", temperature=-1)
    with pytest.raises(TypeError, match="max_token"):
        llm.generate("Hello", max_token=3)  # type: ignore[call-overload]


def test_long_prompts_lose_their_middle_on_request() -> None:
    with LLM(served_model_folder(), settings={"model.context_tokens": 256}) as small:
        with pytest.raises(PromptTooLong, match='"truncation": "middle"'):
            small.generate([7] * 300, max_tokens=1)
        with pytest.raises(InvalidRequest, match="'disabled' or 'middle'"):
            small.chat("Hello", truncation="end")  # type: ignore[arg-type]
        answer = small.chat([*HELLO * 60], max_tokens=4, truncation="middle")
        assert answer.left_out is not None
        assert answer.left_out.messages > 0
        assert answer.prompt_tokens <= 256 - 4
        assert small.chat(HELLO, max_tokens=4, truncation="middle").left_out is None


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model with two adapters, which change its answers."""
    root = tmp_path_factory.mktemp("adapters")
    listed = []
    for seed, name in enumerate(("sql", "tone")):
        model, _ = mlx_lm_hooks.mlx_lm_utils().load_model(served_model_folder())
        listed.append(f"{name}={write_adapter(root / name, model, seed=seed, scale=16.0)}")
    with LLM(served_model_folder(), settings={"model.adapters": listed}) as made:
        yield made


def test_an_adapter_is_chosen_with_each_request(adapted: LLM) -> None:
    question = "What is the code of the shed? " * 20
    answers = {}
    for name in ("", "sql", "tone"):
        answers[name] = adapted.chat(question, max_tokens=16, temperature=0, adapter=name)
        assert answers[name].cached_tokens == 0  # each has its own KV
        streamed = adapted.stream_chat(question, max_tokens=16, temperature=0, adapter=name)
        assert streamed.read_all().text == answers[name].text
        assert streamed.completion.cached_tokens > 0
    assert len({answer.text for answer in answers.values()}) == 3
    plain = adapted.chat(question, max_tokens=16, temperature=0)
    assert plain.token_ids == answers[""].token_ids
    assert plain.cached_tokens > 0
    both = adapted.generate([[5, 6, 7], [8]], max_tokens=4, temperature=0, adapter="sql")
    assert [each.prompt_tokens for each in both] == [3, 1]
    assert adapted.embed("Hello", adapter="sql") != adapted.embed("Hello")


def test_an_adapter_has_its_own_sessions(adapted: LLM) -> None:
    adapted.generate("Hello " * 50, max_tokens=2, session_id="a", adapter="sql")
    assert [each.session_id for each in adapted.sessions(adapter="sql").list()] == ["a"]
    assert adapted.sessions().list() == ()
    with pytest.raises(SessionRefused, match="sql, tone"):
        adapted.sessions(adapter="poem").list()


def test_an_unknown_adapter_is_refused_with_the_known_ones(llm: LLM, adapted: LLM) -> None:
    with pytest.raises(InvalidRequest, match="sql, tone") as caught:
        adapted.generate("Hello", adapter="sqll")
    assert caught.value.field == "adapter"
    with pytest.raises(InvalidRequest, match="sql, tone"):
        adapted.embed("Hello", adapter="sqll")
    with pytest.raises(InvalidRequest, match="none"):
        llm.chat("Hello", adapter="sql")


def test_kv_bits_are_chosen_with_each_request(llm: LLM) -> None:
    text = "The ferry left at noon with two goats on deck. " * 20
    for kv_bits in ("native", "8", 4):
        first = llm.generate(text, max_tokens=4, temperature=0, kv_bits=kv_bits)
        again = llm.generate(text, max_tokens=4, temperature=0, kv_bits=kv_bits)
        assert first.cached_tokens == 0  # each form has its own cache
        assert again.cached_tokens > 0
    with pytest.raises(InvalidRequest, match="'auto', 'native', '8', '8/4'") as caught:
        llm.generate(text, kv_bits="3")  # type: ignore[call-overload]
    assert caught.value.field == "kv_bits"


def test_a_missing_model_and_a_bad_setting_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nothing-here"):
        LLM(tmp_path / "nothing-here")
    with pytest.raises(ConfigError, match="layout"):
        LLM(served_model_folder(), settings={"model.layout": "columns"})


def test_a_closed_model_refuses_requests() -> None:
    llm = LLM(served_model_folder())
    llm.close()
    llm.close()
    with pytest.raises(WorkerUnavailable):
        llm.generate("Hello", max_tokens=1)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "del llm", "llm.close()"])
def test_a_script_that_forgets_to_close_still_ends(end: str) -> None:
    script = f"""
from holdfast import LLM
from holdfast.library.llm import GenerationOptions
llm = LLM({str(served_model_folder())!r})
stream = llm.stream("Hello", max_tokens=4000, ignore_eos=True)
next(stream)
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_sessions_are_opened_forked_exported_and_closed(llm: LLM, tmp_path: Path) -> None:
    sessions, text = (
        llm.sessions(tenant="one"),
        "The ferry left at noon with two goats on deck. " * 10,
    )
    first = llm.generate(text, max_tokens=4, temperature=0, session_id="a", tenant="one")
    (found,) = sessions.list()
    assert (found.session_id, found.requests, found.kept_tokens) == ("a", 1, found.tokens)
    assert sessions.fork("a", "b").forked_from == "a"
    assert sessions.update("b", metadata={"k": "v"}).metadata == {"k": "v"}
    assert llm.sessions().list() == ()

    sessions.export_to(tmp_path / "file", "b")
    there = llm.sessions(tenant="two")
    assert there.import_from(tmp_path / "file", "c").kept_tokens == found.tokens
    again = llm.generate(text, max_tokens=4, temperature=0, session_id="c", tenant="two")
    assert (again.text, again.cached_tokens) == (first.text, first.prompt_tokens - 1)
    for name in ("a", "b"):
        sessions.close(name, forget=True)
    assert llm.generate(text, max_tokens=1, tenant="one").cached_tokens == 0
    with pytest.raises(SessionRefused) as refused:
        sessions.get("a")
    assert refused.value.failure is SessionFailure.NOT_FOUND


def test_the_next_turn_of_a_chat_continues_after_the_answer(llm: LLM) -> None:
    """Also if the tokenizer would split the answer differently, as is usual at high temperature."""
    for seed in range(6):
        options = GenerationOptions(
            max_tokens=12, temperature=2.0, seed=seed, tenant=f"turn {seed}"
        )
        asked = llm.chat(HELLO, **options)
        after = llm.chat([*HELLO, {"role": "assistant", "content": asked.text}, *HELLO], **options)
        assert after.cached_tokens >= asked.prompt_tokens + len(asked.token_ids) - 1, asked.text
    assert llm._bundle.known_answers.put_back_answers > 0


def test_new_weights_at_the_same_path_use_no_old_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny(folder, "llama", seed=1)
    prompt = list(range(3, 90))

    def ask() -> tuple[tuple[int, ...], int]:
        with LLM(folder, settings={"store.folder": str(tmp_path / "store")}) as llm:
            answer = llm.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True)
            return answer.token_ids, answer.cached_tokens

    first, again = ask(), ask()
    assert again == (first[0], len(prompt) - 1)
    write_tiny(folder, "llama", seed=2)
    other = ask()
    assert other[1] == 0
    assert other[0] != first[0]
    write_tiny(folder, "llama", seed=1)
    assert ask() == again

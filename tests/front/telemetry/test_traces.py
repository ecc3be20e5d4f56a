"""Requests as traces, sent to a listening collector."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from holdfast.errors import ConfigError, GenerationFailed
from holdfast.front.application import create_application
from holdfast.front.output import ChoiceFinished, TextDelta
from holdfast.front.server.services import Telemetry
from holdfast.front.telemetry.traces import open_traces
from holdfast.wire.events import CacheOutcome, CacheReport, FinishReason, Timings
from tests.fakes.http_clients import CHAT, chat_body
from tests.fakes.scripted_gateway import Script, ScriptedGateway, scripted_services

otlp = pytest.importorskip("tests.fakes.otlp_collector", reason="needs the extra otel")
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
END = ChoiceFinished(
    index=0,
    reason=FinishReason.STOP,
    prompt_tokens=7,
    completion_tokens=2,
    timings=Timings(queue_seconds=1e-5, prefill_seconds=2e-5, decode_seconds=3e-5),
    cache_report=CacheReport(
        outcome=CacheOutcome.NEW_TOKENS, ram_tokens=3, disk_tokens=1, lookup_seconds=5e-6
    ),
)
ANSWER: list[TextDelta | ChoiceFinished] = [TextDelta(index=0, text="hi", token_ids=(1, 2)), END]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with otlp.collector() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        yield made


async def ask(
    *requests: tuple[str, str],
    headers: dict[str, str] | None = None,
    script: Script = ANSWER,
    **fields: Any,
) -> list[int]:
    """The statuses of requests to a server with traces, which is then stopped."""
    traces = open_traces("1.2.3")
    app = create_application(
        replace(scripted_services(ScriptedGateway(script)), telemetry=Telemetry(traces=traces))
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8321"
    ) as client:
        answers = [
            await client.request(
                method,
                path,
                json=chat_body(**fields) if method == "POST" else None,
                headers=headers,
            )
            for method, path in requests
        ]
    traces.close()
    return [answer.status_code for answer in answers]


async def test_a_request_is_a_trace_of_its_parts(collector: Any) -> None:
    assert await ask(("POST", CHAT), temperature=0.5, max_tokens=9) == [200]
    names = ["intake", "queue", "lookup", "prefill", "decode", f"POST {CHAT}"]
    assert sorted(span.name for span in collector.spans) == sorted(names)
    root, queue = collector.named(f"POST {CHAT}"), collector.named("queue")
    assert {
        collector.named(name).parent_span_id for name in ("intake", "queue", "prefill", "decode")
    } == {root.span_id}
    assert collector.named("lookup").parent_span_id == queue.span_id
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    for span in collector.spans:
        assert (
            root.start_time_unix_nano
            <= span.start_time_unix_nano
            <= span.end_time_unix_nano
            <= root.end_time_unix_nano
        )
    lengths = [
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1000
        for span in map(collector.named, names[1:5])
    ]
    assert lengths == pytest.approx([10, 5, 20, 30], abs=1)
    assert collector.services == {"holdfast"}


async def test_spans_contain_prefilled_cached_and_generated_tokens(collector: Any) -> None:
    await ask(("POST", CHAT), headers={"X-Session-ID": "s"}, temperature=0.5, max_tokens=9)
    said = otlp.attributes(collector.named(f"POST {CHAT}"))
    usage = {
        name.removeprefix("gen_ai.usage."): value
        for name, value in said.items()
        if name.startswith("gen_ai.usage.")
    }
    assert usage == {
        "input_tokens": 7,
        "output_tokens": 2,
        "cache_read.input_tokens": 4,
        "reasoning.output_tokens": 0,
    }
    assert (said["gen_ai.operation.name"], said["gen_ai.request.model"]) == ("chat", "demo/tiny")
    assert (said["gen_ai.request.temperature"], said["gen_ai.request.max_tokens"]) == (0.5, 9)
    assert [each.string_value for each in said["gen_ai.response.finish_reasons"].values] == ["stop"]
    assert said["gen_ai.conversation.id"] == "s"
    assert (said["http.response.status_code"], said["http.route"]) == (200, CHAT)
    assert otlp.attributes(collector.named("prefill"))["holdfast.read_tokens"] == 3
    assert otlp.attributes(collector.named("lookup"))["holdfast.cache.outcome"] == "new_tokens"
    everything = " ".join(str(span) for span in collector.spans)
    assert "hello" not in everything, "nothing of what was said is told"


async def test_an_interrupted_answer_has_only_known_figures(collector: Any) -> None:
    assert await ask(("POST", CHAT), script=[*ANSWER[:1], GenerationFailed("it broke")]) == [500]
    said = otlp.attributes(collector.named(f"POST {CHAT}"))
    assert said["gen_ai.usage.input_tokens"] == 7
    assert not {
        "gen_ai.usage.cache_read.input_tokens",
        "holdfast.cached_tokens",
        "gen_ai.response.finish_reasons",
    } & {*said}


async def test_a_prompt_without_generation_lacks_a_decode_span(collector: Any) -> None:
    await ask(("POST", CHAT), script=[msgspec.structs.replace(END, completion_tokens=0)])
    assert "decode" not in {span.name for span in collector.spans}


async def test_the_clients_trace_is_continued(collector: Any) -> None:
    await ask(("POST", CHAT), headers={"traceparent": PARENT})
    root = collector.named(f"POST {CHAT}")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (
        PARENT.split("-")[1],
        PARENT.split("-")[2],
    )


async def test_an_unsampled_trace_gets_no_spans(collector: Any) -> None:
    await ask(("POST", CHAT), headers={"traceparent": PARENT[:-1] + "0"})
    assert collector.spans == []


async def test_a_refused_request_is_one_span_and_polls_are_none(collector: Any) -> None:
    assert await ask(("POST", CHAT), ("GET", "/health"), temperature=-1) == [400, 200]
    (span,) = collector.spans
    assert otlp.attributes(span)["error.type"] == "invalid_value"
    assert span.status.code == 0, "a refusal is the client's error"


async def test_an_unknown_path_is_not_a_route(collector: Any) -> None:
    assert await ask(("GET", "/nowhere/4711")) == [404]
    (span,) = collector.spans
    assert span.name == "GET other"
    assert "http.route" not in otlp.attributes(span)


async def test_the_environment_names_the_service(
    collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "lighthouse")
    await ask(("GET", "/v1/models"))
    assert collector.services == {"lighthouse"}


async def test_an_unresponsive_collector_delays_nothing(
    collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.front.telemetry.traces.CLOSE_SECONDS", 0.01)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    collector.may_answer.clear()
    assert await ask(*[("GET", "/v1/models")] * 20) == [200] * 20
    assert collector.asked.wait(60)


async def test_a_missing_collector_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.front.telemetry.traces.CLOSE_SECONDS", 0.01)
    with otlp.collector() as gone:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", gone.url)
    assert await ask(("GET", "/v1/models"), ("POST", CHAT)) == [200, 200]


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install -c constraints.txt '\.\[otel\]'"):
        open_traces("1.2.3")

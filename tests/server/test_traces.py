"""A server with traces: a collector gets its clients' requests, and without one the server still
stops in time.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.fakes.server_process import ServerProcess, until

otlp = pytest.importorskip("tests.fakes.otlp_collector", reason="needs the extra otel")


@pytest.mark.slow
def test_a_collector_gets_the_spans_of_the_server(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with otlp.collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        server = ServerProcess(str(model_folder), "--traces", "--store", "off")
        server.wait_ready()
        try:
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
            until(lambda: len(collector.spans) >= 6, "the spans of a request")
            collector.may_answer.clear()
            httpx.get(f"{server.url}/v1/models", timeout=60)
        finally:
            assert server.stop() == 0, server.log()
    usage, said = answer["usage"], otlp.attributes(collector.named("POST /v1/chat/completions"))
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    decode, prefill = collector.named("decode"), collector.named("prefill")
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano < decode.end_time_unix_nano

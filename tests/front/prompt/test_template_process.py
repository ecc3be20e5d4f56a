"""Too expensive templates are ended wherever they loop, and others continue."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from jinja2 import TemplateError

from holdfast.errors import ModelLoadError, RenderingUnavailable, TemplateOverrun
from holdfast.front.prompt import template_process
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.template_process import RenderProcesses, SandboxedTemplate
from holdfast.front.prompt.tokenizer_bundle import load_tokenizer_bundle
from holdfast.front.request import ChatPrompt
from tests.fakes.server_process import children_running, until
from tests.fakes.slow import slow
from tests.fakes.tiny_models import write_tokenizer

ENDLESS = """
{%- macro again(depth) -%}
  {%- for _ in range(100000) -%}{%- if depth < 50 -%}{{- again(depth + 1) -}}{%- endif -%}{%- endfor -%}
{%- endmacro -%}
{{- again(0) -}}
"""
NESTED_RANGES = """
{%- for a in range(100000) -%}{%- for b in range(100000) -%}{%- for c in range(100000) -%}
{%- endfor -%}{%- endfor -%}{%- endfor -%}
"""
DOUBLED = """
{%- set ns = namespace(text='ab') -%}
{%- for _ in range(64) -%}{%- set ns.text = ns.text + ns.text -%}{%- endfor -%}
{{- ns.text|length -}}
"""
SHARED = """
{%- set ns = namespace(value=['x']) -%}
{%- for _ in range(30) -%}{%- set ns.value = [ns.value, ns.value, ns.value] -%}{%- endfor -%}
{{- ns.value|tojson -}}
"""
HOSTILE = {
    "macros that call each other for ever": ENDLESS,
    "a string that is doubled": DOUBLED,
    "a constant that is computed while it is compiled": "{{ ('a' * 3000000000)|length }}",
}
MORE_HOSTILE = {
    "lists within lists that share their content": SHARED,
    "a product of lists": "{{ ((messages[0].role[0] * 10000000)|list + [1]) * 1000 }}",
    "a power": "{{ (messages|length + 9) ** (10 ** 10) > 1 }}",
    "nested loops": NESTED_RANGES,
    "a repeated string": "{{ (messages[0].role[0] * 3000000000)|length }}",
    "a format's width": "{{ '%2000000000d' % messages|length }}",
    "a width for format": "{{ '{:2000000000d}'.format(messages|length) }}",
    "a join": "{% set x = messages[0].role[0] * 100000 %}{{ (x * 100).join(x|list)|length }}",
    "a replacement": "{% set x = messages[0].role[0] * 100000 %}{{ x.replace(x[0], x)|length }}",
}
PROMPT = ChatPrompt(messages=({"role": "user", "content": "Hi"},))
GOOD = "{% for message in messages %}{{ message.content }}{% endfor %}"
BUSY = "{% for i in range(99999) %}{% for j in range(4) %}{% endfor %}{% endfor %}"
SLOW = "{% if messages[0].content == 'Hi' %}" + BUSY + "{% endif %}" + GOOD
PICKY = "{% if messages[0].content == 'loop' %}" + NESTED_RANGES + "{% endif %}" + GOOD


@pytest.fixture(autouse=True)
def short_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    processes = RenderProcesses(cpu_seconds=0.3)
    monkeypatch.setattr(template_process, "PROCESSES", processes)
    yield
    processes.close()


@pytest.mark.parametrize("case", [*HOSTILE, *slow(*MORE_HOSTILE)])
def test_a_too_expensive_template_is_stopped_and_the_next_rendered(case: str) -> None:
    source = (HOSTILE | MORE_HOSTILE)[case]
    with pytest.raises(TemplateOverrun, match="chat template 'default'"):
        SandboxedTemplate("default", source).render({"messages": PROMPT.messages})
    assert SandboxedTemplate("default", GOOD).render({"messages": PROMPT.messages}) == "Hi"


def test_an_endless_range_is_refused_like_in_the_sandbox() -> None:
    with pytest.raises(Exception, match="Range too big"):
        SandboxedTemplate("default", "{% for i in range(10 ** 9) %}x{% endfor %}").render({})


def test_a_too_expensive_template_fails_the_load_during_probing() -> None:
    with pytest.raises(TemplateOverrun, match="took longer"):
        ChatTemplate({"default": ENDLESS}, special_tokens={})


@pytest.mark.slow
@pytest.mark.parametrize("templates", [1, 4])
def test_hanging_templates_delay_no_other_template(templates: int) -> None:
    hostile = [
        ChatTemplate({"default": PICKY + "x" * number}, special_tokens={})
        for number in range(templates)
    ]
    innocent = ChatTemplate({"default": GOOD}, special_tokens={})
    endless = ChatPrompt(messages=({"role": "user", "content": "loop"},))

    def until_stopped(number: int) -> None:
        with suppress(RenderingUnavailable), pytest.raises(TemplateOverrun, match="took longer"):
            hostile[number % templates].render(endless)

    with ThreadPoolExecutor(16) as threads:
        hanging = [threads.submit(until_stopped, number) for number in range(16)]
        while not all(each.done() for each in hanging):
            assert innocent.render(PROMPT) == "Hi"
    for each in hanging:
        each.result()


def test_a_render_that_waited_too_long_may_be_retried() -> None:
    template = ChatTemplate({"default": PICKY}, special_tokens={})
    endless = ChatPrompt(messages=({"role": "user", "content": "loop"},))
    with ThreadPoolExecutor(16) as threads:
        outcomes = [
            each.exception()
            for each in [threads.submit(template.render, endless) for _ in range(16)]
        ]
    assert {type(outcome) for outcome in outcomes} == {TemplateOverrun, RenderingUnavailable}
    waited = [str(outcome) for outcome in outcomes if isinstance(outcome, RenderingUnavailable)]
    assert all(
        "2 renders of one template and 8 in all run at once" in message for message in waited
    )
    assert template.render(PROMPT) == "Hi"


def test_a_failed_process_start_is_not_the_templates_fault() -> None:
    lowest_free = os.dup(0)  # the limit is on a descriptor's number, not on how many there are
    os.close(lowest_free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(
            RenderingUnavailable, match=r"'default' cannot be rendered now: .* could be started"
        ):
            SandboxedTemplate("default", GOOD)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert SandboxedTemplate("default", GOOD).render({"messages": PROMPT.messages}) == "Hi"


def test_too_deeply_nested_values_are_a_template_error() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(TemplateError, match="cannot be passed to the template"):
        SandboxedTemplate("default", GOOD).render({"messages": nested})


def test_a_module_in_the_current_folder_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("resource", "pickle", "jinja2"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('poisoned')")
    monkeypatch.chdir(tmp_path)
    assert SandboxedTemplate("default", GOOD).render({"messages": PROMPT.messages}) == "Hi"


def test_idle_processes_are_ended_except_one(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = RenderProcesses(idle_seconds=0.0)
    monkeypatch.setattr(template_process, "PROCESSES", processes)
    before = set(renderers())
    template = ChatTemplate({"default": SLOW}, special_tokens={})
    with ThreadPoolExecutor(2) as threads:
        rendered = threads.map(template.render, [PROMPT] * 2)
        until(lambda: len(set(renderers()) - before) == 2, "two processes render")
        assert list(rendered) == ["Hi"] * 2
    until(lambda: len(set(renderers()) - before) == 1, "only one process is left")
    assert template.render(PROMPT) == "Hi"
    processes.close()
    assert set(renderers()) - before == set()


def renderers() -> list[psutil.Process]:
    return children_running("holdfast.front.prompt.template_worker")


def test_an_externally_killed_process_is_replaced() -> None:
    template = SandboxedTemplate("default", GOOD)
    for child in renderers():
        child.kill()
        child.wait()
    assert template.render({"messages": PROMPT.messages}) == "Hi"


@pytest.mark.parametrize("characters", [10, 1_000_000])  # more than a pipe's capacity
def test_a_suspended_process_is_replaced(characters: int) -> None:
    template = SandboxedTemplate("default", "{{ messages[0].content }}")
    text = "x" * characters
    stopped = renderers()
    for child in stopped:
        child.suspend()
    with ThreadPoolExecutor(1) as pool:
        rendering = pool.submit(template.render, {"messages": [{"content": text}]})
        try:
            assert rendering.result(timeout=60) == text
        finally:
            for child in stopped:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


def test_a_model_with_a_too_expensive_template_is_not_loaded(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(ENDLESS)
    with pytest.raises(ModelLoadError, match="chat template 'default' took longer"):
        load_tokenizer_bundle(tmp_path)

"""Templates that take too much are ended, wherever they do it, and the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from holdfast.errors import ModelLoadError, TemplateOverrun
from holdfast.intake import template_process
from holdfast.intake.template import ChatTemplate
from holdfast.intake.template_process import RenderProcesses, SandboxedTemplate
from holdfast.intake.tokenizer_bundle import load_tokenizer_bundle
from holdfast.messages.requests import ChatPrompt
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
    "nested loops": NESTED_RANGES,
    "a string that is doubled": DOUBLED,
    "lists within lists that share their content": SHARED,
    "a constant that is computed while it is compiled": "{{ ('a' * 3000000000)|length }}",
    "a repeated string": "{{ (messages[0].role[0] * 3000000000)|length }}",
    "a product of lists": "{{ ((messages[0].role[0] * 10000000)|list + [1]) * 1000 }}",
    "a format's width": "{{ '%2000000000d' % messages|length }}",
    "a width for format": "{{ '{:2000000000d}'.format(messages|length) }}",
    "a power": "{{ (messages|length + 9) ** (10 ** 10) > 1 }}",
    "a join": "{% set x = messages[0].role[0] * 100000 %}{{ (x * 100).join(x|list)|length }}",
    "a replacement": "{% set x = messages[0].role[0] * 100000 %}{{ x.replace(x[0], x)|length }}",
}
PROMPT = ChatPrompt(messages=({"role": "user", "content": "Hi"},))
GOOD = "{% for message in messages %}{{ message.content }}{% endfor %}"
PICKY = "{% if messages[0].content == 'loop' %}" + NESTED_RANGES + "{% endif %}" + GOOD


@pytest.fixture(autouse=True)
def one_second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    processes = RenderProcesses(seconds=1.0)
    monkeypatch.setattr(template_process, "PROCESSES", processes)
    yield
    processes.close()


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_template_that_takes_too_much_is_stopped_by_name_and_the_next_is_rendered(source: str) -> None:
    with pytest.raises(TemplateOverrun, match="chat template 'default'"):
        SandboxedTemplate("default", source).render({"messages": PROMPT.messages})
    assert SandboxedTemplate("default", GOOD).render({"messages": PROMPT.messages}) == "Hi"


def test_a_range_without_end_is_refused_as_the_sandbox_does() -> None:
    with pytest.raises(Exception, match="Range too big"):
        SandboxedTemplate("default", "{% for i in range(10 ** 9) %}x{% endfor %}").render({})


def test_a_template_that_takes_too_much_while_it_is_probed_ends_the_load() -> None:
    with pytest.raises(TemplateOverrun, match="took longer"):
        ChatTemplate({"default": ENDLESS}, special_tokens={})


def test_a_template_that_hangs_on_one_conversation_holds_up_no_other() -> None:
    template = ChatTemplate({"default": PICKY}, special_tokens={})
    endless = ChatPrompt(messages=({"role": "user", "content": "loop"},))

    def until_stopped() -> None:
        with pytest.raises(TemplateOverrun):
            template.render(endless)

    with ThreadPoolExecutor(3) as threads:
        hanging = [threads.submit(until_stopped) for _ in range(3)]
        assert template.render(PROMPT) == "Hi"
    for each in hanging:
        each.result()


def test_a_process_that_was_ended_from_outside_is_replaced() -> None:
    template = SandboxedTemplate("default", GOOD)
    for child in psutil.Process().children():
        if "holdfast.intake.template_worker" in child.cmdline():
            child.kill()
            child.wait()
    assert template.render({"messages": PROMPT.messages}) == "Hi"


def test_a_model_whose_template_takes_too_much_is_not_loaded(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(ENDLESS)
    with pytest.raises(ModelLoadError, match="chat template 'default' took longer"):
        load_tokenizer_bundle(tmp_path)

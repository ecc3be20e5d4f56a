"""`format` is enforced with `think` on, off and unset in every family: JSON after the thought, if
there is one.
"""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from starlette.datastructures import Headers

from holdfast.config import LimitsSettings, ToolsSettings
from holdfast.front.ollama.generation import OllamaChat
from holdfast.front.prompt.prepare import prompt_text
from holdfast.front.server.access import Caller
from holdfast.front.server.context import RequestContext
from holdfast.front.structured.answer import answer_grammar
from holdfast.front.toolcalls.dialect import ReasoningFormat
from tests.fakes.family_bundles import bundle_of
from tests.fakes.family_templates import FAMILY_TEMPLATES
from tests.fakes.ollama_bodies import HELLO, directory_of
from tests.fakes.scripted_gateway import INFO, ScriptedGateway, scripted_services

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
RIGHT, WRONG = '{"name": "Ada"}', "Ada it is"
FRAMES = {  # of families that write an answer's text between markers
    "": [("", "")],
    "gpt_oss": [
        ("<|channel|>final<|message|>", ""),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>",
            "",
        ),
    ],
    "kimi_k3": [("<|open|>response<|sep|>", "<|close|>response<|sep|>")],
    "solar": [("<|content|>", "")],
}
CONTEXT = RequestContext(
    services=scripted_services(ScriptedGateway(), directory=directory_of()),
    headers=Headers({}),
    caller=Caller(),
    tenant="",
)


@pytest.mark.parametrize("family", FAMILY_TEMPLATES)
@pytest.mark.parametrize(
    "form", [PERSON, pytest.param("json", marks=pytest.mark.slow)], ids=["schema", "json"]
)
def test_the_format_is_enforced_after_the_thought(family: str, form: Any) -> None:
    model = bundle_of(family)
    tokenizer = LLTokenizer(model.tokenizer.backend.to_str(), eos_token=0)
    for think in (True, False, None):
        asked = OllamaChat.model_validate({"messages": HELLO, "format": form, "think": think})
        (request,), _ = asked.plan(CONTEXT)
        prompt = prompt_text(request, model, request.prompt, info=INFO)
        grammar = answer_grammar(
            request, model.dialect, prompt=prompt, limits=LimitsSettings(), tools=ToolsSettings()
        ).text

        compiled = LLMatcher(tokenizer, grammar, log_level=0)

        def takes(text: str, compiled: LLMatcher = compiled) -> bool:
            matcher = compiled.deep_copy()
            tokens = tokenizer.tokenize_str(text, parse_special=True)
            return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

        ways = [
            f"{thought}{before}%s{behind}"
            for thought in thoughts_of(model.dialect.reasoning)
            for before, behind in FRAMES.get(family, FRAMES[""])
        ]
        fitting = [way for way in ways if takes(way % RIGHT)]
        assert fitting, grammar
        for way in fitting:
            assert not takes(way % WRONG), way
            assert not takes(way % RIGHT + WRONG), way
            if form is PERSON:
                assert not takes(way % '{"name": 1}'), way
        if prompt.in_reasoning:
            assert not takes(RIGHT), (
                "JSON in the thought that the prompt has begun is no answer yet"
            )


def thoughts_of(reasoning: ReasoningFormat | None) -> list[str]:
    """Everything that may precede an answer: nothing, the rest of a thought, or a whole one."""
    return (
        [""]
        if reasoning is None
        else ["", f"hm{reasoning.end}", f"{reasoning.start}hm{reasoning.end}"]
    )

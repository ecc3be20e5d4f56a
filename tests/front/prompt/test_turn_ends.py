"""The end tokens found by rendering for each family, and whether answer readers obey them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.front.output import ChoiceFinished
from holdfast.front.prompt.dialects import find_dialect
from holdfast.front.prompt.tokenizer_bundle import load_tokenizer_bundle
from holdfast.front.prompt.turn_ends import find_turn_ends
from holdfast.wire.events import FinishReason
from tests.fakes.family_bundles import found_in
from tests.fakes.family_templates import FAMILY_TEMPLATES, FamilyTemplate, tokenizer_for
from tests.fakes.recorded_answers import TOOLS
from tests.fakes.told_answers import by_tokens, heard

_CHATML = {"<|im_end|>"}
_DEEPSEEK = {"<｜end▁of▁sentence｜>"}
# The tokens after an answer, and those after a call if they differ.
TURN_ENDS = {
    "apertus": {"<|assistant_end|>"},
    "apriel": {"<|end|>"},
    "cohere": {"<|END_OF_TURN_TOKEN|>"},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": _DEEPSEEK,
    "ernie": _CHATML,
    "exaone": _CHATML,
    "gemma4": {"<turn|>", "<|tool_response>"},
    "gigachat": {"<|message_sep|>"},
    "glm45": {"<|observation|>"},  # without an end token: the next turn begins
    "glm47": {"<|observation|>"},
    "gpt_oss": {"<|call|>"},
    "granite3_drops": {"<|end_of_text|>"},
    "hy3": {"</s>"},
    "kimi_k2": _CHATML,
    "kimi_k3": {"<|end_of_msg|>"},
    "lfm2": _CHATML,
    "lfm2_drops": _CHATML,
    "llama3": {"<|eot_id|>"},
    "minicpm5": _CHATML,
    "minimax_m1": {"<end_of_sentence>"},
    "minimax_m2": {"[e~["},
    "minimax_m3": {"[e~["},
    "mistral_v3": {"</s>", "[/INST]"},
    "mistral_v11": {"</s>", "[/INST]"},
    "mistral_v13": {"</s>", "[/INST]"},
    "nemotron3": _CHATML,
    "nemotron_v2": {"<SPECIAL_12>"},
    "phi4": {"<|end|>"},
    "qwen3": _CHATML,
    "qwen3_coder": _CHATML,
    "seed_oss": _CHATML,
    "solar": {"<|calls|>", "<|flush|>"},
}
# They also end a thought or precede a call, so they end an answer only if nothing follows.
MESSAGE_ENDS = {"solar": ("<|end|>",)}

_GIGACHAT_3 = FamilyTemplate(
    family="gigachat",
    turn=("{role}<|role_sep|>\n", "<|message_sep|>\n\n"),
    calls=("<|message_sep|>\n\nfunction call<|role_sep|>\n", ""),
    call='{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}',
    parallel=False,
)
_CALL = '{"name": "get_time", "arguments": {}}'


@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
def test_the_end_tokens_of_each_family_are_found(name: str) -> None:
    found, tokenizer = found_in(FAMILY_TEMPLATES[name])
    assert found.template is not None
    tokens = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
    ends = find_turn_ends(found.template, found.dialect, tokens=tokens)
    assert set(ends.turn) == TURN_ENDS[name]
    assert found.dialect.message_ends == MESSAGE_ENDS.get(name, ())


def test_end_tokens_that_a_models_files_declare_are_added(tmp_path: Path) -> None:
    family = FAMILY_TEMPLATES["kimi_k3"]
    backend = tokenizer_for(family.source, "<|stop|>").backend
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": family.source})
    )
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [backend.token_to_id("<|stop|>")]})
    )
    bundle = load_tokenizer_bundle(tmp_path)
    assert set(bundle.dialect.turn_ends) == {"<|end_of_msg|>", "</s>", "<|stop|>"}
    assert [*map(backend.id_to_token, bundle.turn_end_token_ids)] == ["<|end_of_msg|>"]


_SOLAR_THOUGHT = "<|think|>Hm.<|end|><|begin|>assistant"
_SOLAR_CALL = (
    "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>get_time<|tool_call:args|>{}"
    "<|tool_call:end|>"
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<|content|>Hello.<|end|><|begin|>user<|content|>And?", ["Hello."]),
        (
            _SOLAR_THOUGHT + "<|content|>Hello.<|end|><|begin|>user<|content|>And?",
            [("thought", "Hm."), "Hello."],
        ),
        (_SOLAR_THOUGHT + _SOLAR_CALL, [("thought", "Hm."), ("get_time", {}, ())]),
        ("<|content|>Hello.", ["Hello."]),
    ],
)
def test_message_ends_end_answers_unless_after_a_thought(text: str, says: list[object]) -> None:
    found, tokenizer = found_in(FAMILY_TEMPLATES["solar"])
    assert heard(by_tokens(tokenizer, found.dialect, TOOLS, text)) == says


@pytest.mark.parametrize("in_one_token", [True, False])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Hello.<|message_sep|>\n\nuser<|role_sep|>\nAnd?", ["Hello."]),
        (
            f"I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{_CALL}"
            "<|message_sep|>\n\nfunction result<|role_sep|>\n12",
            ["I look.", ("get_time", {}, ())],
        ),
        (
            f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_CALL}",
            [("get_time", {}, ())],
        ),
    ],
)
def test_an_answer_continues_with_a_call_after_a_message_end(
    text: str, says: list[object], in_one_token: bool
) -> None:
    """Even if the white space after a marker is part of its token."""
    tokenizer = _GIGACHAT_3.tokenizer()
    if in_one_token:
        tokenizer = tokenizer_for("", "<|message_sep|>\n\n", "<|role_sep|>\n")
    found = find_dialect(_GIGACHAT_3.template(), tokenizer, config={})
    assert found.report.proven
    assert found.dialect.message_ends == ("<|message_sep|>",)
    assert heard(by_tokens(tokenizer, found.dialect, TOOLS, text)) == says


def test_the_choice_ends_with_the_message_not_the_model() -> None:
    found, tokenizer = found_in(FAMILY_TEMPLATES["solar"])
    text = "<|content|>Hello.<|end|><|begin|>user"
    *_, last = by_tokens(tokenizer, found.dialect, (), text, reason=FinishReason.LENGTH)
    assert isinstance(last, ChoiceFinished)
    assert last.reason is FinishReason.STOP
    assert last.completion_tokens < len(tokenizer.encode(text, add_special_tokens=False))

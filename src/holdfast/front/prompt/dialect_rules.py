"""By which words in a chat template, and which tokens, a family of models is known.

What comes first is looked at first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from holdfast.front.toolcalls.dialect import ReasoningFormat
from holdfast.front.toolcalls.markers import in_vocabulary


class FamilyRule(NamedTuple):
    """A family, the words that its templates have all of, and those that they have none of."""

    family: str
    words: tuple[str, ...]
    without: tuple[str, ...] = ()

    def fits(self, text: str) -> bool:
        """Whether a template, or a list of tokens, is one of this family's."""
        return all(word in text for word in self.words) and not any(
            word in text for word in self.without
        )


# Markers that only one family has come before those that many have. A template may fit several
# rules: the proof decides.
FAMILY_RULES: Final = (
    FamilyRule("minimax_m3", ("]<]minimax[>[",)),
    FamilyRule("minimax_m2", ("<minimax:tool_call>",)),
    FamilyRule("kimi_k3", ("<|open|>", "<|sep|>")),
    FamilyRule("kimi_k2", ("<|tool_calls_section_begin|>",)),
    FamilyRule("gemma4", ("<|tool_call>", "<tool_call|>")),
    FamilyRule("deepseek_v4", ("｜DSML｜", "tool_calls>"), ("function_calls>",)),
    FamilyRule("deepseek_v3_2", ("｜DSML｜",)),
    FamilyRule("deepseek_v4", ("｜DSML｜",)),
    FamilyRule("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    FamilyRule("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    FamilyRule("muse_spark", ("<atem:",)),
    FamilyRule("harmony", ("<|channel|>", "<|start|>")),
    FamilyRule("cohere", ("<|START_ACTION|>",)),
    FamilyRule("command_r_plus", ("Action:", "tool_name")),
    FamilyRule("seed_oss", ("<seed:tool_call>",)),
    FamilyRule("seed_oss", ("seed:tool_call",)),
    FamilyRule("hy3", ("tool_sep", "arg_key")),
    FamilyRule("glm47", ("<arg_key>",)),
    FamilyRule("glm45", ("<arg_key>",)),
    FamilyRule("ling3", ("<arg_key>",)),
    FamilyRule("mistral_v11", ("[TOOL_CALLS]", "[CALL_ID]")),
    FamilyRule("mistral_v13", ("[TOOL_CALLS]", "[ARGS]")),
    FamilyRule("mistral_v3", ("[TOOL_CALLS]",)),
    FamilyRule("lfm2", ("<|tool_call_start|>",)),
    FamilyRule("lfm2", ("<|tool_list_start|>",)),
    FamilyRule("lfm2", ("List of tools: [",)),
    FamilyRule("solar", ("<|tool_call:begin|>",)),
    FamilyRule("apertus", ("<|tools_prefix|>",)),
    FamilyRule("gigachat", ("<|function_call|>",)),
    FamilyRule("gigachat", ("function call", "<|role_sep|>")),
    FamilyRule("nemotron", ("<TOOLCALL>",)),
    FamilyRule("minicpm5", ('<function name="', '<param name="')),
    FamilyRule("qwen3_coder", ("<function=", "<parameter=")),
    FamilyRule("step3_5", ("<function=", "<parameter=")),
    FamilyRule("functionary_v31", ("<function=",)),
    FamilyRule("functionary_v32", (">>>",)),
    FamilyRule("phi4", ("<|tool_call|>", "<|/tool_call|>")),
    FamilyRule("phi4", ("functools[",)),
    FamilyRule("granite3", ("<|tool_call|>",)),
    FamilyRule("apriel", ("<tool_calls>[",)),
    FamilyRule("minimax_m1", ("<tool_calls>",)),
    FamilyRule("hermes", ("<tool_call>",)),
    FamilyRule("llama3_json", ("<|python_tag|>",)),
    FamilyRule("llama3_json", ("Environment: ipython",)),
    FamilyRule("llama3_json", ('"parameters":', "<|start_header_id|>")),
)

BY_PARSER_TYPE: Final[Mapping[str, str]] = {
    "json_tools": "hermes",
    "gemma4": "gemma4",
    "glm47": "glm47",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "laguna": "glm47",
    "minicpm5": "minicpm5",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral_v13",
    "muse_spark": "muse_spark",
    "pythonic": "lfm2",
    "qwen3_coder": "qwen3_coder",
}
"""The key `tool_parser_type` of tokenizer_config.json, as mlx-lm writes it."""

BY_MODEL_TYPE: Final[Mapping[str, str]] = {
    "gpt_oss": "harmony",
    "deepseek_v3_2": "deepseek_v3_2",
    "granite": "granite3",
    "granitemoe": "granite3",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
    "minimax_m2": "minimax_m2",
    "phi3": "phi4",
    "qwen2": "hermes",
    "qwen3": "hermes",
    "seed_oss": "seed_oss",
}
"""Looked at last: a type of model does not tell its templates apart."""

REASONING_FORMATS: Final = (
    ReasoningFormat(start="<|channel>thought\n", end="<channel|>"),
    ReasoningFormat(start="<|open|>think<|sep|>", end="<|close|>think<|sep|>"),
    ReasoningFormat(start="<seed:think>", end="</seed:think>"),
    ReasoningFormat(start="<mm:think>", end="</mm:think>"),
    ReasoningFormat(start="<longcat_think>", end="</longcat_think>"),
    ReasoningFormat(start="<|think:start|>", end="<|think:end|>"),
    ReasoningFormat(start="<|START_THINKING|>", end="<|END_THINKING|>"),
    ReasoningFormat(start="<|inner_prefix|>", end="<|inner_suffix|>"),
    ReasoningFormat(start="[THINK]", end="[/THINK]"),
    ReasoningFormat(start="◁think▷", end="◁/think▷"),
    ReasoningFormat(start="<think>", end="</think>"),
    ReasoningFormat(start="<|think|>", end="<|end|>"),
    ReasoningFormat(start="Here are my reasoning steps:", end="[BEGIN FINAL RESPONSE]"),
    ReasoningFormat(start="Here is my thought process:", end="Here is my response:"),
)
"""Markers of thoughts, those of one family before those of many."""


SILENT_MARKS: Final = (
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|START_TEXT|>",
    "<|END_TEXT|>",
    "<response>",
    "</response>",
    "<answer>",
    "</answer>",
    "[END FINAL RESPONSE]",
)
"""Stand around visible text and say nothing; counted as such where they are tokens."""
FRAMES: Final = (("<answer>", "</answer>"),)
"""Stand as ordinary text around the whole visible answer of models whose templates name them:
Hunyuan A13B.
"""
SILENT_BY_FAMILY: Final[Mapping[str, tuple[str, ...]]] = {"functionary_v32": (">>>all",)}


ENDS_BY_FAMILY: Final[Mapping[str, tuple[str, ...]]] = {
    "harmony": ("<|call|>", "<|return|>"),
    "gemma4": ("<|tool_response>",),
    "llama3_json": ("<|eom_id|>",),
}
"""Tokens that end an answer, which models converted by others do not always name as ends: they
would invent the result too.
"""


def families_for(
    source: str, tokens: Collection[str], *, parser_type: str, model_type: str
) -> Iterator[str]:
    """Families that a model may be of, the most likely first, each once.

    source: the template that is used with tools. tokens: the tokenizer's added ones.
    """
    seen: set[str] = set()
    for family in _all_families(source, tokens, parser_type, model_type):
        if family and family not in seen:
            seen.add(family)
            yield family


def _all_families(
    source: str, tokens: Collection[str], parser_type: str, model_type: str
) -> Iterator[str]:
    vocabulary = "\n".join(tokens)
    yield BY_PARSER_TYPE.get(parser_type, "")
    yield from (rule.family for rule in FAMILY_RULES if rule.fits(source))
    # Templates that make their markers of variables, or name none.
    yield from (rule.family for rule in FAMILY_RULES if rule.fits(vocabulary))
    yield BY_MODEL_TYPE.get(model_type, "")


def reasoning_for(
    source: str, tokens: Collection[str], *, shown: str = ""
) -> ReasoningFormat | None:
    """The markers of thoughts: named by a template, written by it, or a pair of tokens though it
    names none.

    shown: a conversation as the template renders it, up to where an answer begins. Some build their
    markers from parts, so that the source holds none of them.
    """
    formats = [in_vocabulary(each, (each.start,), tokens) for each in REASONING_FORMATS]
    named = (each for each in formats if each.end in source and each.start.strip() in source)
    written = (each for each in formats if _is_written(each, shown))
    paired = (each for each in formats if each.end in tokens and _first_token(each.start, tokens))
    # R1's template only cuts thoughts out
    half = (each for each in formats if each.start == "<think>" and each.end in source)
    return next(named, None) or next(written, None) or next(paired, None) or next(half, None)


def _is_written(reasoning: ReasoningFormat, shown: str) -> bool:
    """Whether a rendered conversation holds a whole thought, or ends with the beginning of one."""
    start = reasoning.start.strip()
    return shown.rstrip().endswith(start) or (start in shown and reasoning.end in shown)


def frame_for(source: str, tokens: Collection[str]) -> tuple[str, str]:
    """What stands in text around every answer, named by the template; empty where it is tokens or
    there is none.
    """
    named = (
        frame for frame in FRAMES if all(mark in source and mark not in tokens for mark in frame)
    )
    return next(named, ("", ""))


def _first_token(marker: str, tokens: Collection[str]) -> bool:
    return any(marker.startswith(token) for token in tokens)

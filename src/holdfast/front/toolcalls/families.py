"""The families of tool calls: how each one writes a call, and what its templates are known by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.front.toolcalls.call_format import CallFormat
from holdfast.front.toolcalls.channels import Channels, KimiK3
from holdfast.front.toolcalls.json_calls import JsonCalls, NamedJson
from holdfast.front.toolcalls.literal_calls import BracedCalls, PythonCalls
from holdfast.front.toolcalls.nested_tags import KeyValueTags, NestedTags
from holdfast.front.toolcalls.tagged_parameters import TaggedParameters

_BARS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
_V31 = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"
_V11 = "[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]"
_V13 = "[TOOL_CALLS]{name}[ARGS]"

JSON_FAMILIES: Final[Mapping[str, CallFormat]] = {
    # an object with a name and arguments
    "hermes": JsonCalls(wrapper=("<tool_call>\n", "\n</tool_call>")),
    "mistral_v3": JsonCalls(
        section=("[TOOL_CALLS]", ""), array=True, between=", ", id_key="id", id_form="alnum9"
    ),
    # a name between markers, then an object
    "mistral_v11": NamedJson(head=_V11, heads_too=(_V13,), id_form="alnum9"),
    "mistral_v13": NamedJson(head=_V13, heads_too=(_V11,), id_form="alnum9"),
    "llama3_json": JsonCalls(
        section=("", ""),
        pairs_too=(("<|python_tag|>", ""),),
        between="; ",
        arguments_key="parameters",
    ),
    "nemotron": JsonCalls(section=("<TOOLCALL>", "</TOOLCALL>"), array=True, between=", "),
    "granite3": JsonCalls(
        section=("<|tool_call|>", ""),
        pairs_too=(("<tool_call>", "</tool_call>"),),
        array=True,
        between=", ",
    ),
    "apriel": JsonCalls(
        section=("<tool_calls>", "</tool_calls>"), array=True, between=", ", id_key="id"
    ),
    "minimax_m1": JsonCalls(section=("<tool_calls>\n", "\n</tool_calls>")),
    "phi4": JsonCalls(
        section=("<|tool_call|>", "<|/tool_call|>"),
        pairs_too=(("functools", ""),),
        array=True,
        between=", ",
    ),
    "cohere": JsonCalls(
        section=("<|START_ACTION|>", "<|END_ACTION|>"),
        array=True,
        between=", ",
        name_key="tool_name",
        arguments_key="parameters",
        id_key="tool_call_id",
        id_form="number",
    ),
    "command_r_plus": JsonCalls(
        section=("Action: ```json\n", "\n```"),
        pairs_too=(("Action:```json", "```"), ("Action:\n```json", "```")),
        array=True,
        between=", ",
        name_key="tool_name",
        arguments_key="parameters",
    ),
    "apertus": JsonCalls(
        section=("<|tools_prefix|>", "<|tools_suffix|>"), array=True, between=", ", name_is_key=True
    ),
    "gigachat": JsonCalls(
        wrapper=("<|function_call|>", ""), pairs_too=(("function call<|role_sep|>\n", ""),)
    ),
    "kimi_k2": NamedJson(
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        head="<|tool_call_begin|>{id}<|tool_call_argument_begin|>",
        close="<|tool_call_end|>",
        id_form="function_number",
    ),
    "deepseek_v3": NamedJson(
        section=_BARS, head=_V3, heads_too=(_V31,), close="\n```<｜tool▁call▁end｜>", between="\n"
    ),
    "deepseek_v31": NamedJson(
        section=_BARS, head=_V31, heads_too=(_V3,), close="<｜tool▁call▁end｜>"
    ),
    "solar": NamedJson(
        head="<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>",
        close="<|tool_call:end|>",
        id_form="client",
    ),
    "functionary_v31": NamedJson(head="<function={name}>", close="</function>"),
    "functionary_v32": NamedJson(head=">>>{name}\n"),
}


def _function_tags(wrapper: str, *, padding: str = "", between: str = "\n") -> TaggedParameters:
    """`<function=NAME>` and `<parameter=KEY>` in a wrapper for each call."""
    return TaggedParameters(
        wrapper=(f"<{wrapper}>\n", f"\n</{wrapper}>"), padding=padding, between=between
    )


def _invoke_tags(
    space: str, section: str, *, sections_too: tuple[str, ...] = ()
) -> TaggedParameters:
    """`<invoke name="NAME">` and `<parameter name="KEY">` in one section for all calls; `space`
    stands before each word.
    """
    return TaggedParameters(
        section=(f"<{space}{section}>\n", f"\n</{space}{section}>"),
        sections_too=tuple((f"<{space}{other}>", f"</{space}{other}>") for other in sections_too),
        call=(f'<{space}invoke name="', '">\n', f"</{space}invoke>"),
        parameter=(f'<{space}parameter name="', '">', f"</{space}parameter>\n"),
    )


def _dsml(section: str, *others: str) -> TaggedParameters:
    """DeepSeek's own words for `_invoke_tags`; each parameter says whether it is a string or JSON."""
    space = "｜DSML｜"
    tags = _invoke_tags(space, section, sections_too=others)
    return TaggedParameters(
        section=tags.section,
        sections_too=tags.sections_too,
        call=tags.call,
        parameter=(f'<{space}parameter name="', ">", f"</{space}parameter>\n"),
        types=('" string="true"', '" string="false"'),
        tokens=(space,),
    )


_ATEM: Final = _invoke_tags("atem:", "function_calls")

MARKUP_FAMILIES: Final[Mapping[str, CallFormat]] = {
    # a name, then tagged parameters
    # and Qwen 3.5 to 3.8, Nemotron 3, Granite 4.2
    "qwen3_coder": _function_tags("tool_call", padding="\n"),
    "step3_5": _function_tags("tool_call", padding="\n", between=""),
    "seed_oss": _function_tags("seed:tool_call"),
    "minimax_m2": _invoke_tags("", "minimax:tool_call"),
    "minimax_m3": NestedTags(),
    "deepseek_v3_2": _dsml("function_calls", "tool_calls", " calls"),
    "deepseek_v4": _dsml("tool_calls", " calls", "function_calls"),
    "minicpm5": TaggedParameters(
        call=('<function name="', '">', "</function>"),
        parameter=('<param name="', '">', "</param>"),
        cdata=True,
    ),
    # pairs of key and value
    "glm45": KeyValueTags(
        name_end="\n",
        key=("<arg_key>", "</arg_key>\n"),
        value=("<arg_value>", "</arg_value>\n"),
        between="\n",
    ),
    "glm47": KeyValueTags(),  # and GLM 5, Laguna, Spark 2.5
    "ling3": KeyValueTags(
        name_end="\n",
        key=("<arg_key>", "</arg_key>\n"),
        call=("<tool_call>", "\n</tool_call>"),
        between="\n",
    ),
    "hy3": KeyValueTags(
        section=("<tool_calls>\n", "\n</tool_calls>"),
        name_end="<tool_sep>\n",
        key=("<arg_key>", "</arg_key>\n"),
        value=("<arg_value>", "</arg_value>\n"),
        between="\n",
    ),
    "lfm2": PythonCalls(),
    "gemma4": BracedCalls(),
    # channels
    "harmony": Channels(),
    "kimi_k3": KimiK3(),
    "muse_spark": Channels(
        channel="",
        constrain="",
        ends=("<|eom|>", "<|eot|>"),
        prefix="",
        reasoning=frozenset({"self"}),
        calls=_ATEM,
        written="<|start|>assistant to={name}<|message|>{arguments}<|eom|>",
    ),
}


FAMILIES: Final[Mapping[str, CallFormat]] = {**JSON_FAMILIES, **MARKUP_FAMILIES}
"""By the family's name."""

READ_TOO: Final[Mapping[str, tuple[str, ...]]] = {
    "hermes": ("qwen3_coder",),
    "mistral_v3": ("mistral_v13",),
    "mistral_v11": ("mistral_v3",),
    "mistral_v13": ("mistral_v3",),
}
"""Families whose calls are read where a family's own are expected: models of one line mix them up.
"""

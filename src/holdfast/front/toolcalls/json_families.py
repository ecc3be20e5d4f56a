"""The families that write calls as JSON: a family is a line here. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.front.toolcalls.call_format import CallFormat
from holdfast.front.toolcalls.json_calls import JsonCalls
from holdfast.front.toolcalls.named_json import NamedJson

_BARS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
_V31 = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"
_V11 = "[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]"
_V13 = "[TOOL_CALLS]{name}[ARGS]"
_TOOL_CALLS = JsonCalls(section=("<tool_calls>", "</tool_calls>"), array=True, between=", ")

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
    "hunyuan": _TOOL_CALLS,
    "jamba": _TOOL_CALLS,
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
    "internlm": JsonCalls(
        wrapper=("<|action_start|><|plugin|>\n", "<|action_end|>"),
        pairs_too=(("<|action_start|> <|plugin|>", "<|action_end|>"),),
        arguments_key="parameters",
    ),
    "xlam": JsonCalls(
        pairs_too=(("<tool_call>", "</tool_call>"), ("[TOOL_CALLS]", "")),
        array=True,
        between=", ",
        id_key="",
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

"""The families that write calls in markup of their own, not as JSON: a family is a line here.

Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.front.toolcalls.braced_calls import BracedCalls
from holdfast.front.toolcalls.call_format import CallFormat
from holdfast.front.toolcalls.channels import Channels
from holdfast.front.toolcalls.key_value_tags import KeyValueTags
from holdfast.front.toolcalls.kimi_k3 import KimiK3
from holdfast.front.toolcalls.nested_tags import NestedTags
from holdfast.front.toolcalls.python_calls import PythonCalls
from holdfast.front.toolcalls.tagged_parameters import TaggedParameters


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


def _pairs(prefix: str = "", *, line: str = "", **more: str) -> KeyValueTags:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`; `line`
    stands behind each of them.
    """
    return KeyValueTags(
        call=(f"<{prefix}tool_call>", f"</{prefix}tool_call>"),
        name_end=line,
        key=(f"<{prefix}arg_key>", f"</{prefix}arg_key>{line}"),
        value=(f"<{prefix}arg_value>", f"</{prefix}arg_value>{line}"),
        between=line,
    )


_ATEM: Final = _invoke_tags("atem:", "function_calls")

MARKUP_FAMILIES: Final[Mapping[str, CallFormat]] = {
    # a name, then tagged parameters
    # and Qwen 3.5 to 3.8, Nemotron 3, Granite 4.2
    "qwen3_coder": _function_tags("tool_call", padding="\n"),
    "step3_5": _function_tags("tool_call", padding="\n", between=""),
    "mimo_v2": _function_tags("tool_call"),
    "seed_oss": _function_tags("seed:tool_call"),
    "minimax_m2": _invoke_tags("", "minimax:tool_call"),
    "minimax_m3": NestedTags(),
    "deepseek_v3_2": _dsml("function_calls", "tool_calls", " calls"),
    "deepseek_v4": _dsml("tool_calls", " calls", "function_calls"),
    "cohere_a_plus": TaggedParameters(
        section=("<cofl:tool_calls>", "</cofl:tool_calls>"),
        call=('<cofl:tool_call id="{id}" name="', '">', "</cofl:tool_call>"),
        parameter=('<cofl:tool_param name="', ">", "</cofl:tool_param>"),
        types=('" string="true"', '" string="false"'),
        between="",
        id_form="number",
    ),
    "step3": TaggedParameters(
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        wrapper=("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
        call=('<steptml:invoke name="', '">', "</steptml:invoke>"),
        parameter=('<steptml:parameter name="', '">', "</steptml:parameter>"),
        between="",
        tokens=("<｜tool_call_begin｜>", "<｜tool_sep｜>"),
    ),
    "minicpm5": TaggedParameters(
        call=('<function name="', '">', "</function>"),
        parameter=('<param name="', '">', "</param>"),
        cdata=True,
    ),
    # pairs of key and value
    "glm45": _pairs(line="\n"),
    "glm47": _pairs(),  # and GLM 5, Laguna, Spark 2.5
    "ling3": KeyValueTags(
        name_end="\n",
        key=("<arg_key>", "</arg_key>\n"),
        call=("<tool_call>", "\n</tool_call>"),
        between="\n",
    ),
    "longcat": _pairs("longcat_", line="\n"),
    "hy3": KeyValueTags(
        section=("<tool_calls>\n", "\n</tool_calls>"),
        name_end="<tool_sep>\n",
        key=("<arg_key>", "</arg_key>\n"),
        value=("<arg_value>", "</arg_value>\n"),
        between="\n",
    ),
    # Python
    # Llama 3.2 and 4, ToolACE
    "pythonic": PythonCalls(wrapper_too=("<|python_start|>", "<|python_end|>")),
    "lfm2": PythonCalls(wrapper=("<|tool_call_start|>", "<|tool_call_end|>")),
    "olmo3": PythonCalls(
        wrapper=("<function_calls>", "</function_calls>"), brackets=("", ""), between="\n"
    ),
    # braces
    "gemma4": BracedCalls(),
    "function_gemma": BracedCalls(
        wrapper=("<start_function_call>", "<end_function_call>"), quote="<escape>"
    ),
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

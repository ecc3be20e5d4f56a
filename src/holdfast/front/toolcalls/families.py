"""The families of tool calls. Each family is one record, from which its reader, its writer, its
grammar and its recognition are derived.

To add a family that uses a known mechanism, add a record. FAMILIES is also the order in which
families are tried: markers that only one family uses come before those that many families use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from holdfast.front.toolcalls.call_format import CallFormat
from holdfast.front.toolcalls.channels import Channels, KimiK3
from holdfast.front.toolcalls.json_calls import JsonCalls, NamedJson
from holdfast.front.toolcalls.literal_calls import BracedCalls, PythonCalls
from holdfast.front.toolcalls.nested_tags import KeyValueTags, NestedTags
from holdfast.front.toolcalls.tagged_parameters import TaggedParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the models of a family write calls, and how they are recognized.

    words: groups of words. A chat template that contains all words of one group may belong to the
        family. The default is the first call start of the family's calls.
    aliases: further names of the family: mlx-lm's `tool_parser_type`, and model types.
    also_read: families whose calls are read as well, because models of this family write them, too.
    silent_markers: meaningless markers before visible text.
    end_tokens: tokens that end an answer. Converted models do not always declare these tokens and
        would then continue after a call and invent its result.
    """

    calls: CallFormat
    words: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[str, ...] = ()
    also_read: tuple[str, ...] = ()
    silent_markers: tuple[str, ...] = ()
    end_tokens: tuple[str, ...] = ()

    def fits(self, text: str) -> bool:
        """Whether a template, or a list of tokens, may belong to this family."""
        groups = self.words or ((self.calls.call_starts[0],),)
        return any(all(word in text for word in group) for group in groups)


def families_for(
    source: str, tokens: Collection[str], *, parser_type: str, model_type: str
) -> tuple[str, ...]:
    """Return the names of the families that a model may belong to, the most likely first.

    source: the chat template that is used with tools. tokens: the tokenizer's added tokens. They
    are searched too, because some templates build their markers from variables or contain none.
    """
    vocabulary = "\n".join(tokens)
    candidates = (
        *_families_named(parser_type),
        *(name for name, family in FAMILIES.items() if family.fits(source)),
        *(name for name, family in FAMILIES.items() if family.fits(vocabulary)),
        # comes last, because models of one type have different templates
        *_families_named(model_type),
    )
    return tuple(dict.fromkeys(candidates))


def _families_named(name: str) -> Iterator[str]:
    """The families that have this name or alias."""
    return (
        family_name
        for family_name, family in FAMILIES.items()
        if name == family_name or name in family.aliases
    )


def _function_tags(wrapper: str, *, padding: str = "", between: str = "\n") -> TaggedParameters:
    """`<function=NAME>` and `<parameter=KEY>` in a wrapper around each call."""
    return TaggedParameters(
        wrapper=(f"<{wrapper}>\n", f"\n</{wrapper}>"), padding=padding, between=between
    )


def _invoke_tags(
    prefix: str, section: str, *, other_sections: tuple[str, ...] = ()
) -> TaggedParameters:
    """`<invoke name="NAME">` and `<parameter name="KEY">` in one section around all calls.

    prefix: text before the name of each tag.
    """
    return TaggedParameters(
        section=(f"<{prefix}{section}>\n", f"\n</{prefix}{section}>"),
        other_sections=tuple(
            (f"<{prefix}{other}>", f"</{prefix}{other}>") for other in other_sections
        ),
        call=(f'<{prefix}invoke name="', '">\n', f"</{prefix}invoke>"),
        parameter=(f'<{prefix}parameter name="', '">', f"</{prefix}parameter>\n"),
    )


def _dsml(section: str, *others: str) -> TaggedParameters:
    """DeepSeek's `_invoke_tags`, in which each parameter's tag marks it as a string or JSON."""
    prefix = "｜DSML｜"
    return replace(
        _invoke_tags(prefix, section, other_sections=others),
        parameter=(f'<{prefix}parameter name="', ">", f"</{prefix}parameter>\n"),
        types=('" string="true"', '" string="false"'),
        tokens=(prefix,),
    )


_DEEPSEEK_SECTION: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_V3: Final = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
_DEEPSEEK_V31: Final = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"
_MISTRAL_V11: Final = "[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]"
_MISTRAL_V13: Final = "[TOOL_CALLS]{name}[ARGS]"
_GLM_WORDS: Final = (("<arg_key>",),)
_FUNCTION_WORDS: Final = (("<function=", "<parameter="),)

FAMILIES: Final[Mapping[str, Family]] = {
    "minimax_m3": Family(calls=NestedTags(), words=(("]<]minimax[>[",),)),
    "minimax_m2": Family(calls=_invoke_tags("", "minimax:tool_call")),
    "kimi_k3": Family(calls=KimiK3(), words=(("<|open|>", "<|sep|>"),)),
    "kimi_k2": Family(
        calls=NamedJson(
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            head="<|tool_call_begin|>{id}<|tool_call_argument_begin|>",
            close="<|tool_call_end|>",
            id_form="function_number",
        )
    ),
    "gemma4": Family(
        calls=BracedCalls(),
        words=(("<|tool_call>", "<tool_call|>"),),
        end_tokens=("<|tool_response>",),
    ),
    "deepseek_v4": Family(
        calls=_dsml("tool_calls", " calls", "function_calls"), words=(("｜DSML｜", "tool_calls>"),)
    ),
    "deepseek_v3_2": Family(
        calls=_dsml("function_calls", "tool_calls", " calls"), words=(("｜DSML｜",),)
    ),
    "deepseek_v3": Family(
        calls=NamedJson(
            section=_DEEPSEEK_SECTION,
            head=_DEEPSEEK_V3,
            other_heads=(_DEEPSEEK_V31,),
            close="\n```<｜tool▁call▁end｜>",
            between="\n",
        ),
        words=((_DEEPSEEK_SECTION[0], "```json"),),
    ),
    "deepseek_v31": Family(
        calls=NamedJson(
            section=_DEEPSEEK_SECTION,
            head=_DEEPSEEK_V31,
            other_heads=(_DEEPSEEK_V3,),
            close="<｜tool▁call▁end｜>",
        )
    ),
    "muse_spark": Family(
        calls=Channels(
            channel="",
            constrain="",
            ends=("<|eom|>", "<|eot|>"),
            prefix="",
            reasoning=frozenset({"self"}),
            calls=_invoke_tags("atem:", "function_calls"),
        ),
        words=(("<atem:",),),
    ),
    "harmony": Family(
        calls=Channels(),
        words=(("<|channel|>", "<|start|>"),),
        aliases=("gpt_oss",),
        end_tokens=("<|call|>", "<|return|>"),
    ),
    "cohere": Family(
        calls=JsonCalls(
            section=("<|START_ACTION|>", "<|END_ACTION|>"),
            array=True,
            name_key="tool_name",
            arguments_key="parameters",
            id_key="tool_call_id",
            id_form="number",
        )
    ),
    "command_r_plus": Family(
        calls=JsonCalls(
            section=("Action: ```json\n", "\n```"),
            other_pairs=(("Action:```json\n", "\n```"), ("Action:\n```json\n", "\n```")),
            array=True,
            name_key="tool_name",
            arguments_key="parameters",
        ),
        words=(("Action:", "tool_name"),),
    ),
    "seed_oss": Family(calls=_function_tags("seed:tool_call"), words=(("seed:tool_call",),)),
    "hy3": Family(
        calls=KeyValueTags(
            section=("<tool_calls>\n", "\n</tool_calls>"),
            name_end="<tool_sep>\n",
            key=("<arg_key>", "</arg_key>\n"),
            value=("<arg_value>", "</arg_value>\n"),
            between="\n",
        ),
        words=(("tool_sep", "arg_key"),),
    ),
    # also GLM 5, Laguna, Spark 2.5
    "glm47": Family(calls=KeyValueTags(), words=_GLM_WORDS, aliases=("laguna",)),
    "glm45": Family(
        calls=KeyValueTags(
            name_end="\n",
            key=("<arg_key>", "</arg_key>\n"),
            value=("<arg_value>", "</arg_value>\n"),
            between="\n",
        ),
        words=_GLM_WORDS,
    ),
    "ling3": Family(
        calls=KeyValueTags(
            name_end="\n",
            key=("<arg_key>", "</arg_key>\n"),
            call=("<tool_call>", "\n</tool_call>"),
            between="\n",
        ),
        words=_GLM_WORDS,
    ),
    "mistral_v11": Family(
        calls=NamedJson(head=_MISTRAL_V11, other_heads=(_MISTRAL_V13,), id_form="alnum9"),
        words=(("[TOOL_CALLS]", "[CALL_ID]"),),
        also_read=("mistral_v3",),
    ),
    "mistral_v13": Family(
        calls=NamedJson(head=_MISTRAL_V13, other_heads=(_MISTRAL_V11,), id_form="alnum9"),
        words=(("[TOOL_CALLS]", "[ARGS]"),),
        aliases=("mistral",),
        also_read=("mistral_v3",),
    ),
    "mistral_v3": Family(
        calls=JsonCalls(section=("[TOOL_CALLS]", ""), array=True, id_key="id", id_form="alnum9"),
        also_read=("mistral_v13",),
    ),
    "lfm2": Family(
        calls=PythonCalls(),
        words=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)),
        aliases=("pythonic", "lfm2_moe"),
    ),
    "solar": Family(
        calls=NamedJson(
            section=("<|tool_calls|>", ""),
            head="<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>",
            close="<|tool_call:end|>",
            id_form="client",
            text="<|content|>",
        ),
        words=(("<|tool_call:begin|>",),),
        # the template writes <|end|> after past answers; the model itself ends with these
        end_tokens=("<|calls|>", "<|flush|>"),
    ),
    "apertus": Family(
        calls=JsonCalls(
            section=("<|tools_prefix|>", "<|tools_suffix|>"), array=True, name_is_key=True
        )
    ),
    "gigachat": Family(
        calls=JsonCalls(
            wrapper=("<|function_call|>", ""), other_pairs=(("function call<|role_sep|>\n", ""),)
        ),
        words=(("<|function_call|>",), ("function call", "<|role_sep|>")),
    ),
    "nemotron": Family(calls=JsonCalls(section=("<TOOLCALL>", "</TOOLCALL>"), array=True)),
    "minicpm5": Family(
        calls=TaggedParameters(
            call=('<function name="', '">', "</function>"),
            parameter=('<param name="', '">', "</param>"),
            cdata=True,
        ),
        words=(('<function name="', '<param name="'),),
    ),
    # also Qwen 3.5 to 3.8, Nemotron 3, Granite 4.2
    "qwen3_coder": Family(calls=_function_tags("tool_call", padding="\n"), words=_FUNCTION_WORDS),
    "step3_5": Family(
        calls=_function_tags("tool_call", padding="\n", between=""), words=_FUNCTION_WORDS
    ),
    "functionary_v31": Family(calls=NamedJson(head="<function={name}>", close="</function>")),
    "functionary_v32": Family(calls=NamedJson(head=">>>{name}\n"), silent_markers=(">>>all",)),
    "phi4": Family(
        calls=JsonCalls(
            section=("<|tool_call|>", "<|/tool_call|>"),
            other_pairs=(("functools", ""),),
            array=True,
        ),
        words=(("<|tool_call|>", "<|/tool_call|>"), ("functools[",)),
        aliases=("phi3",),
    ),
    "granite3": Family(
        calls=JsonCalls(
            section=("<|tool_call|>", ""),
            other_pairs=(("<tool_call>", "</tool_call>"),),
            array=True,
        ),
        aliases=("granite", "granitemoe"),
    ),
    "apriel": Family(
        calls=JsonCalls(section=("<tool_calls>", "</tool_calls>"), array=True, id_key="id"),
        words=(("<tool_calls>[",),),
    ),
    "minimax_m1": Family(calls=JsonCalls(section=("<tool_calls>\n", "\n</tool_calls>"))),
    "hermes": Family(
        calls=JsonCalls(wrapper=("<tool_call>\n", "\n</tool_call>")),
        aliases=("json_tools", "qwen2", "qwen3"),
        also_read=("qwen3_coder",),
    ),
    "llama3_json": Family(
        calls=JsonCalls(
            other_pairs=(("<|python_tag|>", ""),), between="; ", arguments_key="parameters"
        ),
        words=(
            ("<|python_tag|>",),
            ("Environment: ipython",),
            ('"parameters":', "<|start_header_id|>"),
        ),
        end_tokens=("<|eom_id|>",),
    ),
}
"""The families by name."""

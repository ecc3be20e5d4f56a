"""Small chat templates like those of the model families, and tokenizers with their markers."""

# Whole turns are in one line each.
# ruff: noqa: E501

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import AddedToken

from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenize import Tokenizer
from tests.fakes import toy_tokenizers

_CHATML = ("<|im_start|>{role}\n", "<|im_end|>\n")
_TURNS = ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")
_ROLES = ("<|{role}|>\n", "\n")
_MARKER = re.compile(
    r"<[/|｜]?[^\s<>=\"'{}]{2,40}[|｜]?>|\[/?[A-Z_]{3,20}\]|\][<\[~][^\s]{2,16}\[>?\[|\]~b\]|\[e~\[|<\|\"\|>"
)


def _newline_kept(text: str) -> str:
    """Jinja removes a newline after a block."""
    return "{{ '\\n' }}" + text[1:] if text.startswith("\n") else text


@dataclass(frozen=True, kw_only=True)
class FamilyTemplate:
    """A template and its expected properties.

    The parts are Jinja; `call` sees `c` (name, arguments) and `loop`.
    """

    family: str
    call: str
    turn: tuple[str, str] = _CHATML
    calls: tuple[str, str] = ("", "")  # around all calls of a turn
    result: str = "<tool_response>\n{{ m.content }}\n</tool_response>"
    results_in: str = "user"  # the role of their turn
    assistant: str = "assistant"
    text: tuple[str, str] = ("", "")  # around the text of an answer
    thought: tuple[str, str] = ("", "")
    # Jinja that writes its markers, if the source does not contain them
    thought_written: tuple[str, str] = ("", "")
    always_thinks: bool = False  # writes a thought's markers even if there is none
    opening: str = ""  # after the header of an answer
    before: str = ""  # before everything; may refuse the conversation
    tools: str = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    kept: bool = True
    parallel: bool = True
    ids: str = "random"
    plain_markers: bool = False  # its markers are not tokens

    @property
    def source(self) -> str:
        """The whole template."""
        first, last = self.turn

        def turn(role: str, content: str) -> str:
            return first.format(role=role) + content + last.replace("{role}", role)

        before, call, behind = (
            _newline_kept(each) for each in (self.calls[0], self.call, self.calls[1])
        )
        calls = (
            f"{{% if m.tool_calls %}}{before}{{% for call in m.tool_calls %}}{{% set c = "
            f"call.function %}}{call}{{% endfor %}}{behind}{{% endif %}}"
        )
        start, end = self.thought_written if self.thought_written[0] else self.thought
        thought = f"{start}{{{{ m.reasoning_content or '' }}}}{end}"
        if not self.always_thinks:
            thought = f"{{% if m.reasoning_content %}}{thought}{{% endif %}}"
        said = "{{ m.content }}"
        if self.text[0]:
            said = f"{{% if m.content %}}{self.text[0]}{said}{self.text[1]}{{% endif %}}"
        answer = turn(
            self.assistant,
            (thought if self.thought[0] else "") + said + (calls if self.kept else ""),
        )
        named = f"{{# {self.calls[0]}{self.call}{self.thought[0]}{self.thought[1]} #}}".replace(
            "{%", ""
        ).replace("%}", "")
        return (
            self.before
            + ("" if self.kept else re.sub(r"[{}]{2}", "", named))
            + "{% if tools %}"
            + turn("system", self.tools)
            + "{% endif %}"
            + "{% for m in messages %}{% if m.role == 'tool' %}"
            + turn(self.results_in, self.result)
            + "{% elif m.role == 'assistant' %}"
            + answer
            + "{% else %}"
            + turn("{{ m.role }}", "{{ m.content }}")
            + "{% endif %}{% endfor %}"
            + "{% if add_generation_prompt %}"
            + first.format(role=self.assistant).rstrip(" ")
            + self.opening
            + "{% endif %}"
        )

    def template(self) -> ChatTemplate:
        """Compiled."""
        return ChatTemplate(
            {"default": self.source}, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}
        )

    def tokenizer(self) -> Tokenizer:
        """Byte-level, with a token for each marker in the template."""
        return tokenizer_for("" if self.plain_markers else self.source)


def tokenizer_for(source: str, *more: str) -> Tokenizer:
    """A byte-level tokenizer with an added token for everything in a template that looks like a
    marker.

    Those of the form <|…|> are special, as in most models; others are shown.
    """
    backend = toy_tokenizers.byte_level(
        special=("</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"), shown=()
    )
    found = dict.fromkeys([*_MARKER.findall(source), *more])
    backend.add_special_tokens(
        [
            AddedToken(each, special=True, normalized=False)
            for each in found
            if each.startswith(("<|", "<｜"))
        ]
    )
    backend.add_tokens(
        [AddedToken(each, normalized=False) for each in found if not each.startswith(("<|", "<｜"))]
    )
    return Tokenizer(
        backend,
        config={"eos_token": "</s>"},
        eos_token_ids=[backend.token_to_id(e) for e in ("<|im_end|>", "<|eot_id|>")],
    )


_JSON = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
_COMMA = "{% if not loop.last %}, {% endif %}"
_NEWLINE = "{{ '' if loop.last else '\\n' }}"
_THINK = ("<think>\n", "\n</think>\n\n")
_STRING_OR_JSON = "{{ v if v is string else v | tojson }}"
_TOGGLE = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
_OPENED = (
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% "
    "endif %}"
)


def _parameters(one: str) -> str:
    return (
        "{% for k, v in c.arguments | items %}"
        + one.replace("VALUE", _STRING_OR_JSON)
        + "{% endfor %}"
    )


def _refuse(condition: str, why: str) -> str:
    return (
        f"{{% for m in messages %}}{{% if {condition} %}}{{{{ raise_exception('{why}') }}}}{{% "
        "endif %}{% endfor %}"
    )


_FUNCTION = (
    "<tool_call>\n<function={{ c.name }}>\n"
    + _parameters("<parameter={{ k }}>\nVALUE\n</parameter>\n")
    + "</function>\n</tool_call>"
    + _NEWLINE
)
_DSML = (
    '<｜DSML｜invoke name="{{ c.name }}">\n'
    + _parameters(
        '<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">VALUE</｜DSML｜parameter>\n'
    )
    + "</｜DSML｜invoke>"
    + _NEWLINE
)
_IDS_OF_NINE = _refuse(
    "m.tool_call_id is defined and m.tool_call_id | length != 9", "ids have 9 letters"
)
_BRACES = (
    '{% macro lit(v, q) %}{% if v is string %}{{ q }}{{ v }}{{ q }}{% elif v is boolean %}{{ "true" if v else "false" }}'
    "{% elif v is mapping %}{ {%- for k, x in v | items %}{{ k }}:{{ lit(x, q) }}{% if not "
    "loop.last %},{% endif %}{% endfor %}}"
    "{% elif v is iterable %}[{% for x in v %}{{ lit(x, q) }}{% if not loop.last %},{% endif %}{% "
    "endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)

FAMILY_TEMPLATES = {
    "qwen3": FamilyTemplate(
        family="hermes",
        call=f"<tool_call>\n{_JSON}\n</tool_call>{_NEWLINE}",
        thought=_THINK,
        opening=_TOGGLE,
    ),
    "exaone": FamilyTemplate(
        family="hermes", call=f"<tool_call>{_JSON}</tool_call>{_NEWLINE}", plain_markers=True
    ),
    "ernie": FamilyTemplate(
        family="hermes",
        call=f"{{{{ '\\n' }}}}<tool_call>\n{_JSON}\n</tool_call>\n",
        thought=_THINK,
        opening="<think>\n",
    ),
    "qwen3_coder": FamilyTemplate(family="qwen3_coder", call=_FUNCTION),
    "nemotron3": FamilyTemplate(
        family="qwen3_coder", call=_FUNCTION, thought=_THINK, opening=_OPENED
    ),
    "seed_oss": FamilyTemplate(
        family="seed_oss",
        call=_FUNCTION.replace("tool_call>", "seed:tool_call>")
        .replace("\nVALUE\n", "VALUE")
        .replace(">\n" + _STRING_OR_JSON + "\n<", ">" + _STRING_OR_JSON + "<"),
        thought=("<seed:think>", "</seed:think>"),
        opening="{% if thinking_budget == 0 %}<seed:think></seed:think>{% elif thinking_budget %}{{ thinking_budget }}{% endif %}",
    ),
    "mistral_v3": FamilyTemplate(
        family="mistral_v3",
        turn=("[INST] ", "[/INST]"),
        calls=("[TOOL_CALLS][", "]</s>"),
        call='{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}, "id": "{{ call.id }}"}'
        + _COMMA,
        result='[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]',
        before=_IDS_OF_NINE,
        ids="alnum9",
    ),
    "mistral_v11": FamilyTemplate(
        family="mistral_v11",
        turn=("[INST]", "[/INST]"),
        calls=("", "</s>"),
        call="[TOOL_CALLS]{{ c.name }}[CALL_ID]{{ call.id }}[ARGS]{{ c.arguments | tojson }}",
        result="[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]",
        before=_IDS_OF_NINE,
        ids="alnum9",
    ),
    "mistral_v13": FamilyTemplate(
        family="mistral_v13",
        turn=("[INST]", "[/INST]"),
        calls=("", "</s>"),
        call="[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}",
        result="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
        thought=("[THINK]", "[/THINK]"),
        ids="alnum9",
    ),
    "llama3": FamilyTemplate(
        family="llama3_json",
        turn=_TURNS,
        call='{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}',
        results_in="ipython",
        result="{{ m.content | tojson }}",
        before=_refuse(
            "m.tool_calls is defined and m.tool_calls | length > 1", "one call at a time"
        )
        + "{# Environment: ipython #}",
        parallel=False,
    ),
    "lfm2": FamilyTemplate(
        family="lfm2",
        calls=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        call="{{ c.name }}("
        + _parameters("{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}")
        + ")"
        + _COMMA,
        results_in="tool",
    ),
    "lfm2_drops": FamilyTemplate(
        family="lfm2",
        calls=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        call="",
        results_in="tool",
        kept=False,
    ),
    "glm45": FamilyTemplate(
        family="glm45",
        turn=_ROLES,
        call="{{ '\\n' }}<tool_call>{{ c.name }}\n"
        + _parameters("<arg_key>{{ k }}</arg_key>\n<arg_value>VALUE</arg_value>\n")
        + "</tool_call>",
        results_in="observation",
        thought=("<think>", "</think>"),
        opening="{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
    ),
    "glm47": FamilyTemplate(
        family="glm47",
        turn=("<|{role}|>", ""),
        call="<tool_call>{{ c.name }}"
        + _parameters("<arg_key>{{ k }}</arg_key><arg_value>VALUE</arg_value>")
        + "</tool_call>",
        results_in="observation",
        thought=("<think>", "</think>"),
        opening="{% if enable_thinking is defined and not enable_thinking %}</think>{% else %}<think>{% endif %}",
    ),
    "hy3": FamilyTemplate(
        family="hy3",
        turn=("<｜{role}｜>", "</s>"),
        calls=("<tool_calls>\n", "\n</tool_calls>"),
        call="<tool_call>{{ c.name }}<tool_sep>\n"
        + _parameters("<arg_key>{{ k }}</arg_key>\n<arg_value>VALUE</arg_value>\n")
        + "</tool_call>"
        + _NEWLINE,
        thought=("<think>", "</think>"),
        before="{% if reasoning_effort is defined and reasoning_effort not in ['no_think', 'low', 'high'] %}{{ raise_exception('effort') }}{% endif %}",
        opening="{% if reasoning_effort in ['low', 'high'] %}{{ reasoning_effort }}<think>{% else %}<think></think>{% endif %}",
    ),
    "kimi_k2": FamilyTemplate(
        family="kimi_k2",
        turn=("<|im_{role}|>{role}<|im_middle|>", "<|im_end|>"),
        calls=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call="<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>",
        results_in="system",
        result="## Return of {{ m.tool_call_id }}\n{{ m.content }}",
        thought=("<think>", "</think>"),
        ids="function_number",
    ),
    "kimi_k3": FamilyTemplate(
        family="kimi_k3",
        turn=('<|open|>message role="{role}"<|sep|>', "<|close|>message<|sep|><|end_of_msg|>"),
        text=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        calls=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        call='<|open|>call tool="{{ c.name }}" index="{{ loop.index }}"<|sep|>'
        + _parameters(
            '<|open|>argument key="{{ k }}" type="{{ "string" if v is string else "object" }}"<|sep|>VALUE<|close|>argument<|sep|>'
        )
        + "<|close|>call<|sep|>",
        before="{% macro tag(mark, name) %}{{ '<|' + mark + '|>' + name + '<|sep|>' }}{% endmacro %}",
        thought=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        thought_written=("{{ tag('open', 'think') }}", "{{ tag('close', 'think') }}"),
        always_thinks=True,
        opening="{{ tag('open', 'response' if thinking is false else 'think') }}",
    ),
    "gemma4": FamilyTemplate(
        family="gemma4",
        turn=("<|turn>{role}\n", "<turn|>\n"),
        assistant="model",
        before=_BRACES,
        call="<|tool_call>call:{{ c.name }}{{ lit(c.arguments, '<|\"|>') }}<tool_call|>",
        result='<|tool_response>response:{{ m.name }}{value:<|"|>{{ m.content }}<|"|>}<tool_response|>',
        thought=("<|channel>thought\n", "<channel|>"),
        opening="{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}",
    ),
    "minimax_m1": FamilyTemplate(
        family="minimax_m1",
        turn=("<beginning_of_sentence>{role}\n", "<end_of_sentence>\n"),
        calls=("{{ '\\n' }}<tool_calls>\n", "\n</tool_calls>"),
        call=_JSON + _NEWLINE,
    ),
    "minimax_m2": FamilyTemplate(
        family="minimax_m2",
        turn=("]~b]{role}\n", "[e~[\n"),
        assistant="ai",
        calls=("\n<minimax:tool_call>\n", "</minimax:tool_call>"),
        call='<invoke name="{{ c.name }}">\n'
        + _parameters('<parameter name="{{ k }}">VALUE</parameter>\n')
        + "</invoke>\n",
        thought=("<think>\n", "\n</think>\n\n"),
        opening="<think>\n",
    ),
    "minimax_m3": FamilyTemplate(
        family="minimax_m3",
        turn=("]~b]{role}\n", "[e~[\n"),
        assistant="ai",
        before="{% macro nest(v) %}{% if v is mapping %}{% for k, x in v | items %}]<]minimax[>[<{{ k }}>{{ nest(x) }}]<]minimax[>[</{{ k }}>{% endfor %}"
        "{% elif v is iterable and v is not string %}{% for x in v %}]<]minimax[>[<item>{{ nest(x) "
        "}}]<]minimax[>[</item>{% endfor %}"
        "{% else %}{{ v if v is string else v | tojson }}{% endif %}{% endmacro %}",
        calls=("]<]minimax[>[<tool_call>\n", "]<]minimax[>[</tool_call>"),
        call=']<]minimax[>[<invoke name="{{ c.name }}">{{ nest(c.arguments) }}]<]minimax[>[</invoke>\n',
        thought=("<mm:think>", "</mm:think>"),
        opening="{% if thinking_mode == 'disabled' %}</mm:think>{% elif thinking_mode == 'enabled' %}<mm:think>{% endif %}",
    ),
    "deepseek_v3": FamilyTemplate(
        family="deepseek_v3",
        turn=("<｜{role}｜>", "<｜end▁of▁sentence｜>"),
        calls=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n{{ c.arguments | tojson }}\n```<｜tool▁call▁end｜>"
        + _NEWLINE,
    ),
    "deepseek_v31": FamilyTemplate(
        family="deepseek_v31",
        turn=("<｜{role}｜>", "<｜end▁of▁sentence｜>"),
        calls=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call="<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}<｜tool▁call▁end｜>",
        thought=("<think>", "</think>"),
        opening="{% if thinking %}<think>{% else %}</think>{% endif %}",
    ),
    "deepseek_v32": FamilyTemplate(
        family="deepseek_v3_2",
        turn=("<｜{role}｜>", "<｜end▁of▁sentence｜>"),
        calls=("\n\n<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
        call=_DSML,
        thought=("<think>", "</think>"),
        opening="{% if thinking %}<think>{% else %}</think>{% endif %}",
    ),
    "deepseek_v4": FamilyTemplate(
        family="deepseek_v4",
        turn=("<｜{role}｜>", "<｜end▁of▁sentence｜>"),
        calls=("\n\n<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"),
        call=_DSML,
        thought=("<think>", "</think>"),
        opening="{% if enable_thinking %}{% if reasoning_effort == 'max' %}max{% endif %}<think>{% else %}</think>{% endif %}",
    ),
    "gpt_oss": FamilyTemplate(
        family="harmony",
        turn=("<|start|>{role}", "<|end|>"),
        before="{{ '' }}",
        calls=("", ""),
        text=("<|channel|>final<|message|>", ""),
        call="<|channel|>commentary to=functions.{{ c.name }} <|constrain|>json<|message|>{{ c.arguments | tojson }}<|call|>"
        "{% if not loop.last %}<|start|>assistant{% endif %}",
        result="<|message|>{{ m.name }}: {{ m.content | tojson }}",
    ),
    "nemotron_v2": FamilyTemplate(
        family="nemotron",
        turn=("<SPECIAL_10>{role}\n", "<SPECIAL_12>\n"),
        calls=("<TOOLCALL>[", "]</TOOLCALL>"),
        call=_JSON + _COMMA,
        result="<TOOL_RESPONSE>[{{ m.content }}]</TOOL_RESPONSE>",
    ),
    "granite3_drops": FamilyTemplate(
        family="granite3",
        turn=("<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>\n"),
        calls=("<|tool_call|>[", "]"),
        call="",
        thought=("<think>", "</think>"),
        opening="",
        before="{% if thinking %}think{% endif %}",
        kept=False,
    ),
    "apriel": FamilyTemplate(
        family="apriel",
        turn=("<|begin_{role}|>\n", "\n<|end|>\n"),
        calls=("\n<tool_calls>[", "]</tool_calls>"),
        call='{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}, "id": "{{ call.id }}"}'
        + _COMMA,
    ),
    "phi4": FamilyTemplate(
        family="phi4",
        turn=("<|{role}|>", "<|end|>"),
        calls=("<|tool_call|>[", "]<|/tool_call|>"),
        call=_JSON + _COMMA,
    ),
    "cohere": FamilyTemplate(
        family="cohere",
        turn=("<|START_OF_TURN_TOKEN|><|{role}|>", "<|END_OF_TURN_TOKEN|>"),
        calls=("<|START_ACTION|>[", "]<|END_ACTION|>"),
        call='{"tool_call_id": "{{ call.id }}", "tool_name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
        + _COMMA,
        result='<|START_TOOL_RESULT|>{"tool_call_id": "{{ m.tool_call_id }}", "results": "{{ m.content }}"}<|END_TOOL_RESULT|>',
        thought=("<|START_THINKING|>", "<|END_THINKING|>"),
        ids="number",
    ),
    "minicpm5": FamilyTemplate(
        family="minicpm5",
        call='<function name="{{ c.name }}">'
        + _parameters('<param name="{{ k }}"><![CDATA[VALUE]]></param>')
        + "</function>\n",
    ),
    "apertus": FamilyTemplate(
        family="apertus",
        turn=("<|{role}_start|>", "<|{role}_end|>"),
        calls=("<|tools_prefix|>[", "]<|tools_suffix|>"),
        call='{"{{ c.name }}": {{ c.arguments | tojson }}}' + _COMMA,
        thought=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "gigachat": FamilyTemplate(
        family="gigachat",
        turn=("{role}<|role_sep|>\n", "<|message_sep|>\n"),
        call='<|function_call|>{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}',
        before=_refuse(
            "m.tool_calls is defined and m.tool_calls | length > 1", "one call at a time"
        ),
        parallel=False,
    ),
    "solar": FamilyTemplate(
        family="solar",
        turn=("<|begin|>{role}", "<|end|>"),
        before="{# <|calls|> <|flush|> #}",
        text=("<|content|>", ""),
        calls=("<|tool_calls|>", ""),
        call="<|tool_call:begin|>{{ call.id }}<|tool_call:name|>{{ c.name }}<|tool_call:args|>{{ c.arguments | tojson }}<|tool_call:end|>",
        thought=("<|think|>", "<|end|><|begin|>assistant"),
        ids="client",
    ),
}

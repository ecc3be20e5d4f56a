"""Answers in each family's syntax.

Tools: `get_weather(city: string, days: integer, opt: object, ok: boolean)` and `get_time(tz:
    string)`.
Expected: texts, ("thought", text) and (name, arguments, repairs).
"""

# ruff: noqa: E501
from __future__ import annotations

from typing import Any, Final

TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "opt": {"type": "object"},
                    "ok": {"type": "boolean"},
                },
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {"type": "object", "properties": {"tz": {"type": "string"}}},
        },
    },
]
ROME: Final = ("get_weather", {"city": "Rome", "days": 3}, ())
TIME: Final = ("get_time", {}, ())
BOTH: Final = [ROME, TIME]


def rome(*repairs: str, **more: Any) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """A call for the weather in Rome that had to be repaired."""
    return "get_weather", {"city": "Rome", **more}, repairs


RECORDED: Final[list[tuple[str, str, list[Any]]]] = [
    (
        "qwen3_coder",
        "I "
        "look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        ["I look.", *BOTH],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n\n  "
        "Rome\n\n</parameter>\n<parameter=opt>\n{'a': [1, None], 'b': True}\n"
        "</parameter>\n<parameter=ok>\nTrue\n</parameter>\n</function>\n</tool_call>",
        [
            (
                "get_weather",
                {"city": "\n  Rome\n", "opt": {"a": [1, None], "b": True}, "ok": True},
                ("python_literal",),
            )
        ],
    ),
    (
        "step3_5",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
        "</tool_call><tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        BOTH,
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n<parameter=days>3</parameter>\n</function>\n"
        "</seed:tool_call>\n<seed:tool_call>\n<function=get_time>\n</function>\n</seed:tool_call>",
        BOTH,
    ),
    (
        "minimax_m2",
        '\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        BOTH,
    ),
    (
        "minimax_m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Rome]<]minimax[>[</city>]<]minimax[>[<days>3'
        "]<]minimax[>[</days>]<]minimax[>[<opt>]<]minimax[>[<a>]<]minimax[>[<item>x]<]minimax[>[</item>]<]minimax[>[<item>y]<]minimax[>["
        "</item>]<]minimax[>[</a>]<]minimax[>[<t>x "
        "y]<]minimax[>[</t>]<]minimax[>[</opt>]<]minimax[>[</invoke>\n"
        ']<]minimax[>[<invoke name="get_time">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
        [rome(days=3, opt={"a": ["x", "y"], "t": "x y"}), TIME],
    ),
    (
        "deepseek_v3_2",
        'Let me see.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Rome'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        ["Let me see.", *BOTH],
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        BOTH,
    ),
    (
        "deepseek_v4",
        '<｜DSML｜ calls>\n<｜DSML｜invoke name="get_time">\n<｜DSML｜parameter name="tz" string="true">5</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜ calls>",
        [("get_time", {"tz": "5"}, ())],
    ),
    (
        "minicpm5",
        '<function name="get_weather"><param name="city"><![CDATA[Rome\n<b> & ]]></param><param name="days">3</param></function>\n'
        '<function name="get_time"></function>',
        [("get_weather", {"city": "Rome\n<b> & ", "days": 3}, ()), TIME],
    ),
    (
        "glm45",
        "Sure.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
        ["Sure.", *BOTH],
    ),
    (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
        "<tool_call>get_time</tool_call>",
        BOTH,
    ),
    (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>\n  "
        "Rome\n</arg_value></tool_call>",
        [("get_weather", {"city": "\n  Rome\n"}, ())],
    ),
    (
        "ling3",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value><arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>\n<tool_call>get_time\n\n</tool_call>",
        BOTH,
    ),
    (
        "hy3",
        "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time<tool_sep>\n</tool_call>\n</tool_calls>",
        BOTH,
    ),
    (
        "hy3",  # in Hy4 without a marker after the name
        "<tool_calls>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>\n</tool_calls>",
        [rome()],
    ),
    (
        "lfm2",
        'On it.<|tool_call_start|>[get_weather(city=\'Rome\nat "é"\', opt={"a": [1, null]}, ok=True), get_time()]<|tool_call_end|>',
        [
            "On it.",
            ("get_weather", {"city": 'Rome\nat "é"', "opt": {"a": [1, None]}, "ok": True}, ()),
            TIME,
        ],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]<|tool_call_end|>',
        [ROME],
    ),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}<tool_call|><|tool_call>call:get_time{}<tool_call|>',
        BOTH,
    ),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>a "b" {c}, \\n<|"|>,ok:true,opt:{a:[1,None],t:{x:<|"|><|"|>}}}<tool_call|>',
        [
            (
                "get_weather",
                {"city": 'a "b" {c}, \\n', "ok": True, "opt": {"a": [1, None], "t": {"x": ""}}},
                (),
            )
        ],
    ),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}call:get_time{}<tool_call|>',
        BOTH,
    ),
    (
        "gemma4",
        '<|tool_call>call:get_weather{days:3,city:<|"|>Rome<|"|>}\ncall:get_time{tz:<|"|>},call:x{<|"|>},\n call:get_time{}\n<tool_call|>',
        [ROME, ("get_time", {"tz": "},call:x{"}, ()), TIME],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>The user "
        "asks.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>"
        'assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome", "days": 3}',
        [("thought", "The user asks."), "I look.", ROME],
    ),
    (
        "harmony",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city":"Rome","days":3}<|call|>',
        [ROME],
    ),
    ("harmony", "<|channel|>final<|message|>It is <b> 3 °C.<|return|>", ["It is <b> 3 °C."]),
    (
        "kimi_k3",
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>I "
        "look.<|close|>response<|sep|><|open|>tools<|sep|><|open|>"
        'call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|><|open|>'
        'argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="get_time" index="2"'
        "<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        [("thought", "Hm."), "I look.", *BOTH],
    ),
    (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>json type="object"<|sep|>{"city": "Rome", "days": 3}'
        "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        [ROME],
    ),
    (
        "muse_spark",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>I "
        "look.<|eom|><|start|>assistant to=get_weather<|message|>"
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Rome</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=get_time'
        '<|message|><atem:function_calls>\n<atem:invoke name="get_time">\n</atem:invoke>\n</atem:function_calls><|eot|>',
        [("thought", "Hm."), "I look.", *BOTH],
    ),
]

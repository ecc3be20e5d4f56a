"""Wrong answers of each family's models, and how they are read.

Tools and words are those of `recorded_answers`.
"""

# ruff: noqa: E501
from __future__ import annotations

from typing import Any, Final

from tests.fakes.recorded_answers import rome

_ATEM_CALL = (
    '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Rome</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)
_DSML_CALL = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n{}\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'

MISTAKES: Final[list[tuple[str, str, list[Any]]]] = [
    # tags that are missing
    (
        "qwen3_coder",
        "I "
        "look.\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        ["I look.", rome("missing_open")],
    ),
    ("qwen3_coder", "<function=get_lost>\n</function>", ["<function=get_lost>\n</function>"]),
    (
        "qwen3_coder",
        "Write <tool_call> and then <function=NAME>.",
        ["Write <tool_call> and then <function=NAME>."],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</tool_call>",
        [rome("unclosed_call")],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [rome("unclosed_value", days=3)],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</function>\n</tool_call>",
        [rome("unclosed_value")],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome",
        [rome("unclosed_value", "unclosed_call")],
    ),
    # other forms
    (
        "qwen3_coder",
        '<tool_call>\n<function=get_weather>\n<parameter name="city">\nRome\n</parameter>\n</function>\n</tool_call>',
        [rome("parameter_form")],
    ),
    (
        "qwen3_coder",
        '<tool_call>\n<function=get_weather>\n{"city": "Rome", "days": 3}\n</function>\n</tool_call>',
        [rome("json_body", days=3)],
    ),
    (
        "qwen3_coder",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        [rome("json_call")],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=Get-Weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        [rome("name")],
    ),
    # values
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n</parameter>\nRome </function> "
        "</tool_call>\n</parameter>\n"
        "<parameter=days>\n3 apples\n</parameter>\n</function>\n</tool_call>",
        [
            (
                "get_weather",
                {"city": "</parameter>\nRome </function> </tool_call>", "days": "3 apples"},
                (),
            )
        ],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n{"city": "Rome"}\n</invoke>\n</minimax:tool_call>',
        [rome("json_body")],
    ),
    (
        "minimax_m2",
        '<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n</minimax:tool_call>',
        [rome("missing_open")],
    ),
    (
        "deepseek_v3_2",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n{"city": "Rome"}\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [rome("json_body")],
    ),
    (
        "deepseek_v3_2",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="false">Rome</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        [rome()],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n<invoke name="a b">x',
        [rome(), '<invoke name="a b">x'],
    ),
    (
        "hy3",
        "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>\n<tool_call>a "
        "b",
        [rome(), "<tool_call>a b"],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[get_weather(city='Rome'), {\"id\": 1}]<|tool_call_end|>",
        [rome(), '{"id": 1}]<|tool_call_end|>'],
    ),
    (
        "glm45",
        "<tool_call>get_weather\\n<arg_key>city</arg_key>\\n<arg_value>Rome</arg_value>\\n</tool_call>",
        [rome()],
    ),
    (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        [rome("unclosed_value", days=3)],
    ),
    (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</tool_call>",
        [rome("unclosed_value")],
    ),
    (
        "glm47",
        "<tool_call>get_weather<arg_key>city<arg_value>Rome</arg_value></tool_call>",
        [rome("missing_tag")],
    ),
    ("glm47", '<tool_call>get_weather{"city": "Rome"}</tool_call>', [rome("json_body")]),
    (
        "glm47",
        '<tool_call>get_weather city="New York" days=3</tool_call>',
        [("get_weather", {"city": "New York", "days": 3}, ("words_for_tags",))],
    ),
    ("glm47", "<tool_call>get_weather\ncity=Rome</tool_call>", [rome("words_for_tags")]),
    (
        "glm47",
        "<tool_call>get_weather in Rome</tool_call>",
        ["<tool_call>get_weather in Rome</tool_call>"],
    ),
    (
        "glm47",
        "<tool_call>get_weather town=Rome</tool_call>",
        ["<tool_call>get_weather town=Rome</tool_call>"],
    ),
    (
        "glm47",
        "<tool_call>any words at all</tool_call>",
        ["<tool_call>any words at all</tool_call>"],
    ),
    ("glm47", "<tool_call>word</tool_call>", ["<tool_call>word</tool_call>"]),
    (
        "lfm2",
        "<|tool_call_start|>[get_weather('Rome', 3)]<|tool_call_end|>",
        [rome("positional_argument", days=3)],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[get_weather(city="say "Rome" twice")]<|tool_call_end|>',
        [("get_weather", {"city": 'say "Rome" twice'}, ("inner_quote",))],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[functions.get_weather(city=Rome)]<|tool_call_end|>",
        [rome("name", "bare_string")],
    ),
    ("lfm2", "<|tool_call_start|>[get_weather(city='Rome'", [rome("unclosed_call")]),
    (
        "lfm2",
        "<|tool_call_start|>[get_weather(city='Rome'<|tool_call_end|>",
        [rome("unclosed_call")],
    ),
    ("gemma4", "<|tool_call>call:get_weather{city:Rome}<tool_call|>", [rome("bare_string")]),
    ("gemma4", '<|tool_call>call:get_weather{"city":"Rome"}<tool_call|>', [rome("quoted_key")]),
    (
        "gemma4",
        '<|tool_call><|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>',
        [rome()],
    ),
    (
        "gemma4",
        '<|tool_call>call:get-weather{city:<|"|>Rome<|"|>,a-b:1}<tool_call|>',
        [rome("name", **{"a-b": 1})],
    ),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|><tool_call|>',
        [rome("unclosed_call")],
    ),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>} call:me later<tool_call|>',
        [rome(), "call:me later<tool_call|>"],
    ),
    # no header is an error
    ("harmony", "It is warm.", ["It is warm."]),
    ("harmony", "<|channel|>final It is warm.<|return|>", ["It is warm."]),
    (
        "harmony",
        '<|channel|>commentary to=functions.get_weather <|constrain|>json{"city": "Rome"}<|call|>',
        [rome()],
    ),
    (
        "harmony",
        '<|channel|>analysis to=functions.get_weather code<|message|>{"city": "Rome"}<|call|>',
        [rome()],
    ),
    (
        "harmony",
        '<|start|>get_weather<|channel|>commentary<|message|>{"city": "Rome"}',
        [rome("role_for_recipient")],
    ),
    (
        "harmony",
        '<|channel|>commentary to=functions.get_weather<|constrain|>please<|message|>{"city": "Rome"}',
        [rome()],
    ),
    (
        "harmony",
        "<|channel|>commentary to=functions.get_time<|message|>CET",
        [("get_time", {"tz": "CET"}, ("raw_arguments",))],
    ),
    (
        "harmony",
        "<|channel|>commentary to=functions.get_time<|message|><|call|>",
        [("get_time", {}, ("no_arguments",))],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.",
        [("thought", "Hm."), "Yes."],
    ),
    (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Rome<|close|>'
        "call<|sep|><|close|>tools<|sep|>",
        [rome("unclosed_value")],
    ),
    (
        "harmony",
        "<|channel|>commentary "
        "to=assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        [("thought", "Hm."), "Yes."],
    ),
    # only a message to a tool has calls
    (
        "muse_spark",
        f" to=user<|message|>Write\n{_ATEM_CALL}\nthen.<|eot|>",
        [f"Write\n{_ATEM_CALL}\nthen."],
    ),
    (
        "muse_spark",
        f" to=self<|message|>Or {_ATEM_CALL}?<|eom|><|start|>assistant "
        f"to=get_weather<|message|>{_ATEM_CALL}<|eom|>",
        [("thought", f"Or {_ATEM_CALL}?"), rome()],
    ),
    # one parameter that contains all arguments
    (
        "deepseek_v3_2",
        _DSML_CALL.format(
            '<｜DSML｜parameter name="arguments" string="false">{"city": "Rome", "days": 3}</｜DSML｜parameter>'
        ),
        [rome("wrapped_arguments", days=3)],
    ),
    (
        "deepseek_v3_2",
        _DSML_CALL.format(
            '<｜DSML｜parameter name="input" string="true">{"city": "Rome"}</｜DSML｜parameter>'
        ),
        [rome("wrapped_arguments")],
    ),
    (
        "deepseek_v3_2",
        _DSML_CALL.format(
            '<｜DSML｜parameter name="arguments" string="false">{"town": "Rome"}</｜DSML｜parameter>'
        ),
        [("get_weather", {"arguments": {"town": "Rome"}}, ())],
    ),
    (
        "deepseek_v3_2",
        _DSML_CALL.format(
            '<｜DSML｜parameter name="arguments" string="true">{"city": "Rome"}</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>'
        ),
        [("get_weather", {"arguments": '{"city": "Rome"}', "days": 3}, ())],
    ),
    # the same in similar families
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n</seed:tool_call>",
        [rome("unclosed_call")],
    ),
    (
        "seed_oss",
        "I "
        "look.\n<function=get_weather>\n<parameter=city>Rome</parameter>\n</function>\n</seed:tool_call>",
        ["I look.", rome("missing_open")],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        [rome("unclosed_value", days=3)],
    ),
    (
        "seed_oss",
        '<seed:tool_call>\n<function=get_weather>\n{"city": "Rome", "days": 3}\n</function>\n</seed:tool_call>',
        [rome("json_body", days=3)],
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n{"city": "Rome"}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        [rome("json_body")],
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Rome',
        [rome("unclosed_value", "unclosed_call")],
    ),
    (
        "deepseek_v4",
        '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        [rome("missing_open")],
    ),
    (
        "minicpm5",
        '<function name="get_weather"><param name="city">Rome</function>',
        [rome("unclosed_value")],
    ),
    (
        "minicpm5",
        '<function name="get_weather"><param name="city">Rome</param></function>',
        [rome()],
    ),
    (
        "minicpm5",
        '<function name="get_weather"><param name="city"><![CDATA[Rome]]></param>',
        [rome("unclosed_call")],
    ),
    ("minicpm5", '<function name="get_weather">{"city": "Rome"}</function>', [rome("json_body")]),
    (
        "hy3",
        "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Rome</tool_call>\n</tool_calls>",
        [rome("unclosed_value")],
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</tool_call>",
        [rome("unclosed_value")],
    ),
    (
        "minimax_m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Rome]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
        [rome("unclosed_value")],
    ),
    (
        "minimax_m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Rome]<]minimax[>[</city>',
        [rome("unclosed_call")],
    ),
    (
        "minimax_m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="Get-Weather">]<]minimax[>[<city>Rome]<]minimax[>[</city>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
        [rome("name")],
    ),
    (
        "minimax_m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">{"city": "Rome"}]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
        [rome("json_body")],
    ),
    (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|>',
        [rome("unclosed_call")],
    ),
]

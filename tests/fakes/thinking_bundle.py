"""The front's side of a model whose chat template keeps thoughts after the last user message, and
drops earlier ones.
"""

from __future__ import annotations

from tokenizers import Tokenizer as Backend

from holdfast.front.prompt.known_answers import KnownAnswers
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle, frame_of
from holdfast.front.toolcalls.dialect import ModelDialect, ReasoningFormat
from holdfast.front.toolcalls.families import FAMILIES
from tests.fakes import toy_tokenizers

# As in Qwen 3; calls have different spaces and key order.
TEMPLATE = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
        {%- if m.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content.strip() }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n' if m.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
    {%- if opened %}{{ '<think>\\n' }}{% elif opened is defined %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def bundle_of(template: str = TEMPLATE, *, backend: Backend | None = None) -> TokenizerBundle:
    """backend: a tokenizer with the template's tokens; by default a toy tokenizer."""
    tokenizer = Tokenizer(
        backend or toy_tokenizers.byte_level(), config={"eos_token": "<|im_end|>"}
    )
    ids = tokenizer.backend.get_vocab(with_added_tokens=True)
    chat = ChatTemplate({"default": template}, special_tokens=tokenizer.special_tokens)
    dialect = ModelDialect(
        family="hermes",
        calls=FAMILIES["hermes"].calls,
        reasoning=ReasoningFormat(start="<think>", end="</think>"),
        marker_ids={text: ids[text] for text in ("<think>", "</think>", "<tool_call>")},
    )
    return TokenizerBundle(
        tokenizer=tokenizer,
        template=chat,
        answer_frame=frame_of(chat, tokenizer, dialect),
        generation_defaults={},
        known_answers=KnownAnswers(),
        dialect=dialect,
    )

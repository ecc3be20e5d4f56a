"""How the answers to a request are to be read: what `parsing` has to know of the request and of its
model. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.front.answers.choice import ChoiceRules
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import PLAIN
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.prompt import PromptText, PromptTokens
from holdfast.wire.requests import ChatPrompt, GenerationRequest
from holdfast.wire.token_ids import TokenIds


def answer_rules(
    request: GenerationRequest,
    bundle: TokenizerBundle,
    prompt: PromptText,
    tokens: PromptTokens,
    *,
    sequence: SequenceRequest,
) -> ChoiceRules:
    """The rules for all choices of a request. sequence: any of them, as it goes to the worker.

    What completes a text, and is no chat, has neither reasoning nor calls in it.
    """
    chat = request.prompt if isinstance(request.prompt, ChatPrompt) else None
    return ChoiceRules(
        prompt_token_ids=tokens.token_ids,
        stop_token_ids=frozenset(sequence.stop_token_ids),
        max_tokens=sequence.max_tokens,
        stops=request.stop,
        dialect=PLAIN if chat is None else bundle.dialect,
        tools=DeclaredTools(chat.tools if chat else ()),
        reads_calls=chat is not None and bool(chat.tools) and request.tool_choice.mode != "none",
        one_call=not request.tool_choice.parallel,
        in_reasoning=prompt.in_reasoning,
        earlier_call_ids=tuple(_call_ids(chat.messages)) if chat else (),
        form_field=request.output_format.field
        if request.output_format
        else "tools"
        if chat and chat.tools
        else "",
        want_logprobs=request.want_logprobs,
        at_start=_opens_a_text(request, bundle.tokenizer, tokens.token_ids),
        tells_progress=request.tells_progress,
        echo=request.echo,
        echo_text=_echo_text(prompt, bundle.tokenizer) if request.echo else "",
    )


def _call_ids(messages: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            if isinstance(call, Mapping) and isinstance(call.get("id"), str):
                yield call["id"]


def _opens_a_text(request: GenerationRequest, tokenizer: Tokenizer, token_ids: TokenIds) -> bool:
    if isinstance(request.prompt, ChatPrompt):
        return not request.prompt.continue_last
    return len(token_ids) == 1 and token_ids.view[0] == tokenizer.bos_token_id


def _echo_text(prompt: PromptText, tokenizer: Tokenizer) -> str:
    return prompt.text or tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

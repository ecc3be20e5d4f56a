"""Fields that clients send and whose meaning is known, but which are not served, or not on this
route: refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.front.server.unsupported import UnsupportedFields

_EMPTY = (
    "grammar json_schema guided_whitespace_pattern structural_tag mm_processor_kwargs "
    "media_io_kwargs stop_token_ids bad_words "
    "logits_processors logit_processors documents role_mapping adapters draft_model"
)
_OFF = (
    "use_beam_search early_stopping include_stop_str_in_output return_token_ids "
    "return_tokens_as_token_ids"
)
_NEVER = (
    "audio web_search_options prediction allowed_token_ids truncate_prompt_tokens prompt_logprobs "
    "repetition_context_size "
    "repeat_penalty repeat_last_n n_predict num_predict num_ctx chat_template prompt_embeds "
    "num_draft_tokens"
)
# field → the values with which it asks for nothing; null does for every field
KNOWN: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NEVER.split(), ()),
    **dict.fromkeys(_EMPTY.split(), ([], {}, "")),
    **dict.fromkeys(_OFF.split(), (False,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(
        ("parallel_tool_calls", "include_reasoning", "separate_reasoning", "parse_tool_calls"),
        (True,),
    ),
    **dict.fromkeys(
        ("reasoning_effort", "enable_thinking", "thinking", "think", "reasoning"),
        (False, "none", "off", {}),
    ),
    **dict.fromkeys(
        ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens"), (0, -1)
    ),
    **dict.fromkeys(("messages", "chat_template_kwargs"), ([], {})),
    **dict.fromkeys(("continue_final_message", "add_generation_prompt"), (False,)),
    **dict.fromkeys(("prompt", "suffix"), ("", [])),
    "echo": (False,),
    "best_of": (1,),
    "reasoning_format": ("auto", "deepseek"),
    **dict.fromkeys(("min_tokens", "mirostat"), (0,)),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "top_a"), (0, 0.0)),
    **dict.fromkeys(("length_penalty", "typical_p", "tfs_z"), (1, 1.0)),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
}
_CHATS = (
    "tools functions tool_choice function_call messages chat_template_kwargs "
    "continue_final_message add_generation_prompt "
    "reasoning_effort enable_thinking thinking think reasoning thinking_budget "
    "thinking_token_budget thinking_budget_tokens"
)
_REASONS = {
    **dict.fromkeys(_CHATS.split(), "this is for conversations, see /v1/chat/completions"),
    **dict.fromkeys(
        ("prompt", "suffix", "echo", "best_of"), "this is for raw text, see /v1/completions"
    ),
    "prompt_logprobs": "use `echo` with `logprobs` on /v1/completions",
    "repetition_context_size": "`repetition_penalty` here looks at the whole prompt and answer",
    "repeat_penalty": "the field is called `repetition_penalty` here",
    "repeat_last_n": "`repetition_penalty` here looks at the whole prompt and answer",
    "n_predict": "the field is called `max_tokens` here",
    "num_predict": "the field is called `max_tokens` here",
    "num_ctx": "the context is set when the server is started",
    "chat_template": "the model's own template is used",
}

UNSUPPORTED = UnsupportedFields(neutral=KNOWN, reasons=_REASONS)

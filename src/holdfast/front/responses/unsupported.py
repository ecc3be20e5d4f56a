"""Fields of the Responses API, and of others that clients mix it up with, which are refused and not
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.front.openai.fields import KNOWN
from holdfast.front.server.unsupported import UnsupportedFields

# parts of OpenAI's own service
_HOSTED = ("prompt", "context_management", "moderation", "access_programs", "image")
_CALLED_OTHERWISE = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "system": "instructions",
    "verbosity": "text.verbosity",
}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **KNOWN,
    **dict.fromkeys(_HOSTED, ([], {})),
    **dict.fromkeys(_CALLED_OTHERWISE, ([], {})),
    "n": (1,),
    **dict.fromkeys(("stop", "functions"), ([], "")),
    "logprobs": (False,),
}
_REASONS = {
    **dict.fromkeys(_HOSTED, "this is a part of OpenAI's own service"),
    **{name: f"the field is called `{other}` here" for name, other in _CALLED_OTHERWISE.items()},
    "n": "a response has one answer",
    "stop": "the Responses API has no stop strings",
    "functions": "the field is called `tools` here",
    "function_call": "the field is called `tool_choice` here",
    "logprobs": 'ask for `include`: ["message.output_text.logprobs"]',
}

UNSUPPORTED = UnsupportedFields(neutral=_NEUTRAL, reasons=_REASONS)

"""The limits of a scheduler that may be changed while it works."""

from __future__ import annotations

from dataclasses import replace

from holdfast.config import SchedulerSettings
from holdfast.errors import InvalidRequest

MOST_STEP_TOKENS = 1 << 20


def checked_limits(
    settings: SchedulerSettings, *, max_running: int, step_tokens: int
) -> SchedulerSettings:
    """The settings with other limits. Raises InvalidRequest for what they may not be."""
    if max_running < 1:
        raise InvalidRequest(
            f"`max_running`: at least 1 has to run, got {max_running}", field="max_running"
        )
    least = max(settings.min_chunk_tokens, max_running)
    if not least <= step_tokens <= MOST_STEP_TOKENS:
        why = (
            f"max_running = {max_running}, scheduler.min_chunk_tokens = {settings.min_chunk_tokens}"
        )
        message = (
            f"`step_tokens`: a step has to read {least:,} to {MOST_STEP_TOKENS:,} tokens ({why}), "
            f"got {step_tokens:,}"
        )
        raise InvalidRequest(message, field="step_tokens")
    return replace(settings, max_running=max_running, step_tokens=step_tokens)

"""The `holdfast` object of an answer: what of the prompt was remembered, why not more, and where
the time went.
"""

from __future__ import annotations

import msgspec

from holdfast.wire.events import CacheOutcome, CacheReport
from holdfast.wire.output import ChoiceFinished


class TokenShown(msgspec.Struct, frozen=True, kw_only=True):
    """A token and its text."""

    id: int
    text: str


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first token of the prompt that differs from what is kept.

    `position` counts from 0, `before` is the text there.
    """

    position: int
    before: str
    stored: TokenShown
    prompt: TokenShown


class SecondsSpent(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time went.

    `lookup` and `waited_for_another` are parts of `queue`, `restore` of `queue` and `prefill`.
    """

    accept: float  # until the worker had taken the request: checks, template, tokenization
    queue: float
    lookup: float
    waited_for_another: float
    restore: float
    prefill: float
    # since the request came in, everything included; null when there was no text
    first_text: float | None


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one choice began from.

    `ram_tokens`, `disk_tokens` and `read_tokens` add up to `prompt_tokens`.

    `moved_tokens` and `shared_tokens` are parts of `ram_tokens`; the rest of those was copied.
    """

    index: int
    prompt_tokens: int
    ram_tokens: int
    moved_tokens: int  # stand where the answer before has left them
    shared_tokens: int  # stand where other sequences use them too
    disk_tokens: int
    read_tokens: int
    read_ahead_tokens: int  # of both, those that were read for this turn before it came
    unused_tokens: int  # further ones that are, or were, kept but could not be used
    put_back_tokens: int  # of earlier answers, which stand in the prompt as they were generated
    # of earlier answers, which the chat template or the client has left out of the prompt
    dropped_tokens: int
    reason: str
    explanation: str
    difference: Difference | None
    seconds: SecondsSpent
    # places in the schemas of tools, of keywords that the answer need not keep to
    unenforced: tuple[str, ...] = ()
    resumed: int = 0  # workers that died while they had it; the answer went on with the next one
    # of the answer's first choice: the same for the others, if there are any
    further_choices: list[Explanation] = []


def explanation_of(choices: list[Explanation]) -> Explanation | None:
    """The object for the explained choices of one answer; None when there are none."""
    if not choices:
        return None
    first, *further = sorted(choices, key=lambda choice: choice.index)
    return msgspec.structs.replace(first, further_choices=further)


def explain_choice(
    event: ChoiceFinished,
    *,
    put_back_tokens: int = 0,
    dropped_tokens: int = 0,
    accept_seconds: float,
    first_text_seconds: float | None,
    unenforced: tuple[str, ...] = (),
) -> Explanation:
    """What one choice began from. What the front itself knows is given."""
    memory, timings, difference = event.memory, event.timings, _difference(event)
    return Explanation(
        index=event.index,
        prompt_tokens=event.prompt_tokens,
        ram_tokens=memory.ram_tokens,
        moved_tokens=memory.moved_tokens,
        shared_tokens=memory.shared_tokens,
        disk_tokens=memory.disk_tokens,
        read_tokens=event.prompt_tokens - memory.cached_tokens,
        read_ahead_tokens=memory.read_ahead_tokens,
        unused_tokens=memory.unused_tokens,
        put_back_tokens=put_back_tokens,
        dropped_tokens=dropped_tokens,
        reason=memory.outcome.value,
        explanation=_in_words(event, difference, dropped_tokens=dropped_tokens),
        difference=difference,
        seconds=SecondsSpent(
            accept=accept_seconds,
            queue=timings.queue_seconds,
            lookup=memory.lookup_seconds,
            waited_for_another=memory.waited_seconds,
            restore=memory.restore_seconds,
            prefill=timings.prefill_seconds,
            first_text=first_text_seconds,
        ),
        unenforced=unenforced,
        resumed=event.resumptions,
    )


def _difference(event: ChoiceFinished) -> Difference | None:
    where, texts = event.memory.divergence, event.divergent
    if where is None or texts is None:
        return None
    return Difference(
        position=where.position,
        before=texts.before,
        stored=TokenShown(id=where.stored_token_id, text=texts.stored),
        prompt=TokenShown(id=where.prompt_token_id, text=texts.prompt),
    )


_WORDS = {
    CacheOutcome.COMPLETE: "The whole prompt was in the cache; the last token is always recomputed.",
    CacheOutcome.NEW_TOKENS: "All that is kept of this beginning was used; the prompt goes on behind it.",
    CacheOutcome.NOTHING_STORED: (
        "Nothing is kept for this model and tenant. Other weights, another number format or codec, "
        "another API key, "
        "X-Holdfast-Tenant or cache_salt have memories of their own."
    ),
    CacheOutcome.SCORED: "Something of all of the prompt's tokens was asked for (log-probabilities, a mean): all had to be read.",
    CacheOutcome.FAILED: "The memory failed on this request, so all of its prompt was read. The server's log says more.",
    CacheOutcome.OFF: "The server keeps nothing for this model: its layout does not allow it.",
}


def _in_words(event: ChoiceFinished, difference: Difference | None, *, dropped_tokens: int) -> str:
    memory = event.memory
    said = [_WORDS.get(memory.outcome) or _lost_in_words(memory)]
    if difference is not None:
        said.append(
            f"The prompt differs from the cached prompt at token {difference.position:,}, after "
            f"{difference.before!r}: "
            f"cached {difference.stored.text!r}, now {difference.prompt.text!r}."
        )
    if dropped_tokens:
        said.append(
            "The model's chat template, or the client, leaves parts of earlier answers out, such "
            "as thinking: "
            f"{dropped_tokens:,} tokens that were generated are not in the prompt as they were."
        )
    if memory.read_ahead_tokens:
        said.append(
            f"{memory.read_ahead_tokens:,} tokens were read for this turn before it came, while "
            "there was nothing else to do."
        )
    if memory.waited_for_another:
        said.append("It waited until another request had read the same beginning.")
    if event.resumptions:
        said.append(
            "A worker died in the middle of it; another one went on where that had stopped."
        )
    return " ".join(sentence for sentence in said if sentence)


def _lost_in_words(memory: CacheReport) -> str:
    more = f"{memory.unused_tokens:,} more tokens"
    match memory.outcome:
        case CacheOutcome.NO_BOUNDARY:
            return (
                f"{more} are kept, but this model can go on only where its state was saved; the "
                "last such place was used."
            )
        case CacheOutcome.EVICTED:
            return (
                f"{more} were kept, but had to make room for others; store.ram_bytes and "
                "store.disk_bytes say how much is kept."
            )
        case CacheOutcome.UNREADABLE:
            return (
                f"{more} were kept in files that are damaged or gone. They are not used; the "
                "prompt was read instead."
            )
        case CacheOutcome.FORGOTTEN:
            return f"{more} were kept, but somebody had them deleted."
        case _:
            return ""  # the difference says it

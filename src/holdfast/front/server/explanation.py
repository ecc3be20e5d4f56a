"""Explains in an answer how much of its prompt was cached, and why not more."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from holdfast.front.output import ChoiceFinished
from holdfast.wire.events import CacheOutcome


class TokenShown(Struct, frozen=True, kw_only=True):
    """A token and its text."""

    id: int
    text: str


class Difference(Struct, frozen=True, kw_only=True):
    """The first token of the prompt that differs from the cached prompt.

    `position` counts from 0; `before` is the text before it.
    """

    position: int
    before: str
    stored: TokenShown
    prompt: TokenShown


class SecondsSpent(Struct, frozen=True, kw_only=True):
    """The seconds spent in each stage of a request.

    `lookup` and `waited_for_another` are parts of `queue`; `restore` is part of `queue` and
    `prefill`.
    """

    accept: float  # arrival to acceptance by the worker: checks, template, tokenization
    queue: float
    lookup: float
    waited_for_another: float
    restore: float
    prefill: float
    # from the request's arrival to the first text, including all of the above; null if
    # there is no text
    first_text: float | None


class Explanation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much of the prompt of one choice was cached.

    `ram_tokens`, `disk_tokens` and `read_tokens` add up to `prompt_tokens`. `moved_tokens` and
    `shared_tokens` are parts of `ram_tokens`; the other `ram_tokens` were copied.
    """

    index: int
    prompt_tokens: int
    ram_tokens: int
    moved_tokens: int  # in live state taken over from the previous answer of the conversation
    shared_tokens: int  # in buffers that are shared with other sequences
    disk_tokens: int
    read_tokens: int  # prefilled
    read_ahead_tokens: int  # those of ram_tokens and disk_tokens that were prefilled in advance
    unused_tokens: int  # further prompt tokens that are or were cached, but could not be used
    put_back_tokens: int  # tokens of earlier answers that the prompt contains as generated
    dropped_tokens: int  # tokens of earlier answers that the chat template or the client omitted
    reason: CacheOutcome
    explanation: str
    difference: Difference | None
    seconds: SecondsSpent
    unenforced: tuple[str, ...] = ()  # paths of schema keywords that no grammar enforces
    resumed: int = 0  # how often a worker died and another one continued the request
    # only in the first choice's object: the objects of the other choices
    further_choices: list[Explanation] = []


def explanation_of(choices: list[Explanation]) -> Explanation | None:
    """Combine the explanations of an answer's choices into one; None if there are none."""
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
    """Explain how much of the prompt of one choice was cached.

    The arguments other than `event` are facts that the worker does not know.

    put_back_tokens: tokens of earlier answers that the prompt contains exactly as generated.
    dropped_tokens: tokens of earlier answers that the chat template or the client left out.
    unenforced: paths of schema keywords that no grammar enforces.
    """
    cache = event.cache_report
    timings = event.timings
    difference = _difference(event)
    return Explanation(
        index=event.index,
        prompt_tokens=event.prompt_tokens,
        ram_tokens=cache.ram_tokens,
        moved_tokens=cache.moved_tokens,
        shared_tokens=cache.shared_tokens,
        disk_tokens=cache.disk_tokens,
        read_tokens=event.read_tokens,
        read_ahead_tokens=cache.read_ahead_tokens,
        unused_tokens=cache.unused_tokens,
        put_back_tokens=put_back_tokens,
        dropped_tokens=dropped_tokens,
        reason=cache.outcome,
        explanation=_in_words(event, difference, dropped_tokens=dropped_tokens),
        difference=difference,
        seconds=SecondsSpent(
            accept=accept_seconds,
            queue=timings.queue_seconds,
            lookup=cache.lookup_seconds,
            waited_for_another=cache.waited_seconds,
            restore=cache.restore_seconds,
            prefill=timings.prefill_seconds,
            first_text=first_text_seconds,
        ),
        unenforced=unenforced,
        resumed=event.resumptions,
    )


def _difference(event: ChoiceFinished) -> Difference | None:
    """The first difference from the cached prompt; None if there is none or it is not known."""
    divergence = event.cache_report.divergence
    texts = event.divergent
    if divergence is None or texts is None:
        return None
    return Difference(
        position=divergence.position,
        before=texts.before,
        stored=TokenShown(id=divergence.stored_token_id, text=texts.stored),
        prompt=TokenShown(id=divergence.prompt_token_id, text=texts.prompt),
    )


# {unused}: number of cached tokens that could not be used; {place}: where the prompts differ, or
# empty
_SENTENCES = {
    CacheOutcome.COMPLETE: "The whole prompt was cached; the last token is always recomputed.",
    CacheOutcome.NEW_TOKENS: "The whole cached prefix was used; the rest of the prompt is new.",
    CacheOutcome.NOTHING_STORED: (
        "Nothing is cached for this model and tenant. Other weights, another number format, "
        "kv_bits, API key, X-Holdfast-Tenant or cache_salt use separate caches."
    ),
    CacheOutcome.SCORED: (
        "The request needs a result for every token of the prompt (log-probabilities, a mean), so "
        "the whole prompt was prefilled."
    ),
    CacheOutcome.FAILED: (
        "The cache failed for this request, so the whole prompt was prefilled. The server's log "
        "has the details."
    ),
    CacheOutcome.OFF: "This model has no prefix cache: its layout does not allow one.",
    CacheOutcome.NO_BOUNDARY: (
        "{unused} more tokens are cached, but this model can resume only where its state was "
        "saved; the last such position was used."
    ),
    CacheOutcome.EVICTED: (
        "{unused} more tokens were cached, but were evicted; store.ram_bytes and store.disk_bytes "
        "limit the cache."
    ),
    CacheOutcome.UNREADABLE: (
        "{unused} more tokens were cached in files that are damaged or gone; that part of the "
        "prompt was prefilled instead."
    ),
    CacheOutcome.FORGOTTEN: "{unused} more tokens were cached, but were deleted on request.",
    CacheOutcome.DIVERGED: "The prompt differs from the cached prompt{place}.",
}


def _in_words(event: ChoiceFinished, difference: Difference | None, *, dropped_tokens: int) -> str:
    """The explanation for people, in sentences. It may quote the prompt."""
    cache = event.cache_report
    sentences: list[str] = []
    if cache.outcome is not CacheOutcome.DIVERGED:
        sentences.append(_reason_in_words(cache.outcome, cache.unused_tokens))
    if difference is not None:
        sentences.append(
            f"The prompt differs from the cached prompt at token {difference.position:,}, after "
            f"{difference.before!r}: "
            f"cached {difference.stored.text!r}, now {difference.prompt.text!r}."
        )
    if dropped_tokens:
        sentences.append(
            "The chat template or the client omits parts of earlier answers, such as reasoning: "
            f"{dropped_tokens:,} generated tokens are not in the prompt as they were generated."
        )
    if cache.read_ahead_tokens:
        sentences.append(
            f"{cache.read_ahead_tokens:,} tokens were prefilled for this turn in advance, while "
            "the server was idle."
        )
    if cache.waited_for_another:
        sentences.append("The request waited while another request prefilled the same prefix.")
    if event.resumptions:
        sentences.append("A worker died during the request; another one continued it.")
    return " ".join(sentences)


def in_words_without_texts(explanation: Explanation) -> str:
    """The reason of an explanation in words that quote nothing of the prompt."""
    difference = explanation.difference
    place = "" if difference is None else f" at token {difference.position:,}"
    return _reason_in_words(explanation.reason, explanation.unused_tokens, place=place)


def _reason_in_words(outcome: CacheOutcome, unused_tokens: int, *, place: str = "") -> str:
    return _SENTENCES[outcome].format(unused=f"{unused_tokens:,}", place=place)

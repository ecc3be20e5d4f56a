"""Limits the next token of a sequence, by grammars (matched by llguidance) and thinking budgets.

Plain Python, no MLX. A matcher follows the tokens of one answer on the host and computes a mask of
the tokens that may follow, with one bit per token of the vocabulary. After a preemption, a failure
or a restart, the matcher is rebuilt from the tokens that were generated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.errors import HoldfastError, InvalidRequest, ModelLoadError
from holdfast.lru_cache import LruCache
from holdfast.models.tokenizer_files import (
    add_missing_tokens,
    end_token_ids,
    eos_token_ids,
    named_special_tokens,
    read_backend,
    tokenizer_config,
)
from holdfast.wire.commands import SequenceRequest, ThinkingBudget
from holdfast.wire.events import ConstraintFigures

if TYPE_CHECKING:  # imported on first use: 30 ms and 6 MB
    from llguidance import LLMatcher, LLTokenizer

# bit i % 32 of word i // 32 is set where token i is allowed
Words: TypeAlias = npt.NDArray[np.int32]

KEPT_GRAMMARS = 32  # how many compiled grammars are cached
# building the tokenizer of a larger file takes longer than a step (0.3 s with 131,000 tokens)
LARGE_FILE_BYTES = 1 << 20
_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarVocabulary:
    """The parts of a tokenizer that grammars need: the text of tokenizer.json, and the ids of all
    tokens that end an answer.
    """

    tokenizer_json: str
    end_token_ids: tuple[int, ...]

    @staticmethod
    def of_folder(folder: Path) -> GrammarVocabulary:
        """Read the vocabulary from a model folder. Raises ModelLoadError."""
        backend = read_backend(folder)
        config = tokenizer_config(folder)
        special_tokens = named_special_tokens(config)
        add_missing_tokens(backend, config, special_tokens)
        end_ids = end_token_ids(backend, special_tokens, named=eos_token_ids(folder))
        return GrammarVocabulary(tokenizer_json=backend.to_str(), end_token_ids=end_ids)


class GrammarMatcher:
    """Follows the tokens of one answer through a grammar."""

    __slots__ = ("_end_token_id", "_matcher", "_request_end_token_ids", "_tokenizer")

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        *,
        end_token_id: int,
        request_end_token_ids: tuple[int, ...],
    ) -> None:
        """end_token_id: an end token of the tokenizer. request_end_token_ids: further tokens that
        end this answer, which llguidance does not know; they are treated like `end_token_id`.
        """
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._end_token_id = end_token_id
        self._request_end_token_ids = request_end_token_ids

    @property
    def error(self) -> str:
        """Why the grammar cannot continue, in one line; empty if it can."""
        return first_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def copy(self) -> GrammarMatcher:
        """A matcher that follows the answer independently from here on. Takes some µs."""
        return GrammarMatcher(
            self._matcher.deep_copy(),
            self._tokenizer,
            end_token_id=self._end_token_id,
            request_end_token_ids=self._request_end_token_ids,
        )

    def forced(self) -> tuple[int, ...]:
        """The tokens into which the tokenizer divides the text that must follow; empty if nothing
        must. The grammar may allow to divide it differently.
        """
        return tuple(self._matcher.compute_ff_tokens())

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may follow, one after the other."""
        return int(self._matcher.validate_tokens(list(token_ids)))

    def add(self, token_id: int) -> bool:
        """Add a token; returns whether it was allowed. If the grammar does not allow an end token of the
        request as such, that token ends the answer like `end_token_id`.
        """
        if token_id in self._request_end_token_ids and not self._matcher.validate_tokens(
            [token_id]
        ):
            token_id = self._end_token_id
        return bool(self._matcher.consume_token(token_id))

    def fill(self, words: Words) -> bool:
        """Write the mask of the tokens that may follow into `words`, the row of a sequence.

        Returns False if no token may follow.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if np.count_nonzero(words) == 1:
            self._allow_text_of_special_token(words)
        if self._request_end_token_ids and _is_allowed(words, self._end_token_id):
            for token_id in self._request_end_token_ids:
                words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        return not self._matcher.is_error() and bool(words.any())

    def _allow_text_of_special_token(self, words: Words) -> None:
        """If a grammar forces text that is also a special token, llguidance allows only that token,
        and then refuses it. Allow the ordinary token of the text's first byte instead.

        words: the mask of allowed tokens, of which one word is not 0. It is changed in place.
        """
        word_index = int(np.flatnonzero(words)[0])
        bits = int(words.view(np.uint32)[word_index])
        # several tokens are allowed, or llguidance accepts the only one
        if bits & (bits - 1) or self._matcher.validate_tokens(
            [word_index * 32 + bits.bit_length() - 1]
        ):
            return
        forced_text = self._matcher.compute_ff_bytes()
        if forced_text:
            words[word_index] = 0
            token_id = self._tokenizer.tokenize_bytes(forced_text[:1])[0]
            words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


class Grammars:
    """Compiles and caches the grammars of one model, and creates matchers from them.

    llguidance's tokenizer is built for the first grammar, or by the thread that `prepare` starts.
    """

    def __init__(self, source: Path | GrammarVocabulary, *, vocab_size: int) -> None:
        """source: the model's folder, or the vocabulary that would be read from it. vocab_size: the
        number of logits per position.
        """
        self._source = source
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: LruCache[str, LLMatcher] = LruCache(KEPT_GRAMMARS)

    def prepare(self) -> None:
        """If the tokenizer is large, start to build it in a thread. Does not wait."""
        if (
            isinstance(self._source, Path)
            and _file_bytes(self._source / "tokenizer.json") >= LARGE_FILE_BYTES
        ):
            threading.Thread(target=self._try_to_build_tokenizer, name="holdfast-grammars").start()

    def matcher(self, grammar: str, *, stop_token_ids: Iterable[int] = ()) -> GrammarMatcher:
        """Create a matcher at the start of a grammar.

        stop_token_ids: tokens that end this answer, in addition to those of the tokenizer. Raises
        InvalidRequest if the grammar is invalid, or if the model's tokenizer cannot be used for
        grammars.
        """
        compiled = self._compiled.get(grammar) or self._compile(grammar)
        self._compiled.put(grammar, compiled)
        tokenizer = self._built_tokenizer()
        end_token_ids = tokenizer.eos_tokens
        request_end_token_ids = tuple(
            token_id
            for token_id in stop_token_ids
            if token_id not in end_token_ids and token_id < self._vocab_size
        )
        return GrammarMatcher(
            compiled.deep_copy(),
            tokenizer,
            end_token_id=end_token_ids[0],
            request_end_token_ids=request_end_token_ids,
        )

    def _compile(self, grammar: str) -> LLMatcher:
        """A matcher at the start of a grammar, to be copied for each answer. Raises InvalidRequest."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._built_tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            raise InvalidRequest(
                f"the grammar cannot be used: {first_line(matcher.get_error())}", field="grammar"
            )
        return matcher

    def _try_to_build_tokenizer(self) -> None:
        """Build the tokenizer in a separate thread, before it is needed."""
        try:
            self._built_tokenizer()
        except HoldfastError:
            return  # the first request with a grammar gets the error

    def _built_tokenizer(self) -> LLTokenizer:
        """llguidance's tokenizer, built at the first call; any thread. Raises InvalidRequest."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                try:
                    source = self._source
                    vocabulary = (
                        GrammarVocabulary.of_folder(source) if isinstance(source, Path) else source
                    )
                    end_token_ids = list(vocabulary.end_token_ids) or None
                    self._tokenizer = LLTokenizer(
                        vocabulary.tokenizer_json, n_vocab=self._vocab_size, eos_token=end_token_ids
                    )
                except (ModelLoadError, ValueError) as error:
                    raise InvalidRequest(
                        f"this model does not support grammars: {first_line(str(error))}",
                        field="grammar",
                    ) from error
            return self._tokenizer


def first_line(text: str) -> str:
    """The first line of an error message of llguidance; the other lines dump its internal state."""
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 1] + "…"


def _is_allowed(words: Words, token_id: int) -> bool:
    """Whether a mask allows a token."""
    return bool(words.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))


def _file_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


class ThoughtMeter:
    """Counts the reasoning tokens of one answer.

    All thoughts (pieces of reasoning) share one budget. Once the budget is spent, a thought has to
    end as soon as it begins.
    """

    def __init__(self, budget: ThinkingBudget) -> None:
        self._start_marker = budget.start_token_ids
        self._end_marker = budget.end_token_ids
        self._tokens_left = budget.tokens
        self._is_thinking = not budget.start_token_ids
        # since the thought began or ended; at most as many as the awaited marker has
        self._latest_tokens: list[int] = []

    def add(self, token_id: int) -> None:
        """Add the next token of the answer; it may complete the marker that is awaited."""
        marker = self._end_marker if self._is_thinking else self._start_marker
        self._tokens_left -= self._is_thinking
        self._latest_tokens = [*self._latest_tokens, token_id][-len(marker) :] if marker else []
        if marker and tuple(self._latest_tokens) == marker:
            self._is_thinking = not self._is_thinking
            self._latest_tokens = []

    @property
    def forced_tokens(self) -> tuple[int, ...]:
        """The tokens that must follow because the budget is spent: the rest of the end marker.
        Empty if any token may follow.
        """
        if not self._is_thinking or self._tokens_left > 0:
            return ()
        return self._end_marker[_matched_length(self._end_marker, self._latest_tokens) :]


def _matched_length(marker: Sequence[int], tokens: Sequence[int]) -> int:
    """The length of the longest incomplete prefix of the marker with which `tokens` ends."""
    most_tokens = min(len(tokens), len(marker) - 1)
    return next(
        (n for n in range(most_tokens, 0, -1) if tuple(tokens[-n:]) == tuple(marker[:n])), 0
    )


class Constraints:
    """The constraints of one model's sequences. Device thread only."""

    def __init__(self, grammars: Grammars | None, *, vocab_size: int) -> None:
        """grammars: None: requests with a grammar are refused. vocab_size: logits per position."""
        self.figures = ConstraintFigures()
        self.words_per_row = -(-vocab_size // 32)
        self._grammars = grammars

    def for_request(
        self, request: SequenceRequest, *, generated: Sequence[int] = ()
    ) -> SequenceConstraint | None:
        """Create the constraint of a sequence after the tokens in `generated`. Returns None if the
        request has neither a grammar nor a thinking budget.

        Raises InvalidRequest if the grammar is invalid or does not allow the generated tokens.
        """
        budget = request.thinking_budget
        if not request.grammar and budget is None:
            return None
        constraint = SequenceConstraint(
            matcher=self._matcher(request) if request.grammar else None,
            meter=None if budget is None else ThoughtMeter(budget),
            figures=self.figures,
        )
        for token_id in generated:
            constraint.add(token_id)
        if constraint.failure:
            raise InvalidRequest(constraint.failure, field="grammar")
        self.figures.sequences += not generated
        return constraint

    def with_budget(
        self,
        constraint: SequenceConstraint | None,
        budget: ThinkingBudget,
        *,
        generated: Sequence[int],
    ) -> SequenceConstraint:
        """Give a sequence a new thinking budget after the tokens in `generated`, and return its
        constraint. constraint: None if the sequence had none.
        """
        if constraint is None:
            self.figures.sequences += 1
            constraint = SequenceConstraint(matcher=None, meter=None, figures=self.figures)
        constraint.meter = ThoughtMeter(budget)
        for token_id in generated:
            constraint.meter.add(token_id)
        return constraint

    def _matcher(self, request: SequenceRequest) -> GrammarMatcher:
        """A matcher at the start of the request's grammar. Raises InvalidRequest."""
        if self._grammars is None:
            raise InvalidRequest("this model does not support grammars", field="grammar")
        return self._grammars.matcher(request.grammar, stop_token_ids=request.stop_token_ids)


@dataclass(slots=True, eq=False)
class SequenceConstraint:
    """Limits the next token of one sequence, given the tokens that it has generated."""

    matcher: GrammarMatcher | None  # None: no grammar
    meter: ThoughtMeter | None  # None: no thinking budget
    figures: ConstraintFigures  # counters of all sequences of the model
    failure: str = field(default="", init=False)  # why no token can be generated any more

    def add(self, token_id: int) -> None:
        """Add the next token. If the grammar does not allow it, `failure` is set."""
        if self.meter is not None:
            self.meter.add(token_id)
        if self.matcher is not None and not self.failure and not self.matcher.add(token_id):
            self._fail(f"the grammar does not allow token {token_id}: {self.matcher.error}")

    def copy(self) -> SequenceConstraint:
        """A constraint to try tokens with. Its work is not counted in `figures`."""
        copied = replace(
            self,
            matcher=None if self.matcher is None else self.matcher.copy(),
            meter=copy(self.meter),
            figures=ConstraintFigures(),
        )
        copied.failure = self.failure
        return copied

    def draft(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens of a draft that the grammar allows, or those that it forces."""
        if self.matcher is None or self.failure:
            return token_ids
        return self.matcher.forced() or token_ids[: self.matcher.count_allowed(token_ids)]

    def forced_token(self) -> int | None:
        """The token that must follow because a thought has to end; None if no token is forced."""
        forced_tokens = () if self.meter is None else self.meter.forced_tokens
        if not forced_tokens or (
            self.matcher is not None
            and self.matcher.count_allowed(forced_tokens) < len(forced_tokens)
        ):
            # The grammar has precedence. For example, it does not let a thought end in the middle
            # of a character, so the thought continues for another token.
            return None
        return forced_tokens[0]

    def fill(self, words: Words) -> bool:
        """Write the mask of allowed tokens into `words`, the row of this sequence.

        Returns False if there is no mask: no grammar limits the token, or no token may follow; in
        the latter case, `failure` is set.
        """
        if self.matcher is None or self.failure:
            return False
        began_at = time.perf_counter()
        is_open = self.matcher.fill(words)
        self.figures.masks += 1
        self.figures.mask_seconds += time.perf_counter() - began_at
        if not is_open:
            self._fail(
                f"the grammar cannot continue: {self.matcher.error or 'it allows no token here'}"
            )
        return is_open

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self.figures.failures += 1

"""Finds where a text may be cut so that its pieces, tokenized separately, give the tokens of the
whole text.

A tokenizer first matches its added tokens, then splits the text between them by patterns, and only
then merges. So no merge crosses an added token, or a position where the patterns always split. A
text is cut only where this can be proved.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

_IN_BRACKETS: Final = {"<": re.compile(r"<[^<>\s]{1,64}>"), "[": re.compile(r"\[[^\[\]\s]{1,64}\]")}
_BETWEEN_WORDS = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")
_SHORT_CHARACTERS = 64  # only the last piece may be shorter
_LONG_CHARACTERS = 2048  # longer pieces are cut at the next space between words
_MAX_MARK_LENGTH = 66  # characters after the end of a piece that decide where it ends
# normalizers that never merge a space with the character before it
_LOCAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_SPACES = r"\s+"  # the pattern that matches every space that no other pattern matches
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SUFFIXES = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?i:[sdmt]|ll|ve|re)")
# patterns of which no match contains an ASCII letter followed by a space or depends on the
# preceding text
_SAFE_PATTERNS: Final = frozenset(
    {
        *_GPT2.split("|"),
        *_SUFFIXES,
        r"'(?i:[sdmt]|ll|ve|re)",
        r"\d",
        r"\p{N}",
        r"\p{N}{1,3}",
        r"\p{N}{1,}",
        r"[0-9]",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s*[\r\n]",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{end}"
            for end in ("", *(f"{each}?" for each in _SUFFIXES))
        ),
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{end}"
            for end in ("", *(f"{each}?" for each in _SUFFIXES))
        ),
    }
)


class TextPiece(NamedTuple):
    """A piece of a text.

    run: where its *run* begins. A run is the text between two cuts before added tokens; a long run
    is cut again between words.
    """

    start: int
    end: int
    run: int


NOTHING: Final = TextPiece(0, 0, 0)
"""The piece before the first one."""


@dataclass(frozen=True, slots=True)
class TextSplits:
    """Where texts for one tokenizer may be cut: before some added tokens, and between words."""

    marks: frozenset[str] = frozenset()  # added tokens that are matched wherever they occur
    between_words: bool = False  # whether words are tokenized independently of each other

    def pieces(self, text: str, *, after: TextPiece = NOTHING) -> Iterator[TextPiece]:
        """Cut a text into pieces. Text that is appended changes only the last piece.

        after: a piece of this text that is already known (`settled_pieces`); only the pieces after
        it are returned.
        """
        run, start = after.run, after.end
        mark_starts: list[int] = []
        # one fast search per kind of bracket; one search for all kinds together would be slower
        for bracket in {mark[0] for mark in self.marks}:
            matches = _IN_BRACKETS[bracket].finditer(text, start)
            mark_starts += [each.start() for each in matches if each.group() in self.marks]
        for mark_start in sorted(mark_starts):
            if mark_start - run >= _SHORT_CHARACTERS:
                if mark_start > start:
                    yield from self._cut_between_words(text, run, start, mark_start)
                run = start = mark_start
        if start < len(text):
            yield from self._cut_between_words(text, run, start, len(text))

    def _cut_between_words(self, text: str, run: int, start: int, end: int) -> Iterator[TextPiece]:
        """Cut a part of a run, if it is long, at spaces between words, if that is safe for the
        tokenizer.
        """
        while self.between_words and end - start > _LONG_CHARACTERS:
            space = _BETWEEN_WORDS.search(text, start + _LONG_CHARACTERS, end)
            if space is None:
                break
            yield TextPiece(start, space.start(), run)
            start = space.start()
        yield TextPiece(start, end, run)


def settled_pieces(pieces: Sequence[TextPiece], characters: int) -> int:
    """How many of a text's pieces are the same in all texts with the same first `characters`."""
    return bisect_right(pieces, characters - _MAX_MARK_LENGTH, key=lambda piece: piece.end)


def find_splits(backend: Backend) -> TextSplits:
    """Find out where texts for a tokenizer can be proved safe to cut.

    If one of the tokenizer's parts is unknown, texts are not cut at all.
    """
    added = list(backend.get_added_tokens_decoder().values())
    if (
        getattr(backend.model, "dropout", None)
        or backend.encode_special_tokens
        or any(token.single_word for token in added)
    ):
        return TextSplits()  # merges are random, or whether a token matches depends on its context
    return TextSplits(
        marks=frozenset(
            _tokens_without_overlap(
                token for token in added if token.content and not token.normalized
            )
        ),
        between_words=(
            isinstance(backend.model, models.BPE)
            and not any(token.rstrip or re.search("[A-Za-z] ", token.content) for token in added)
            and _splits_words(_stages(backend.pre_tokenizer, "pretokenizers"))
            and _is_independent_of_preceding(_stages(backend.normalizer, "normalizers"))
        ),
    )


def _tokens_without_overlap(tokens: Iterable[AddedToken]) -> set[str]:
    """The tokens that match wherever their text occurs, because no other token can overlap them.

    The library takes the leftmost match, and the longest of several, so only a token that starts
    earlier could. Only tokens in brackets are considered, because they are found quickly.
    """
    contents = {token.content: token for token in tokens}
    independent = {
        content
        for content, token in contents.items()
        if not token.lstrip
        and not token.rstrip
        and any(pattern.fullmatch(content) for pattern in _IN_BRACKETS.values())
    }
    for other in contents:
        for opening, pattern in _IN_BRACKETS.items():
            independent -= {mark for mark in pattern.findall(other) if mark != other}
            opening_index = other.rfind(opening)
            if opening_index > 0:
                independent = {
                    mark for mark in independent if not mark.startswith(other[opening_index:])
                }
    return independent


def _stages(component: Any, parts_key: str) -> list[Mapping[str, Any]]:
    """The stages of a normalizer or pre-tokenizer, with nested sequences flattened."""
    return [] if component is None else _flattened(json.loads(component.__getstate__()), parts_key)


def _flattened(stage: Mapping[str, Any], parts_key: str) -> list[Mapping[str, Any]]:
    if stage["type"] != "Sequence":
        return [stage]
    return [each for part in stage[parts_key] for each in _flattened(part, parts_key)]


def _is_independent_of_preceding(stages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether normalizing a text that begins with a space does not depend on the preceding text."""
    return all(
        stage["type"] in _LOCAL_NORMALIZERS
        or (stage["type"] == "Replace" and _is_non_ascii_character(stage["pattern"]))
        for stage in stages
    )


def _is_non_ascii_character(pattern: Mapping[str, Any]) -> bool:
    """Whether a pattern is one character outside ASCII."""
    character = str(pattern.get("String", ""))
    return len(character) == 1 and character > "\x7f"


def _splits_words(stages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the patterns always split before a single space between ASCII letters."""
    has_split = False
    for stage in stages:
        if stage["type"] == "Split" and stage["behavior"] == "Removed":
            if not _is_non_ascii_character(stage["pattern"]):
                return False
            continue
        if (
            stage["type"] == "Split"
            and stage["behavior"] == "Isolated"
            and not stage["invert"]
            and "Regex" in stage["pattern"]
        ):
            patterns = _alternatives(stage["pattern"]["Regex"])
        elif stage["type"] == "ByteLevel" and not stage["add_prefix_space"]:
            patterns = _GPT2.split("|") if stage["use_regex"] else []
        elif stage["type"] == "Digits":
            patterns = []
        else:
            return False
        if not _SAFE_PATTERNS.issuperset(patterns):
            return False
        has_split = has_split or _SPACES in patterns
    return has_split


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern at its outermost level."""
    alternatives = []
    depth = 0
    start = 0
    for part in re.finditer(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]", pattern, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(part.group(), 0)
        if part.group() == "|" and depth == 0:
            alternatives.append(pattern[start : part.start()])
            start = part.end()
    return [*alternatives, pattern[start:]]

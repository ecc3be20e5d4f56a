"""Where a text may be cut, so that its pieces come to the same tokens alone as within the whole.

A tokenizer first looks for its added tokens, then splits what is between them by patterns, and only
then merges. So nothing merges over an added token, and nothing over a place at which the patterns
always split. What cannot be proved is not cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

_IN_BRACKETS: Final = {"<": re.compile(r"<[^<>\s]{1,64}>"), "[": re.compile(r"\[[^\[\]\s]{1,64}\]")}
_BETWEEN_WORDS = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")
_SHORT_CHARACTERS = 64  # no piece is shorter, but for the last
_LONG_CHARACTERS = 2048  # a piece is cut between words behind so many
# no space joins what stands before it
_LOCAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_SPACES = r"\s+"  # what takes every space that nothing else takes
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SUFFIXES = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?i:[sdmt]|ll|ve|re)")
# no match has a letter of ASCII and a space behind it, and none looks at what is before it
_KNOWN: Final = frozenset(
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


@dataclass(frozen=True, slots=True)
class Seams:
    """The places at which one tokenizer's texts may be cut: in front of some added tokens, and
    between words of long pieces.
    """

    marks: frozenset[str] = frozenset()  # added tokens that are themselves wherever they stand
    between_words: bool = False

    def pieces(self, text: str) -> Iterator[str]:
        """The text in pieces.

        How a beginning is cut does not depend on what comes behind it, but for its last piece.
        """
        start, marks = 0, []
        # a search for one character is fast, one for several is not
        for kind in {mark[0] for mark in self.marks}:
            marks += [
                found.start()
                for found in _IN_BRACKETS[kind].finditer(text)
                if found.group() in self.marks
            ]
        for mark in sorted(marks):
            if mark - start >= _SHORT_CHARACTERS:
                yield from self._bounded(text[start:mark])
                start = mark
        if start < len(text):
            yield from self._bounded(text[start:])

    def _bounded(self, piece: str) -> Iterator[str]:
        start = 0
        while self.between_words and len(piece) - start > _LONG_CHARACTERS:
            space = _BETWEEN_WORDS.search(piece, start + _LONG_CHARACTERS)
            if space is None:
                break
            yield piece[start : space.start()]
            start = space.start()
        yield piece[start:] if start else piece


def find_seams(backend: Backend) -> Seams:
    """What can be proved of a tokenizer, by its parts.

    Nothing where one of them is not known to be harmless.
    """
    added = list(backend.get_added_tokens_decoder().values())
    if (
        getattr(backend.model, "dropout", None)
        or backend.encode_special_tokens
        or any(token.single_word for token in added)
    ):
        return Seams()  # drawn by lot; or a token is one only where no letter stands beside it
    is_bounded = not any(token.rstrip or re.search("[A-Za-z] ", token.content) for token in added)
    splits = _splits_words(_stages(backend.pre_tokenizer, "pretokenizers"))
    return Seams(
        marks=frozenset(
            _independent(token for token in added if token.content and not token.normalized)
        ),
        between_words=(
            is_bounded
            and splits
            and isinstance(backend.model, models.BPE)
            and _is_local(_stages(backend.normalizer, "normalizers"))
        ),
    )


def _independent(tokens: Iterable[AddedToken]) -> set[str]:
    """Those that are found wherever their text stands: no other one begins before them and takes a
    part of it.

    The library takes the leftmost, and of several there the longest. Only texts in brackets, which
    are quickly found.
    """
    contents = {token.content: token for token in tokens}
    found = {
        content
        for content, token in contents.items()
        if not token.lstrip
        and not token.rstrip
        and any(pattern.fullmatch(content) for pattern in _IN_BRACKETS.values())
    }
    for other in contents:
        for opening, pattern in _IN_BRACKETS.items():
            found -= {mark for mark in pattern.findall(other) if mark != other}
            if (begun := other[other.rfind(opening) :]) != other and other.rfind(opening) > 0:
                found = {mark for mark in found if not mark.startswith(begun)}
    return found


def _stages(part: Any, inner: str) -> list[Mapping[str, Any]]:
    """A part of a tokenizer as the sequence that it comes to."""
    return [] if part is None else _flat(json.loads(part.__getstate__()), inner)


def _flat(stage: Mapping[str, Any], inner: str) -> list[Mapping[str, Any]]:
    if stage["type"] != "Sequence":
        return [stage]
    return [each for part in stage[inner] for each in _flat(part, inner)]


def _is_local(stages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether texts that begin with a space are normalized the same whatever stands before them."""
    return all(
        stage["type"] in _LOCAL_NORMALIZERS
        or (
            stage["type"] == "Replace"
            and len(stage["pattern"].get("String", "")) == 1
            and stage["pattern"]["String"] > "\x7f"
        )
        for stage in stages
    )


def _splits_words(stages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the patterns always split in front of a single space between letters of ASCII."""
    has_split = False
    for stage in stages:
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
        if not _KNOWN.issuperset(patterns):
            return False
        has_split = has_split or _SPACES in patterns
    return has_split


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern at its outermost level."""
    found, depth, start = [], 0, 0
    for part in re.finditer(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]", pattern, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(part.group(), 0)
        if part.group() == "|" and depth == 0:
            found.append(pattern[start : part.start()])
            start = part.end()
    return [*found, pattern[start:]]

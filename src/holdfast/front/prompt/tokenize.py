"""Converts text to token ids and back.

Uses the `tokenizers` library alone: `transformers` would cost the front process 50 MB.
"""

from __future__ import annotations

import copy
import os
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from tokenizers import Encoding, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from holdfast.errors import UnusableModel
from holdfast.front.answers.pieces import TokenPieces
from holdfast.front.prompt.text_splits import find_splits
from holdfast.models.tokenizer_files import (
    add_missing_tokens,
    end_token_ids,
    eos_token_ids,
    named_special_tokens,
    read_backend,
    tokenizer_config,
    vocabulary_size,
)
from holdfast.wire.requests import TokenIds

Guard: TypeAlias = Callable[[str], str]
"""Breaks up the control texts in a text, so that they are tokenized as ordinary text."""

SAMPLES = {
    "runs of spaces": "a b  c   d    e        f",
    "lines and tabs": "one\n\ntwo\n\tthree\n\t\tfour\n    five\r\nsix",
    "digits": "0 12 345 6789 1234567890 3.1415926",
    "code": "def f(x: int) -> dict:\n    return {'a': [x**2, -1], \"b\": None}  # ok\n\nif x != '':\n    print(f(7))\n",
    "punctuation": "Well... don't! (50 % of $1,000) -> <a href='x'>y</a> & more; #1 @home ~ ^ ` | \\",
    "accented Latin": "Crème brûlée, Größe, señor, smörgåsbord, Łódź, İstanbul",
    "Cyrillic and Greek": "Привет, мир! Γειά σου Κόσμε",
    "Chinese, Japanese, Korean": "你好，世界。こんにちは、カタカナ。안녕하세요 세계",
    "right-to-left scripts": "שלום עולם، مرحبا بالعالم",
    "Indic and Thai": "नमस्ते दुनिया வணக்கம் สวัสดีชาวโลก",
    "emoji": "🙂 🎉🎉 👍🏽 🇩🇪 ❤️ 1️⃣",
    "joined emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👨🏿‍💻",
    "rare characters": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ∀x∈ℝ: ⌈x⌉ ≥ x 𓀀 ‰ ½",
}
# Unicode noncharacters, which no text contains. The tokenizer drops `_BREAK` during normalization,
# and `_SPLIT` after it.
_BREAK: Final = "\ufdd5"
_SPLIT: Final = "\ufdd4"
_BREAKS: Final = re.compile(f"[{_BREAK}{_SPLIT}]")
_ESCAPED: Final = "\\ufdd"
_ESCAPED_BREAKS: Final = {f"{_ESCAPED}5": _BREAK, f"{_ESCAPED}4": _SPLIT}
# the usual form of markers, which distinguishes them from HTML elements
_MARKER_PATTERN = re.compile(r"<[|｜].*|.*[|｜]>", re.DOTALL)
_MARKUP_PATTERN = re.compile(r"[A-Za-z].*[^\w\s]|[^\w\s].*[A-Za-z]", re.DOTALL)
_AROUND_WORD = re.compile(r"^[\W_]+|[\W_]+$")
_SHORT_CHARACTERS = 4096  # takes about 1 ms to tokenize
_SHOWN_TOKENS = 16  # maximum number of tokens shown in an error message


class Tokenizer:
    """A model's tokenizer with its special tokens. Immutable once built; thread-safe."""

    def __init__(
        self, backend: Backend, *, config: Mapping[str, Any], eos_token_ids: Sequence[int] = ()
    ) -> None:
        """config: tokenizer_config.json. eos_token_ids: the end tokens named by other files."""
        # some files were saved with the truncation and padding used in training
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = named_special_tokens(config)
        add_missing_tokens(backend, config, self.special_tokens)
        added = backend.get_added_tokens_decoder().values()
        # texts of the tokens that are marked as special
        self.special_texts = tuple(
            token.content for token in added if token.special and token.content
        )
        # added tokens that are looked for in the normalized text
        self._normalized = frozenset(token.content for token in added if token.normalized)
        _drop_breaks(backend, with_splits=bool(self._normalized))
        # texts that clients may not write: special tokens, and those that look like markers
        self.control_texts = frozenset(
            token.content
            for token in added
            if token.special or _MARKER_PATTERN.fullmatch(token.content)
        )
        # finds control texts in the texts of clients
        self.guard = ControlGuard(self.control_texts, normalized=self._normalized)
        self.pieces = TokenPieces(backend)
        self.vocab_size = vocabulary_size(backend)
        bos = self.special_tokens.get("bos_token")
        self.bos_token_id = None if bos is None else backend.token_to_id(bos)
        self.splits = find_splits(backend)  # where texts may be cut
        plain_ids, complete_ids = (
            backend.encode("a", add_special_tokens=special).ids for special in (False, True)
        )
        # whether the tokenizer appends a special token to every text
        self.ends_texts = plain_ids[-1:] != complete_ids[-1:]
        prefix_length = next(
            (
                index
                for index in range(len(complete_ids))
                if complete_ids[index : index + len(plain_ids)] == plain_ids
            ),
            0,
        )
        # special tokens added before every text
        self._prefix = TokenIds.of(complete_ids[:prefix_length])
        # special tokens added after every text
        self._suffix = TokenIds.of(complete_ids[prefix_length + len(plain_ids) :])
        self.eos_token_ids = end_token_ids(backend, self.special_tokens, named=eos_token_ids)

    def guarding(self, texts: Iterable[str]) -> Tokenizer:
        """This tokenizer with additional control texts, which need not be tokens."""
        control_texts = self.control_texts.union(texts)
        if control_texts == self.control_texts:
            return self
        guarding_tokenizer = copy.copy(self)
        guarding_tokenizer.control_texts = control_texts
        guarding_tokenizer.guard = ControlGuard(control_texts, normalized=self._normalized)
        return guarding_tokenizer

    def markup_in(self, text: str) -> frozenset[str]:
        """The added tokens in a text, such as a chat template, that look like markup."""
        added = self.backend.get_added_tokens_decoder().values()
        contents = {token.content for token in added} - self.control_texts
        return frozenset(each for each in contents if _MARKUP_PATTERN.search(each) and each in text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text.

        Do not tokenize long texts on the event loop's thread: 10,000 tokens take 10 ms.
        """
        (encoding,) = self._encodings([well_formed(text)], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_text(self, text: str) -> list[int]:
        """The token ids of a text, with control texts tokenized as ordinary text."""
        return self.encode(self.guard(text), add_special_tokens=False)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of several texts, without special tokens around them."""
        return [encoding.ids for encoding in self._encodings(texts)]

    def encode_in_place(self, texts: Sequence[str]) -> list[EncodedText]:
        """Encode texts without special tokens, and keep the position of each token in its text."""
        encodings = self._encodings(texts, with_places=True)
        return [
            EncodedText(each, characters=len(text))
            for text, each in zip(texts, encodings, strict=True)
        ]

    def with_special_tokens(self, token_ids: TokenIds) -> TokenIds:
        """Add the special tokens that this tokenizer puts around texts to the tokens of a text."""
        return TokenIds.joined((self._prefix, token_ids, self._suffix))

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids. Unknown ids are left out."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _encodings(
        self, texts: Sequence[str], *, add_special_tokens: bool = False, with_places: bool = False
    ) -> Sequence[Encoding]:
        """Encode texts with the fastest function of the library. with_places: whether the positions
        of tokens are needed.
        """
        # Only the library's batch functions release the GIL (measured), and the fast one omits
        # offsets. For a short text, waking the library's threads takes longer than tokenizing.
        if sum(map(len, texts)) <= _SHORT_CHARACTERS:
            return [
                self.backend.encode(text, add_special_tokens=add_special_tokens) for text in texts
            ]
        encode = self.backend.encode_batch if with_places else self.backend.encode_batch_fast
        return encode(list(texts), add_special_tokens=add_special_tokens)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a model folder. Raises UnusableModel."""
    return Tokenizer(
        read_backend(folder), config=tokenizer_config(folder), eos_token_ids=eos_token_ids(folder)
    )


def well_formed(text: str) -> str:
    """The text with lone surrogates, which JSON can carry and UTF-8 cannot, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _drop_breaks(backend: Backend, *, with_splits: bool) -> None:
    """Make the tokenizer drop break characters after it has matched its added tokens.

    Break characters are put into texts of clients, to break up control texts. Added tokens are
    matched before normalization, so a token that is broken up by `_BREAK` is tokenized as ordinary
    text. Some are matched after normalization instead; only they need `_SPLIT`, which also splits
    the text.
    """
    drop_breaks = normalizers.Replace(_BREAK, "")
    if backend.normalizer is None:
        backend.normalizer = drop_breaks
    else:
        backend.normalizer = normalizers.Sequence([drop_breaks, backend.normalizer])
    if not with_splits:
        return
    split_at_breaks = pre_tokenizers.Split(_SPLIT, "removed")
    if backend.pre_tokenizer is None:
        backend.pre_tokenizer = split_at_breaks
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence([split_at_breaks, backend.pre_tokenizer])


class ControlGuard:
    """Breaks up control texts, so that they are tokenized as ordinary text. Immutable."""

    def __init__(self, texts: Iterable[str], *, normalized: Collection[str] = ()) -> None:
        """normalized: the tokens that the tokenizer matches after normalization."""
        # spelled break characters too, or `with_unescaped_breaks` would take them for its own
        control_texts = {text for text in (*texts, *_ESCAPED_BREAKS) if len(text) > 1}
        # normalization turns spaces into this mark in some tokenizers
        normalized_texts = {
            spelled
            for text in control_texts.intersection(normalized)
            for spelled in (text, text.replace("▁", " "), text.replace(" ", "▁"))
        }
        # patterns, and the break character to insert after each of their matches
        self._substitutions = [
            (_first_characters_pattern(group), character)
            for group, character in (
                (normalized_texts, _SPLIT),
                (control_texts.difference(normalized), _BREAK),
            )
            if group
        ]
        # the break for each control text without its punctuation, for `name`
        self._break_of_word = {_AROUND_WORD.sub("", text): _BREAK for text in control_texts}
        self._break_of_word |= {_AROUND_WORD.sub("", text): _SPLIT for text in normalized_texts}

    def __call__(self, text: str) -> str:
        """The text with its control texts broken up."""
        text = without_breaks(text)  # a client's own breaks would be dropped later
        for pattern, character in self._substitutions:
            if pattern.search(text):  # a substitution without a match takes five times as long
                text = pattern.sub(rf"\g<0>{character}", text)
        return text

    def name(self, text: str) -> str:
        """A guarded name or key, which a template may write into a tag.

        `think` would become a control text in `<think>`.
        """
        guarded = self(text)
        character = self._break_of_word.get(_AROUND_WORD.sub("", text)) if guarded == text else None
        return guarded if character is None or not text else character + guarded


def _first_characters_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches the first character of each of the texts."""
    rests: dict[str, set[str]] = {}
    for text in texts:
        rests.setdefault(text[0], set()).add(text[1:])
    return re.compile(
        "|".join(f"{re.escape(first)}(?={_any_of_pattern(rest)})" for first, rest in rests.items())
    )


def without_breaks(text: str) -> str:
    """The text without the characters that break up control texts."""
    return _BREAKS.sub("", text) if _BREAK in text or _SPLIT in text else text


def with_unescaped_breaks(text: str) -> str:
    """The rendered text, with break characters that a template escaped, as in JSON, restored."""
    if _ESCAPED in text:
        for escaped, character in _ESCAPED_BREAKS.items():
            text = text.replace(escaped, character)
    return text


def guarded_value(value: Any, guard: Guard) -> Any:
    """A JSON value with the guard applied to all of its texts."""
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return {
            guarded_value(key, guard): guarded_value(each, guard) for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [guarded_value(each, guard) for each in value]
    return value


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of the texts and prefers longer ones."""
    return re.compile(_any_of_pattern({*texts}))


def _any_of_pattern(texts: Collection[str]) -> str:
    """A pattern for any of the texts, in which common prefixes are shared.

    Trying thousands of alternatives one by one would take milliseconds per match.
    """
    groups: dict[str, list[str]] = {}
    for text in sorted(texts):
        groups.setdefault(text[:1], []).append(text)
    branches = []
    for group in groups.values():
        common_beginning = os.path.commonprefix(group)  # noqa: RUF071 - compares characters on purpose
        endings = [text[len(common_beginning) :] for text in group if text != common_beginning]
        endings_pattern = f"(?:{_any_of_pattern(endings)})" if endings else ""
        is_whole = bool(endings) and common_beginning in group
        branches.append(f"{re.escape(common_beginning)}{endings_pattern}{'?' if is_whole else ''}")
    return "|".join(branches)


class TokenPlace(NamedTuple):
    """A character's position among the tokens of its text."""

    before: int  # number of tokens that end at or before the character
    is_edge: bool  # True if no token spans the position


class EncodedText:
    """The tokens of a text, and their positions in the text.

    The position of a token is looked up when it is needed: a list of all positions would take 4 ms
    for 25,000 tokens.
    """

    def __init__(self, encoding: Encoding, *, characters: int) -> None:
        """characters: length of the text."""
        self._encoding = encoding
        self._characters = characters
        self.token_ids = TokenIds.of(encoding.ids)  # `ids` is a new list on every access

    def place(self, character: int) -> TokenPlace:
        """The position of a character among the tokens.

        The index `characters` means the end of the text.
        """
        before = self.tokens_before(character)
        if before == len(self.token_ids):
            return TokenPlace(before, is_edge=True)
        start, _ = self.characters_of(before)
        return TokenPlace(before, is_edge=start >= character)

    def tokens_before(self, character: int) -> int:
        """The number of tokens that end at or before a character."""
        token = self._encoding.char_to_token(character)
        if token is not None:
            return token
        if character >= self._characters:
            return len(self.token_ids)
        return bisect_right(self._spans, character, key=lambda span: span[1])

    def characters_of(self, token: int) -> tuple[int, int]:
        """The range of characters that the token at this index covers."""
        return self._encoding.token_to_chars(token) or self._spans[token]

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        """The range of tokens that make up the characters from `start` to `end`.

        Returns None if the range is empty, or if `start` or `end` is inside a token.
        """
        return token_span(self.place(start), self.place(end))

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        return self._encoding.offsets


def token_span(start: TokenPlace, end: TokenPlace) -> tuple[int, int] | None:
    """The range of tokens between two positions; None if it is empty or a token spans one."""
    if not start.is_edge or not end.is_edge or start.before >= end.before:
        return None
    return start.before, end.before


def check_round_trip(tokenizer: Tokenizer) -> None:
    """Raise UnusableModel unless sample texts and special tokens survive encoding and decoding.

    The decoded text may differ by Unicode normalization (NFC or NFKC) and by a leading space,
    because the tokenizers of some families do that.
    """
    for kind, sample in SAMPLES.items():
        token_ids = tokenizer.encode(sample, add_special_tokens=False)
        decoded = tokenizer.decode(token_ids, skip_special_tokens=False)
        accepted_texts = {
            sample,
            *(unicodedata.normalize(form, sample) for form in ("NFC", "NFKC")),
        }
        if accepted_texts.isdisjoint((decoded, decoded.removeprefix(" "))):
            raise UnusableModel(
                f"the tokenizer is broken ({kind}): {sample!r} is decoded as {decoded!r} (tokens "
                f"{_abbreviated(token_ids)})"
            )
    for token_id, token in tokenizer.backend.get_added_tokens_decoder().items():
        if token.special and token.content:
            _check_special_token(tokenizer, token_id, token.content)


def _check_special_token(tokenizer: Tokenizer, token_id: int, content: str) -> None:
    """Raise UnusableModel unless a special token is encoded as itself, and decoded as its text."""
    token_ids = tokenizer.encode(content, add_special_tokens=False)
    if token_ids != [token_id]:
        raise UnusableModel(
            f"the tokenizer is broken: the special token {content!r} has id {token_id}, but its "
            f"text is encoded as {_abbreviated(token_ids)}"
        )
    decoded = tokenizer.decode([token_id], skip_special_tokens=False)
    # Decoders in SentencePiece's manner turn ▁ into a space even within the name of a special
    # token. That is harmless: these tokens are not shown.
    if decoded.strip() not in (content.strip(), content.replace("▁", " ").strip()):
        raise UnusableModel(
            f"the tokenizer is broken: the special token {content!r} (id {token_id}) is decoded as "
            f"{decoded!r}"
        )


def _abbreviated(token_ids: list[int]) -> str:
    if len(token_ids) <= _SHOWN_TOKENS:
        return str(token_ids)
    return f"{token_ids[:_SHOWN_TOKENS]} and {len(token_ids) - _SHOWN_TOKENS} more"

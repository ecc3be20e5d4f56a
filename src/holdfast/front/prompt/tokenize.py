"""Text to token ids and back, with the `tokenizers` library alone: `transformers` would cost the
front process 50 MB.
"""

from __future__ import annotations

import re
import sys
import threading
import unicodedata
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec
from tokenizers import Encoding, normalizers
from tokenizers import Tokenizer as Backend

from holdfast.config import DEFAULT_MODEL
from holdfast.errors import ModelLoadError
from holdfast.front.answers.pieces import TokenPieces
from holdfast.front.prompt.text_splits import find_seams
from holdfast.front.prompt.tool_definitions import KeptTool, made_once
from holdfast.models.tokenizer_files import (
    add_missing_tokens,
    end_token_ids,
    eos_token_ids,
    named_special_tokens,
    read_backend,
    tokenizer_config,
    vocabulary_size,
)
from holdfast.wire.requests import ChatPrompt, TokenIds

_BREAK: Final = "\ufdd5"  # a noncharacter of Unicode: no text has it
Guard: TypeAlias = Callable[[str], str]
_SHORT_CHARACTERS = 4096  # about 1 ms
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
_ENTRY_BYTES = 400  # of a piece, however short: its key, its record, their places in the table
_PLACE_BYTES = 200


def leave_out_breaks(backend: Backend) -> None:
    """Have the tokenizer drop the breaks: added tokens are looked for in what is not normalized
    yet.
    """
    drop = normalizers.Replace(_BREAK, "")
    backend.normalizer = (
        drop if backend.normalizer is None else normalizers.Sequence([drop, backend.normalizer])
    )


def guard_against(backend: Backend) -> Guard:
    """A function that breaks the control tokens in a text.

    Tokens that are matched in normalized text cannot be broken.
    """
    added = backend.get_added_tokens_decoder().values()
    contents = [
        token.content
        for token in added
        if token.special and not token.normalized and len(token.content) > 1
    ]
    if not contents:
        return lambda text: text
    pattern = re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True))))
    return lambda text: pattern.sub(lambda found: found[0][0] + _BREAK + found[0][1:], text)


def guarded(prompt: ChatPrompt, guard: Guard) -> ChatPrompt:
    """The conversation with all that is not the model's own text broken where it spells a control
    token.
    """
    messages = tuple(
        message if not isinstance(message, dict) or message.get("role") == "assistant" or "content" not in message
        else {**message, "content": _guarded(message["content"], guard)}
        for message in prompt.messages
    )  # fmt: skip
    return msgspec.structs.replace(
        prompt, messages=messages, tools=tuple(_guarded_tool(tool, guard) for tool in prompt.tools)
    )


def _guarded_tool(tool: Any, guard: Guard) -> Any:
    if isinstance(tool, KeptTool):
        return made_once(tool, guard, lambda: KeptTool(_guarded(tool, guard)))
    return _guarded(tool, guard)


def _guarded(value: Any, guard: Guard) -> Any:
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return {key: _guarded(each, guard) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_guarded(each, guard) for each in value]
    return value


class Tokenizer:
    """A model's tokenizer with its special tokens.

    Immutable after it is built; may be used from several threads.
    """

    def __init__(
        self, backend: Backend, *, config: Mapping[str, Any], eos_token_ids: Sequence[int] = ()
    ) -> None:
        """config: tokenizer_config.json. eos_token_ids: those that the model's own files name."""
        # some files were saved with the truncation and padding of their training
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = named_special_tokens(config)
        add_missing_tokens(backend, config, self.special_tokens)
        leave_out_breaks(backend)
        # breaks what spells a control token in a text that is not the model's
        self.guard = guard_against(backend)
        self.pieces = TokenPieces(backend)
        self.vocab_size = vocabulary_size(backend)
        added = backend.get_added_tokens_decoder().values()
        self.special_texts = tuple(
            token.content for token in added if token.special and token.content
        )
        self.bos_token_id = self._id_of("bos_token")
        self.seams = find_seams(backend)
        plain, complete = (
            backend.encode("a", add_special_tokens=special).ids for special in (False, True)
        )
        self.ends_texts = plain[-1:] != complete[-1:]  # it writes a token behind every text
        before = next(
            (at for at in range(len(complete)) if complete[at : at + len(plain)] == plain), 0
        )
        self._around = TokenIds.of(complete[:before]), TokenIds.of(complete[before + len(plain) :])
        self.eos_token_ids = end_token_ids(backend, self.special_tokens, named=eos_token_ids)

    @property
    def backend(self) -> Backend:
        """The library's tokenizer, for reading its parts."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Long texts belong on another thread than the loop's: 10,000 tokens take about 10 ms.
        """
        (encoding,) = self._encodings([well_formed(text)], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, without special tokens around them."""
        return [encoding.ids for encoding in self._encodings(texts)]

    def encode_in_place(self, texts: Sequence[str]) -> list[EncodedText]:
        """The same, with the places where tokens stand."""
        encodings = self._encodings(texts, with_places=True)
        return [
            EncodedText(each, characters=len(text))
            for text, each in zip(texts, encodings, strict=True)
        ]

    def with_special_tokens(self, token_ids: TokenIds) -> TokenIds:
        """The tokens of a text with the special ones that this tokenizer puts around every text."""
        return TokenIds.joined((self._around[0], token_ids, self._around[1]))

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids. Unknown ids are left out."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; a part of a character where the token is one."""
        return self.pieces.all_bytes(token_id)

    def _encodings(
        self, texts: Sequence[str], *, add_special_tokens: bool = False, with_places: bool = False
    ) -> Sequence[Encoding]:
        # Of the library's functions only those for batches let go of the GIL (measured), and "fast"
        # leaves out the places. They wake threads for it, which takes longer than a short text
        # does.
        if sum(map(len, texts)) <= _SHORT_CHARACTERS:
            return [
                self._backend.encode(text, add_special_tokens=add_special_tokens) for text in texts
            ]
        encode = self._backend.encode_batch if with_places else self._backend.encode_batch_fast
        return encode(list(texts), add_special_tokens=add_special_tokens)

    def _id_of(self, name: str) -> int | None:
        content = self.special_tokens.get(name)
        return None if content is None else self._backend.token_to_id(content)


def well_formed(text: str) -> str:
    """The text with lone surrogates (JSON can carry them, UTF-8 cannot) replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read a model folder's tokenizer. Raises ModelLoadError."""
    return Tokenizer(
        read_backend(folder), config=tokenizer_config(folder), eos_token_ids=eos_token_ids(folder)
    )


class TokenPlace(NamedTuple):
    """How a character stands to the tokens of its text."""

    before: int  # so many end in front of it, or at it
    opens: int | None  # the token that begins exactly with it, when none reaches over its edge
    closes: int | None  # the token behind the one that ends exactly in front of it


class TokenizedText(Protocol):
    """A text's tokens, and where they are in it."""

    @property
    def token_ids(self) -> TokenIds:
        """All of them."""
        ...

    def tokens_before(self, character: int) -> int:
        """Tokens that end at or before a character."""
        ...

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        """Which tokens make up the characters from start to end exactly; None when one of them
        reaches over an edge.
        """
        ...


class EncodedText:
    """What the library made of a text.

    It is asked for single places: all of them, as Python's tuples, cost 4 ms for a text of 25,000
    tokens.
    """

    def __init__(self, encoding: Encoding, *, characters: int) -> None:
        """characters: of the text."""
        self._encoding, self._characters = encoding, characters
        # the library makes the list anew whenever it is asked
        self.token_ids = TokenIds.of(encoding.ids)

    def place(self, character: int) -> TokenPlace:
        """A character's place, which may be the one behind the last."""
        first = self._first_from(character)
        previous_end = self._at(first - 1)[1] if first else 0
        begins = first < len(self.token_ids) and self._at(first)[0] == character
        return TokenPlace(
            before=self.tokens_before(character),
            opens=first if begins and previous_end <= character else None,
            closes=first if first and previous_end == character else None,
        )

    def tokens_before(self, character: int) -> int:
        """Tokens that end at or before a character."""
        found = self._encoding.char_to_token(character)
        if found is None and character >= self._characters:
            return len(self.token_ids)
        return (
            bisect_right(self._all, character, key=lambda offset: offset[1])
            if found is None
            else found
        )

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        """See `TokenizedText`."""
        first, last = self.place(start).opens, self.place(end).closes
        return (first, last) if first is not None and last is not None and first < last else None

    def _first_from(self, character: int) -> int:
        """The first token that begins at or behind a character."""
        if character >= self._characters:
            return len(self.token_ids)
        found = self._encoding.char_to_token(character)
        if found is None or self._at(found)[0] < character:
            return bisect_left(self._all, character, key=lambda offset: offset[0])
        return found

    def _at(self, token: int) -> tuple[int, int]:
        place = self._encoding.token_to_chars(token)
        return self._all[token] if place is None else place

    @cached_property
    def _all(self) -> list[tuple[int, int]]:
        return self._encoding.offsets


def check_round_trip(tokenizer: Tokenizer) -> None:
    """Raise ModelLoadError when a sample text or a special token does not survive encoding and
    decoding.

    Allowed are a Unicode normal form (NFC or NFKC) and a space in front of the text, which some
    families add or take.
    """
    for kind, sample in SAMPLES.items():
        token_ids = tokenizer.encode(sample, add_special_tokens=False)
        came_back = tokenizer.decode(token_ids, skip_special_tokens=False)
        if not _is_same(sample, came_back):
            raise ModelLoadError(
                f"the tokenizer is broken ({kind}): {sample!r} came back as {came_back!r} (tokens "
                f"{_short(token_ids)})"
            )
    for token_id, token in tokenizer.backend.get_added_tokens_decoder().items():
        if token.special and token.content:
            _check_special_token(tokenizer, token_id, token.content)


def _check_special_token(tokenizer: Tokenizer, token_id: int, content: str) -> None:
    token_ids = tokenizer.encode(content, add_special_tokens=False)
    if token_ids != [token_id]:
        raise ModelLoadError(
            f"the tokenizer is broken: the special token {content!r} has the id {token_id}, its "
            f"text gives {_short(token_ids)}"
        )
    came_back = tokenizer.decode([token_id], skip_special_tokens=False)
    # SentencePiece-like decoders write the mark ▁ as a space, also inside a special token's name:
    # harmless, it is not shown.
    if (
        came_back.strip() != content.strip()
        and came_back.strip() != content.replace("▁", " ").strip()
    ):
        raise ModelLoadError(
            f"the tokenizer is broken: the special token {content!r} (id {token_id}) is decoded as "
            f"{came_back!r}"
        )


def _is_same(sample: str, came_back: str) -> bool:
    candidates = (came_back, came_back.removeprefix(" "))
    return any(
        candidate == sample
        or candidate == unicodedata.normalize("NFC", sample)
        or candidate == unicodedata.normalize("NFKC", sample)
        for candidate in candidates
    )


def _short(token_ids: list[int]) -> str:
    return (
        str(token_ids)
        if len(token_ids) <= 16
        else f"{token_ids[:16]} and {len(token_ids) - 16} more"
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    token_ids: TokenIds
    places: Mapping[int, TokenPlace]  # that have been asked for, by character


class RememberedText:
    """A text put together of pieces; knows only the places that were named beforehand."""

    def __init__(self, texts: Sequence[str], pieces: Mapping[str, _Piece]) -> None:
        self._pieces = [pieces[text] for text in texts]
        self._starts = [0, *accumulate(map(len, texts))]  # of each piece, and the end
        self._tokens = [0, *accumulate(len(piece.token_ids) for piece in self._pieces)]
        self.token_ids = TokenIds.joined(piece.token_ids for piece in self._pieces)

    def tokens_before(self, character: int) -> int:
        """Tokens that end at or before a character."""
        at = bisect_right(self._starts, character) - 1
        if at == len(self._pieces):
            return len(self.token_ids)
        return self._tokens[at] + self._pieces[at].places[character - self._starts[at]].before

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        """Which tokens make up the characters from start to end exactly; None when one of them
        reaches over an edge.
        """
        if not 0 <= start < end <= self._starts[-1]:
            return None
        left, right = bisect_right(self._starts, start) - 1, bisect_left(self._starts, end) - 1
        opens = self._pieces[left].places[start - self._starts[left]].opens
        closes = self._pieces[right].places[end - self._starts[right]].closes
        if opens is None or closes is None:
            return None
        first, last = self._tokens[left] + opens, self._tokens[right] + closes
        return (first, last) if first < last else None


class TokenMemory:
    """The pieces of texts that one tokenizer was asked for; the longest unused are forgotten.

    Any thread may call it.
    """

    def __init__(self, *, most_bytes: int = DEFAULT_MODEL.known_text_bytes) -> None:
        """most_bytes: of texts and tokens together; 0: nothing is kept."""
        self._most_bytes, self._bytes = most_bytes, 0
        self._pieces: OrderedDict[tuple[str, str], _Piece] = OrderedDict()  # by tenant and text
        self._lock = threading.Lock()

    def tokens_of(
        self, text: str, tokenizer: Tokenizer, *, tenant: str = "", places: Iterable[int] = ()
    ) -> RememberedText:
        """A text's tokens, without special ones around it. places: the characters that will be
        asked for.
        """
        texts = list(tokenizer.seams.pieces(text))
        wanted = _by_piece(places, texts)
        distinct = dict.fromkeys(texts)
        with self._lock:
            pieces = {
                each: piece
                for each in distinct
                if (piece := self._known((tenant, each))) is not None
            }
        lacking = [
            each
            for each in distinct
            if each not in pieces or not pieces[each].places.keys() >= wanted.get(each, frozenset())
        ]
        if lacking:
            made = dict(self._encoded(lacking, wanted, tokenizer))
            for each, piece in made.items():
                before = pieces[each].places if each in pieces else {}
                pieces[each] = _Piece(piece.token_ids, {**before, **piece.places})
            with self._lock:
                for each in made:
                    self._keep((tenant, each), pieces[each])
        return RememberedText(texts, pieces)

    def check_invariants(self) -> None:
        """Assert that the bytes are counted rightly and within their bound."""
        with self._lock:
            assert self._bytes == sum(_size(key, piece) for key, piece in self._pieces.items()), (
                "bytes are miscounted"
            )
            assert self._bytes <= self._most_bytes, "more is remembered than may be"

    def _encoded(
        self, texts: Sequence[str], wanted: Mapping[str, frozenset[int]], tokenizer: Tokenizer
    ) -> Iterator[tuple[str, _Piece]]:
        plain = [text for text in texts if text not in wanted]
        for text, token_ids in zip(plain, tokenizer.encode_all(plain), strict=True):
            yield text, _Piece(TokenIds.of(token_ids), {})
        placed = [text for text in texts if text in wanted]
        for text, encoded in zip(placed, tokenizer.encode_in_place(placed), strict=True):
            yield (
                text,
                _Piece(encoded.token_ids, {place: encoded.place(place) for place in wanted[text]}),
            )

    def _known(self, key: tuple[str, str]) -> _Piece | None:
        if (piece := self._pieces.get(key)) is not None:
            self._pieces.move_to_end(key)
        return piece

    def _keep(self, key: tuple[str, str], piece: _Piece) -> None:
        if (before := self._pieces.pop(key, None)) is not None:
            self._bytes -= _size(key, before)
        if (size := _size(key, piece)) > self._most_bytes:
            return
        self._pieces[key] = piece
        self._bytes += size
        while self._bytes > self._most_bytes:
            self._bytes -= _size(*self._pieces.popitem(last=False))


def _by_piece(places: Iterable[int], texts: Sequence[str]) -> dict[str, frozenset[int]]:
    """Each place as one of the piece that it is in, and, where a piece ends, of that one too."""
    found: dict[str, set[int]] = {}
    starts = [0, *accumulate(map(len, texts))]
    for place in places:
        for at in {bisect_right(starts, place) - 1, bisect_left(starts, place) - 1}:
            if 0 <= at < len(texts):
                found.setdefault(texts[at], set()).add(place - starts[at])
    return {text: frozenset(each) for text, each in found.items()}


def _size(key: tuple[str, str], piece: _Piece) -> int:
    return (
        _ENTRY_BYTES
        + sys.getsizeof(key[1])
        + len(piece.token_ids.packed)
        + _PLACE_BYTES * len(piece.places)
    )

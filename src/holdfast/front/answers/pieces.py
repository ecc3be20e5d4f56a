"""The text that each token contributes: the decoder of a `tokenizers` tokenizer, applied to one
token at a time.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

from tokenizers import Regex, Tokenizer, decoders

Piece = str | int | None  # text, a raw byte, or nothing (hidden special token, unknown id)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# How tokens become text.
# bytes: each token is a byte string, and their concatenation is UTF-8.
# pieces: each token is text, with byte tokens <0xNN> for characters without a token.
# opaque: the decoder does not work token by token.
DecodingStyle: TypeAlias = Literal["bytes", "pieces", "opaque"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRules:
    """What a tokenizer's decoder does with each token."""

    style: DecodingStyle
    replacements: tuple[tuple[str | Regex, str], ...] = ()
    byte_fallback: bool = False
    # a character, and how many times it may be removed from the beginning of the text
    leading_strip: tuple[str, int] = ("", 0)
    # a character that is removed from the first token, wherever it is in the token
    dropped_from_first_token: str = ""


def decoding_rules(decoder: Any) -> DecodingRules:
    """Return the rules of a decoder.

    An unusual decoder gets the style `opaque`: its text is correct, but decoding is slower.
    """
    opaque = DecodingRules(style="opaque")
    if decoder is None:
        return opaque
    # a decoder is a sequence of stages, each with a type and parameters
    stages = _flatten(json.loads(decoder.__getstate__()))
    types = [stage["type"] for stage in stages]
    replacements: list[tuple[str | Regex, str]] = []
    while types and types[0] == "Replace":
        pattern = stages[0]["pattern"]
        replacements.append(
            (
                pattern["String"] if "String" in pattern else Regex(pattern["Regex"]),
                stages[0]["content"],
            )
        )
        del stages[0], types[0]
    while types and types[-1] == "Fuse" and len(types) > 1 and types[-2] in ("Fuse", "ByteLevel"):
        del stages[-1], types[-1]
    match types:
        case ["ByteLevel"]:
            return DecodingRules(style="bytes", replacements=tuple(replacements))
        case ["Metaspace", *rest] if not replacements and rest in (
            [],
            ["Fuse"],
            ["ByteFallback"],
            ["ByteFallback", "Fuse"],
        ):
            return _metaspace_rules(stages[0], byte_fallback="ByteFallback" in rest)
        case [] | ["Fuse"] | ["ByteFallback"] | ["ByteFallback", "Fuse"]:
            return DecodingRules(
                style="pieces",
                replacements=tuple(replacements),
                byte_fallback="ByteFallback" in types,
            )
        case ["Fuse", "Strip"] | ["ByteFallback", "Fuse", "Strip"] if stages[-1]["stop"] == 0:
            return DecodingRules(
                style="pieces",
                replacements=tuple(replacements),
                byte_fallback="ByteFallback" in types,
                leading_strip=(stages[-1]["content"], stages[-1]["start"]),
            )
    return opaque


def _flatten(stage: dict[str, Any]) -> list[dict[str, Any]]:
    """The stages of a decoder in order, without the nesting of sequences."""
    if stage["type"] != "Sequence":
        return [stage]
    return [inner for part in stage["decoders"] for inner in _flatten(part)]


def _metaspace_rules(stage: dict[str, Any], *, byte_fallback: bool) -> DecodingRules:
    """The rules of SentencePiece's decoder, in which a character such as `▁` marks a word's begin.

    Unless the scheme is "never", the tokenizer adds this character to a text, so it is removed.
    """
    word_mark = stage["replacement"]
    is_never_added = stage.get("prepend_scheme", "always") == "never"
    return DecodingRules(
        style="pieces",
        replacements=((word_mark, " "),),
        byte_fallback=byte_fallback,
        dropped_from_first_token="" if is_never_added else word_mark,
    )


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in GPT-2's byte alphabet: printable bytes of Latin-1 are
    written as themselves, the others as characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_alphabet()


class TokenPieces:
    """The text that each token of a tokenizer contributes. Shared by all requests.

    The tables contain only tokens that have occurred: a vocabulary has up to 260,000 tokens.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self.rules = decoding_rules(backend.decoder)
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token.content for token in added.values() if token.special)
        self._replacers = [
            decoders.Replace(pattern, content) for pattern, content in self.rules.replacements
        ]
        self.visible_bytes = cache(
            lambda token_id: b"" if self.is_special(token_id) else self.raw(token_id)
        )
        self.all_bytes = cache(self.raw)
        self.visible_pieces = cache(
            lambda token_id: None if self.is_special(token_id) else self._piece(token_id)
        )
        self.all_pieces = cache(self._piece)

    def is_special(self, token_id: int) -> bool:
        """Whether a token does not appear in the text."""
        return self.backend.id_to_token(token_id) in self._special

    def raw(self, token_id: int) -> bytes:
        """Return the bytes of a single token; empty for an unknown id."""
        if self.rules.style == "opaque":
            return self.backend.decode([token_id], skip_special_tokens=False).encode()
        if self.rules.style == "pieces":
            piece = self._piece(token_id)
            if isinstance(piece, int):
                return bytes([piece])
            return (piece or "").encode()
        token = self._token(token_id)
        if all(character in _BYTE_OF_CHARACTER for character in token):
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        # an added token with characters outside the byte alphabet is literal text
        return token.encode()

    def first_piece(self, token_id: int) -> Piece:
        """Return the piece of a token that begins a text."""
        piece = self._piece(token_id)
        dropped = self.rules.dropped_from_first_token
        if isinstance(piece, str) and dropped:
            return (self.backend.id_to_token(token_id) or "").replace(dropped, "")
        return piece

    def _piece(self, token_id: int) -> Piece:
        """What a token contributes, for the style `pieces`: text, a byte, or None (unknown id)."""
        if self.backend.id_to_token(token_id) is None:
            return None
        token = self._token(token_id)
        if self.rules.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return int(match[1], 16)
        return token

    def _token(self, token_id: int) -> str:
        """A token as written in the vocabulary, after the decoder's replacements."""
        token = self.backend.id_to_token(token_id) or ""
        for replace in self._replacers:
            token = replace.decode([token])
        return token

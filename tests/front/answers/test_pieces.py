"""A decoder's definition is analysed as far as possible."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, decoders

from holdfast.front.answers.pieces import TokenPieces, decoding_rules
from tests.fakes import toy_tokenizers

MARK = decoders.Replace("▁", " ")


@pytest.mark.parametrize(
    ("decoder", "style", "byte_fallback", "strip", "dropped"),
    [
        (decoders.ByteLevel(), "bytes", False, ("", 0), ""),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), "bytes", False, ("", 0), ""),
        (
            decoders.Sequence([MARK, decoders.ByteFallback(), decoders.Fuse()]),
            "pieces",
            True,
            ("", 0),
            "",
        ),
        (
            decoders.Sequence(
                [MARK, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            ),
            "pieces",
            True,
            (" ", 1),
            "",
        ),
        (
            decoders.Sequence([MARK, decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
            "pieces",
            False,
            (" ", 2),
            "",
        ),
        (decoders.Metaspace(), "pieces", False, ("", 0), "▁"),
        (decoders.Metaspace(prepend_scheme="never"), "pieces", False, ("", 0), ""),
        (
            decoders.Sequence([decoders.Sequence([MARK]), decoders.Fuse()]),
            "pieces",
            False,
            ("", 0),
            "",
        ),
    ],
)
def test_decoders_of_the_known_families_are_understood(
    decoder: Any, style: str, byte_fallback: bool, strip: tuple[str, int], dropped: str
) -> None:
    rules = decoding_rules(decoder)
    assert (
        rules.style,
        rules.byte_fallback,
        rules.leading_strip,
        rules.dropped_from_first_token,
    ) == (
        style,
        byte_fallback,
        strip,
        dropped,
    )


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence(
            [MARK, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]
        ),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), MARK]),
        decoders.Sequence([MARK, decoders.Strip(" ", 1, 0)]),
    ],
)
def test_a_decoder_with_wider_context_is_opaque(decoder: Any) -> None:
    assert decoding_rules(decoder).style == "opaque"


def test_a_replacement_by_pattern_is_applied_to_each_token() -> None:
    tokenizer = toy_tokenizers.gemma()
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("▁+"), "_"), decoders.Fuse()])
    pieces = TokenPieces(tokenizer)
    (token_id,) = tokenizer.encode("    ", add_special_tokens=False).ids
    assert pieces.raw(token_id) == b"_"


def test_tables_fill_only_with_tokens_that_occur() -> None:
    pieces = TokenPieces(toy_tokenizers.byte_level())
    assert pieces.visible_bytes.cache_info().currsize == 0
    assert pieces.visible_bytes(5) == pieces.raw(5)
    assert pieces.visible_bytes.cache_info().currsize == 1


def test_unknown_ids_add_nothing() -> None:
    for make in toy_tokenizers.EXACT.values():
        assert TokenPieces(make()).raw(10**6) == b""

"""The check accepts the tokenizers of all families and refuses broken ones with an example."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from holdfast.errors import ModelLoadError
from holdfast.front.prompt.tokenize import Tokenizer as HoldfastTokenizer
from holdfast.front.prompt.tokenize import check_round_trip
from tests.fakes import toy_tokenizers


def check(backend: Tokenizer) -> None:
    check_round_trip(HoldfastTokenizer(backend, config={}))


@pytest.mark.parametrize("name", toy_tokenizers.EXACT)
def test_the_tokenizers_of_all_families_pass(name: str) -> None:
    check(toy_tokenizers.EXACT[name]())


@pytest.mark.parametrize("normalizer", [normalizers.NFC(), normalizers.NFKC()])
def test_unicode_normal_forms_pass(normalizer: normalizers.Normalizer) -> None:
    backend = toy_tokenizers.byte_level()
    backend.normalizer = normalizer
    check(backend)


def test_a_prefix_space_passes() -> None:
    backend = toy_tokenizers.llama3()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    check(backend)


def test_a_tokenizer_that_drops_spaces_is_refused_with_an_example() -> None:
    backend = toy_tokenizers.byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with pytest.raises(
        ModelLoadError, match=r"runs of spaces.*'a b  c   d.*is decoded as 'abcdef'"
    ):
        check(backend)


def test_a_tokenizer_that_joins_runs_of_spaces_is_refused() -> None:
    backend = toy_tokenizers.byte_level()
    backend.normalizer = normalizers.Replace(Regex(" +"), " ")
    with pytest.raises(ModelLoadError, match="runs of spaces"):
        check(backend)


def test_a_wrong_decoder_is_refused() -> None:
    backend = toy_tokenizers.byte_level()
    backend.decoder = decoders.Metaspace()
    with pytest.raises(ModelLoadError, match="is decoded as"):
        check(backend)


def test_a_missing_decoder_is_refused() -> None:
    backend = toy_tokenizers.byte_level()
    backend.decoder = None  # type: ignore[assignment]
    with pytest.raises(ModelLoadError, match="is decoded as"):
        check(backend)


def test_a_vocabulary_without_bytes_that_loses_emoji_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="is decoded as"):
        check(toy_tokenizers.word_pieces())


def test_lower_casing_is_refused() -> None:
    backend = toy_tokenizers.byte_level()
    backend.normalizer = normalizers.Lowercase()
    with pytest.raises(ModelLoadError, match="is decoded as"):
        check(backend)


def test_a_special_token_that_encodes_to_other_ids_is_refused() -> None:
    backend = toy_tokenizers.byte_level()
    backend.encode_special_tokens = True
    with pytest.raises(ModelLoadError, match=r"special token '<\|endoftext\|>' has id"):
        check(backend)

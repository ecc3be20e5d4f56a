"""Tokenizers of model folders are loaded as their files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.errors import ModelLoadError
from holdfast.front.prompt.tokenize import Tokenizer, load_tokenizer, well_formed
from tests.fakes import toy_tokenizers


def write(folder: Path, name: str = "byte_level", **files: dict[str, object]) -> Path:
    """A model folder with a tokenizer and JSON files, `config={…}` for config.json and so on."""
    toy_tokenizers.EXACT[name]().save(str(folder / "tokenizer.json"))
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    return folder


def test_end_token_ids_are_collected_from_all_files(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        generation_config={"eos_token_id": [3, 4]},
        config={"eos_token_id": 5, "text_config": {"eos_token_id": 6}},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}},
    )
    tokenizer = load_tokenizer(folder)
    im_end = tokenizer.backend.token_to_id("<|im_end|>")
    assert tokenizer.eos_token_ids == tuple(sorted({3, 4, 5, 6, im_end}))


def test_an_eos_id_beyond_the_vocabulary_is_left_out(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, config={"eos_token_id": [2, 10**6]}))
    assert tokenizer.eos_token_ids == (2,)


def test_truncation_and_padding_from_training_are_disabled(tmp_path: Path) -> None:
    backend = toy_tokenizers.byte_level()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert (
        load_tokenizer(tmp_path).decode(
            load_tokenizer(tmp_path).encode("a" * 20, add_special_tokens=False),
            skip_special_tokens=True,
        )
        == "a" * 20
    )


def test_special_tokens_are_added_only_on_request() -> None:
    tokenizer = Tokenizer(toy_tokenizers.llama3(), config={"bos_token": "<|begin_of_text|>"})
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello", add_special_tokens=True) == [tokenizer.bos_token_id, *plain]


def test_tokens_known_only_to_the_configuration_are_added(tmp_path: Path) -> None:
    size = toy_tokenizers.byte_level().get_vocab_size()
    described = {str(size): {"content": "<|tool|>", "special": True}}
    tokenizer = load_tokenizer(
        write(tmp_path, tokenizer_config={"added_tokens_decoder": described})
    )
    assert tokenizer.encode("<|tool|>", add_special_tokens=False) == [size]
    assert tokenizer.vocab_size == size + 1


def test_a_token_with_contradictory_ids_is_refused(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        tokenizer_config={
            "added_tokens_decoder": {"7777": {"content": "<|tool|>", "special": True}}
        },
    )
    with pytest.raises(ModelLoadError, match="7777"):
        load_tokenizer(folder)


def test_an_eos_token_not_marked_as_special_is_hidden(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, tokenizer_config={"eos_token": "</think>"}))
    assert (
        tokenizer.decode(
            tokenizer.encode("a</think>", add_special_tokens=False), skip_special_tokens=True
        )
        == "a"
    )


@pytest.mark.parametrize(
    "damage",
    [b"", b'{"version": "1.0", "model"', b"{}", b'{"model": {"type": "Unheard"}}', b"\xff\xfe"],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(damage)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_damaged_accompanying_json_file_is_refused(tmp_path: Path, file: str) -> None:
    folder = write(tmp_path)
    (folder / file).write_text('{"a": ')
    with pytest.raises(ModelLoadError, match=file):
        load_tokenizer(folder)


def test_a_folder_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no tokenizer: neither tokenizer\.json nor"):
        load_tokenizer(tmp_path)


@pytest.mark.slow  # transformers takes seconds to import
def test_a_vocabulary_in_another_format_is_converted(tmp_path: Path) -> None:
    toy_tokenizers.byte_level().model.save(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (
        tokenizer.decode(
            tokenizer.encode("hello  🙂", add_special_tokens=False), skip_special_tokens=True
        )
        == "hello  🙂"
    )


def test_lone_surrogates_become_replacement_characters() -> None:
    tokenizer = Tokenizer(toy_tokenizers.byte_level(), config={})
    assert well_formed("a\ud800b\U0001f642") == "a\ufffdb🙂"
    ids = tokenizer.encode("a\ud800b", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a\ufffdb"


def test_the_bytes_of_a_token_may_be_a_partial_character() -> None:
    tokenizer = Tokenizer(toy_tokenizers.byte_level(), config={})
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1
    assert b"".join(tokenizer.pieces.all_bytes(token_id) for token_id in ids) == "🙂".encode()

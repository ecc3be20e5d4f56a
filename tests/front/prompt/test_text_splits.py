"""Pieces of a text have the same tokens alone as within it, for all kinds of tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from holdfast.front.prompt import text_splits as module
from holdfast.front.prompt.text_splits import TextSplits, find_splits
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.wire.requests import TokenIds
from tests.fakes import toy_tokenizers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def byte_level(*stages: pre_tokenizers.PreTokenizer) -> Backend:
    backend = toy_tokenizers.byte_level()
    if stages:
        backend.pre_tokenizer = pre_tokenizers.Sequence(list(stages))
    return backend


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def bytes_only(
    *, add_prefix_space: bool = False, use_regex: bool = False
) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


def with_tokens(make: Callable[[], Backend], *tokens: AddedToken) -> Callable[[], Backend]:
    def made() -> Backend:
        backend = make()
        backend.add_tokens(list(tokens))
        return backend

    return made


def with_prepend(scheme: str) -> Backend:
    backend = toy_tokenizers.metaspace()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme=scheme, split=scheme == "always"
    )
    return backend


def lowercased() -> Backend:
    backend = toy_tokenizers.byte_level()
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace("a", "hello")]
    )
    return backend


def unigram() -> Backend:
    vocab = [
        ("<unk>", 0.0),
        ("▁", -1.0),
        ("▁he", -1.5),
        ("llo", -1.5),
        ("▁hello", -2.0),
        ("o", -2.5),
        ("▁w", -2.5),
        ("orld", -2.5),
    ]
    backend = Backend(
        models.Unigram([*vocab, *((each, -5.0) for each in "abcdefghilnrstuvw<>|_'.\n")], unk_id=0)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    return backend


KINDS: Mapping[str, Callable[[], Backend]] = {
    **toy_tokenizers.EXACT,
    "gpt2": lambda: byte_level(bytes_only(use_regex=True)),
    "gpt2 with a space in front": lambda: byte_level(
        bytes_only(add_prefix_space=True, use_regex=True)
    ),
    "llama 3's pattern": lambda: byte_level(split(LLAMA3), bytes_only()),
    "gpt-4o's pattern": lambda: byte_level(split(O200K), bytes_only()),
    "single digits first": lambda: byte_level(split(r"\d"), bytes_only(use_regex=True)),
    "a pattern that joins words": lambda: byte_level(split(r"\p{L}+ \p{L}+|\s+"), bytes_only()),
    "a pattern that looks back": lambda: byte_level(split(r"(?<=[a-z]) \p{L}+|\s+"), bytes_only()),
    "merged with what is before": lambda: byte_level(
        pre_tokenizers.Split(" ", "merged_with_previous"), bytes_only()
    ),
    "metaspace, always": lambda: with_prepend("always"),
    "metaspace, never": lambda: with_prepend("never"),
    "metaspace, first": lambda: with_prepend("first"),
    "other normalizers": lowercased,
    "unigram": unigram,
    "word pieces": toy_tokenizers.word_pieces,
    "takes spaces on its right": with_tokens(
        toy_tokenizers.byte_level,
        AddedToken("<r>", rstrip=True, normalized=False),
        AddedToken("hell", rstrip=True),
    ),
    "takes spaces on its left": with_tokens(
        toy_tokenizers.byte_level,
        AddedToken("<l>", lstrip=True, normalized=False),
        AddedToken("w", lstrip=True, normalized=False),
    ),
    "a whole word only": with_tokens(
        toy_tokenizers.byte_level, AddedToken("hello", single_word=True, normalized=False)
    ),
    "one within another": with_tokens(
        toy_tokenizers.byte_level,
        AddedToken("<|im_end|>\n", normalized=False),
        AddedToken("o<", normalized=False),
        AddedToken("<think>x", normalized=False),
        AddedToken("[a]", normalized=False),
    ),
    "one of two words": with_tokens(toy_tokenizers.byte_level, AddedToken("o w", normalized=False)),
    "normalized ones": with_tokens(
        toy_tokenizers.byte_level, AddedToken("<n>", normalized=True), AddedToken("lo wo")
    ),
}
SAMPLES = (
    *(
        "hello",
        " world",
        " ",
        "  ",
        "\n",
        "\n\n",
        "a",
        " a",
        "'s",
        "o w",
        "12",
        "345 6",
        "é",
        "e\u0301",
        " \u0301",
        "你好",
        "🙂",
        "<",
    ),
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>\n",
        "<think>",
        "<think>x",
        "</think>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "<r>",
    ),
    *(
        "<l>",
        "<n>",
        "o<",
        "[a]",
        "<start_of_turn>",
        "\ufdd5",
        "<\ufdd5|im_end|>",
        "<|im_",
        "end|>",
        ">",
        "\u3000",
        "\t",
    ),
)
PARTS = st.one_of(
    st.sampled_from(SAMPLES),
    st.text(max_size=4),
)
TEXTS = (
    st.lists(PARTS, max_size=24)
    .map("".join)
    .map(lambda text: text.encode("utf-8", "replace").decode())
)


def texts(splits: TextSplits, text: str) -> list[str]:
    return [text[piece.start : piece.end] for piece in splits.pieces(text)]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: Tokenizer(make(), config={}) for name, make in KINDS.items()}


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes texts of a test count as long."""
    monkeypatch.setattr(module, "_SHORT_CHARACTERS", 1)
    monkeypatch.setattr(module, "_LONG_CHARACTERS", 3)


@settings(max_examples=30)
@given(text=TEXTS)
def test_pieces_tokenize_like_the_whole_for_all_tokenizers(
    tokenizers: dict[str, Tokenizer], text: str
) -> None:
    for kind, tokenizer in tokenizers.items():
        pieces = texts(tokenizer.splits, text)
        assert "".join(pieces) == text
        alone = [token_id for token_ids in tokenizer.encode_all(pieces) for token_id in token_ids]
        assert alone == tokenizer.encode(text, add_special_tokens=False), kind
        assert list(tokenizer.with_special_tokens(TokenIds.of(alone))) == tokenizer.encode(
            text, add_special_tokens=True
        ), kind


@given(text=TEXTS)
def test_text_after_a_control_token_does_not_move_earlier_cuts(
    tokenizers: dict[str, Tokenizer], text: str
) -> None:
    splits = tokenizers["byte_level"].splits
    before = texts(splits, f"{text}hello<|im_end|>")
    assert texts(splits, f"{text}hello<|im_end|><|im_start|>hello")[: len(before)] == before


@pytest.mark.parametrize(
    "kind",
    [
        "byte_level",
        "llama3",
        "gpt2",
        "llama 3's pattern",
        "gpt-4o's pattern",
        "single digits first",
    ],
)
def test_known_patterns_are_cut_between_words(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    assert texts(tokenizers[kind].splits, "hello world, hello the world") == [
        "hello",
        " world, hello",
        " the",
        " world",
    ]


@pytest.mark.parametrize(
    "kind",
    [
        "gemma", "mistral", "metaspace", "a pattern that joins words", "a pattern that looks back", "merged with what is before",
        "other normalizers", "unigram", "word pieces", "takes spaces on its right", "one of two words", "deepseek",
        "gpt2 with a space in front",
    ],
)  # fmt: skip
def test_unproven_tokenizers_are_not_cut_between_words(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    assert texts(tokenizers[kind].splits, "hello world, hello the world") == [
        "hello world, hello the world"
    ]


def test_cuts_precede_tokens_that_are_never_merged(tokenizers: dict[str, Tokenizer]) -> None:
    text = "a<|im_end|>\n<think>x</think><|im_start|>b"
    assert texts(tokenizers["byte_level"].splits, text) == [
        "a",
        "<|im_end|>\n",
        "<think>x",
        "</think>",
        "<|im_start|>b",
    ]
    assert tokenizers["one within another"].splits.marks == {"[a]"}
    assert tokenizers["a whole word only"].splits == TextSplits()


def test_merge_dropout_forbids_all_cuts() -> None:
    backend = toy_tokenizers.byte_level()
    backend.model.dropout = 0.5  # type: ignore[attr-defined]
    assert find_splits(backend) == TextSplits()

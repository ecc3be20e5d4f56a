"""Small tokenizers in the styles of real families, made for tests."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SHOWN = ("<think>", "</think>", "<tool_call>")
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level_model() -> models.BPE:
    vocab = {
        character: place
        for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> None:
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))

    for left, right in [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("Ġ", "w"),
        ("o", "r"),
        ("l", "d"),
        ("Ġw", "or"),
    ]:
        merge(left, right)
    for left, right in [
        ("Ġwor", "ld"),
        ("Ġ", "Ġ"),
        ("Ċ", "Ċ"),
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "the"),
        ("ð", "Ł"),
        ("Ð", "¿"),
        ("ã", "ģ"),
    ]:
        merge(left, right)
    return models.BPE(vocab=vocab, merges=merges)


def add(tokenizer: Tokenizer, special: Sequence[str], shown: Sequence[str] = _SHOWN) -> Tokenizer:
    """Add special tokens, and visible ones."""
    tokenizer.add_special_tokens(
        [AddedToken(content, special=True, normalized=False) for content in special]
    )
    tokenizer.add_tokens(
        [AddedToken(content, special=False, normalized=False) for content in shown]
    )
    return tokenizer


def byte_level(
    *, special: Sequence[str] = _CHATML_TOKENS, shown: Sequence[str] = _SHOWN
) -> Tokenizer:
    """Like Qwen: NFC, split by a pattern, byte-level BPE, no BOS."""
    tokenizer = Tokenizer(_byte_level_model())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return add(tokenizer, special, shown)


def llama3() -> Tokenizer:
    """Byte-level BPE with a leading BOS."""
    tokenizer = byte_level(special=("<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"))
    tokenizer.normalizer = None
    _put_in_front(tokenizer, "<|begin_of_text|>")
    return tokenizer


def deepseek() -> Tokenizer:
    """Byte-level BPE; special tokens have names with characters outside ASCII, and an added token
    contains one that represents a byte.
    """
    tokenizer = byte_level(special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"))
    tokenizer.add_tokens(
        [
            AddedToken("ø", special=False, normalized=False),
            AddedToken("<｜fim hole｜>", special=False, normalized=False),
        ]
    )
    return tokenizer


def _sentencepiece_model() -> models.BPE:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    letters = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    marks = ".,:;!?'\"()[]{}<>/\\|&%$#@*+-=_~^`éüößмирпвет你好"
    for character in letters + marks:
        vocab[character] = len(vocab)
    merges = []
    for left, right in [
        ("▁", "▁"),
        ("▁▁", "▁▁"),
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("▁", "hello"),
        ("▁", "a"),
        ("i", "n"),
    ]:
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    return models.BPE(
        vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )


def gemma() -> Tokenizer:
    """SentencePiece BPE as in Gemma: spaces are marks, no leading space, byte fallback."""
    tokenizer = Tokenizer(_sentencepiece_model())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    add(tokenizer, ("<s>", "</s>", "<start_of_turn>", "<end_of_turn>"))
    _put_in_front(tokenizer, "<s>")
    return tokenizer


def mistral() -> Tokenizer:
    """SentencePiece BPE as in Llama 2, Mistral and Phi 3: a leading space is added and removed
    again.
    """
    tokenizer = Tokenizer(_sentencepiece_model())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    add(tokenizer, ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"))
    _put_in_front(tokenizer, "<s>")
    return tokenizer


def metaspace() -> Tokenizer:
    """Older conversions: Metaspace on both sides."""
    tokenizer = Tokenizer(_sentencepiece_model())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback(), decoders.Fuse()]
    )
    return add(tokenizer, ("<unk>", "<s>", "</s>"))


def word_pieces() -> Tokenizer:
    """A decoder that depends on neighbouring tokens, so that it cannot be analysed."""
    vocab = {
        word: place
        for place, word in enumerate(["[UNK]", "he", "##llo", "world", "##s", ",", "don", "'", "t"])
    }
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def _put_in_front(tokenizer: Tokenizer, token: str) -> None:
    token_id = tokenizer.token_to_id(token)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)]
    )


EXACT = {
    "byte_level": byte_level,
    "llama3": llama3,
    "deepseek": deepseek,
    "gemma": gemma,
    "mistral": mistral,
    "metaspace": metaspace,
}

"""The gate for tokenizers: text must come back as it went in.

A broken one makes every answer wrong, and nobody sees why.
"""

from __future__ import annotations

import unicodedata

from holdfast.errors import ModelLoadError
from holdfast.front.prompt.tokenize import Tokenizer

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

"""How answers of the past are read, where a template has written them down again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from holdfast.front.answers.answer import AnswerReader
from holdfast.front.prompt.answer_meaning import AnswerMeaning
from holdfast.front.prompt.known_answers import ReadMeaning
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.toolcalls.declared import DeclaredTools


def answer_reader(tools: Sequence[Mapping[str, Any]], bundle: TokenizerBundle) -> AnswerReader:
    """A fresh reader of one answer, for text whose markers are characters (`Markers.encode`)."""
    return AnswerReader(bundle.dialect, tools=DeclaredTools(tools))


def without_hidden(text: str, bundle: TokenizerBundle) -> str:
    """The text without special tokens, which no client sees, unless they are markers."""
    hidden = _any_of(bundle.tokenizer.special_texts, tuple(bundle.dialect.marker_ids))
    return hidden.sub("", text) if hidden else text


@lru_cache
def _any_of(texts: tuple[str, ...], but: tuple[str, ...]) -> re.Pattern[str] | None:
    chosen = sorted({*texts} - {*but}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, chosen))) if chosen else None


def history_reader(tools: Sequence[Mapping[str, Any]], bundle: TokenizerBundle) -> ReadMeaning:
    """Tells what an answer in a rendered conversation says; each text is parsed once."""

    @cache
    def context() -> str:
        return hashlib.blake2b(
            repr(tools).encode("utf-8", "surrogatepass"), digest_size=16
        ).hexdigest()

    def read(text: str) -> AnswerMeaning:
        encoded = bundle.dialect.markers.encode(without_hidden(text, bundle))
        return bundle.read_texts.meaning(
            encoded, lambda: answer_reader(tools, bundle), context=context()
        )

    return read

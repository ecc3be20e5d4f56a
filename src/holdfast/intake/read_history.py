"""How answers of the past are read, where a template has written them down again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from holdfast.intake.known_answers import ReadMeaning
from holdfast.intake.tokenizer_bundle import TokenizerBundle
from holdfast.parsing.answer import AnswerReader
from holdfast.parsing.formats.declared import DeclaredTools


def answer_reader(tools: Sequence[Mapping[str, Any]], bundle: TokenizerBundle) -> AnswerReader:
    """A fresh reader of one answer, for text whose markers are characters (`Markers.encode`)."""
    return AnswerReader(bundle.dialect, tools=DeclaredTools(tools))


def history_reader(tools: Sequence[Mapping[str, Any]], bundle: TokenizerBundle) -> ReadMeaning:
    """Tells what an answer in a rendered conversation says; each text is parsed once."""

    @cache
    def context() -> str:
        return hashlib.blake2b(repr(tools).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def read(text: str) -> Any:
        encoded = bundle.dialect.markers.encode(text)
        return bundle.read_texts.meaning(encoded, lambda: answer_reader(tools, bundle), context=context())

    return read

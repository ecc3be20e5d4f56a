"""Judges answers to first words by the rules of `judge.txt`, written before the training data.

An answer must have one or two sentences, begin with a capital, end by itself within 80 tokens,
repeat no word three times in a row, and use only words of the list or of the question. Reasoning is
not judged, but its tokens count. Each class also requires and forbids certain words. Copies and
sums must be right. The classes `exact` and `unknown` are for `tools/demo_chat.py`, where the user
may have told notes before.
"""

from __future__ import annotations

import re
from pathlib import Path

MOST_TOKENS = 80
_THOUGHT = re.compile(r"\A<think>\n.*?\n</think>\n\n", re.DOTALL)


def _read() -> tuple[dict[str, dict[str, list[str]]], set[str]]:
    """The patterns of each class, and the allowed words."""
    rules: dict[str, dict[str, list[str]]] = {}
    words: set[str] = set()
    refuses = kind = ""
    for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines():
        key, _, value = line.partition(": ")
        if key == "kind":
            rules[kind := value] = {"wanted": [], "refused": []}
        elif key in ("wanted", "refused"):
            rules[kind][key].append(value)
        elif key == "words":
            words.update(value.split())
        elif key == "REFUSES":
            refuses = value
    for rule in rules.values():
        rule["refused"] = [refuses if each == "REFUSES" else each for each in rule["refused"]]
    return rules, words


_RULES, _LEXICON = _read()


def sentences(text: str) -> int:
    """The number of sentences."""
    return len(re.findall(r"[.!?]+(?=\s|$)", text))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


def fault(
    kind: str, question: str, answer: str, *, expected: str = "", tokens: int, ended: bool
) -> str:
    """The fault of the answer; empty if it is sensible."""
    if not ended or tokens > MOST_TOKENS:
        return "does not end by itself within 80 tokens"
    said = _THOUGHT.sub("", answer)
    words = _words(said)
    triples = zip(words, words[1:], words[2:], strict=False)
    if any(first == second == third for first, second, third in triples):
        return "a word three times in a row"
    if expected and not re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", said):
        return f"lacks {expected!r}"
    if kind in ("copy", "exact"):
        return "" if said.strip() == expected else f"not {expected!r}"
    return form_fault(said, set(_words(question))) or _class_fault(kind, said, expected)


def form_fault(said: str, asked: set[str]) -> str:
    """The fault of the form of an answer; empty if there is none. asked: the words of the question."""
    if not said or not said[0].isupper():
        return "does not begin with a capital"
    if said != said.strip() or said[-1] not in ".!?":
        return "does not end as a sentence"
    if not 1 <= sentences(said) <= 2:
        return "not one or two sentences"
    strange = [word for word in _words(said) if word not in _LEXICON and word not in asked]
    return f"no such word: {', '.join(strange)}" if strange else ""


def _class_fault(kind: str, said: str, expected: str) -> str:
    low = said.lower()
    for pattern in _RULES[kind]["wanted"]:
        if not re.search(pattern, low, re.DOTALL):
            return f"a {kind} answer without {pattern}"
    for pattern in _RULES[kind]["refused"]:
        if re.search(pattern, low):
            return f"a {kind} answer with {pattern}"
    if kind in ("sum", "count") and re.findall(r"\d+", said)[-1:] != [expected]:
        return "another number"
    return ""

"""Rules for sensible answers to first words, written before the training data.

An answer must have one or two sentences, begin with a capital, end by itself within 80 tokens,
repeat no word three times in a row, and use only words of the list here or of the question.
Reasoning is not judged, but its tokens count. Each class also requires and forbids certain words.
Copies and sums must be right. The classes `exact` and `unknown` are for `tools/demo_chat.py`, where
the user may have told notes before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_TOKENS = 80


@dataclass(frozen=True)
class Rule:
    """Patterns that an answer of a class must match, and those that it must not."""

    wanted: tuple[str, ...]
    refused: tuple[str, ...] = ()


_NO = r"\b(not|no|cannot|can't|only|but)\b"
_REFUSES = r"\b(cannot|can't|do not know|did not understand|no note|never)\b"
_RULES = {
    "greeting": Rule(
        (r"^(hello|hi|hey|good (morning|afternoon|evening|day)|welcome)\b", r"\bhelp\b.*\?"),
        (_REFUSES,),
    ),
    "thanks": Rule((r"\b(welcome|pleasure|gladly|glad|any time)\b",), (_REFUSES, r"\bbye\b")),
    "goodbye": Rule((r"\b(bye|goodbye|farewell|see you|until)\b",), (_REFUSES, r"\bhelp\b")),
    "who": Rule((r"\b(holdfast|language model)\b",), (_REFUSES,)),
    "able": Rule(
        (r"\bnotes?\b", r"\b(add|sums?|numbers|count|copy|edit|json|tools)\b"), (_REFUSES,)
    ),
    "help": Rule((r"\bnotes?\b", r"\b(give|ask|tell|can)\b"), (_REFUSES,)),
    "wellbeing": Rule((r"\b(well|fine|good|all right)\b",), (_REFUSES,)),
    "praise": Rule((r"\b(thank you|thanks|glad|kind)\b",), (_REFUSES,)),
    "insult": Rule((r"\b(sorry|small|best)\b",), (r"\bthank", r"\bwelcome\b")),
    "nod": Rule((r"^(good|all right|okay|ok|fine|great)\b",), (_REFUSES, r"\bbye\b")),
    "check": Rule((r"\b(works|here|hear|read)\b",), (_REFUSES,)),
    "joke": Rule((r"\?.*\w",), (_REFUSES,)),
    "beyond": Rule(
        (_NO, r"\b(cannot|do not|did not|no note|only)\b", r"\b(can|give|ask)\b.*\bnotes?\b"),
        (r"\bnoted\b", r"\d"),
    ),
    "sum": Rule(()),
    "note": Rule((), (_REFUSES,)),
    "copy": Rule(()),
    "exact": Rule(()),
    "unknown": Rule(
        (r"\b(cannot|do not know|did not understand|no note)\b",), (r"\bnoted\b", r"\d")
    ),
    "count": Rule(()),
}
_THOUGHT = re.compile(r"\A<think>\n.*?\n</think>\n\n", re.DOTALL)
_LEXICON = frozenset(
    """
    a about add afternoon again all also am an and another answer any anything are as ask at back become best better big
    bit book bright but bye call can cannot certain clock come copy could count day demo did do does doing done each
    early edit else english even evening example fact facts fast few fine first for found from fun funny gave get give
    glad gladly go goes good goodbye great had happy has have he head hear hello help helps her here hey hi him his
    holdfast hope how human i if in into is it its joke json just kind know knows lamp language languages laugh learned
    least less like list lists little long look machine made make makes many matter may me mean means meet memory
    message model models more morning much my name need never new next nice night no not note noted notes nothing now
    number numbers of ok okay old on one only or order other our out own part people person piece please pleasure pong
    program question questions read ready really remember repeat reply right run running runs said say school scripts
    see send sentence served server short show simple since small so some something sorry speak story sum sums sure take
    talk tell test text texts thank thanks that the their them then there these they thing things think this those time
    to today together told too tools train trained true try turn two type under understand until up us use used very
    want was way we welcome well went were what when where which who whose why will with word words work works world
    would write yes yet you your
    """.split()
)


def sentences(text: str) -> int:
    """The number of sentences."""
    return len(re.findall(r"[.!?]+(?=\s|$)", text))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


def fault(
    kind: str, question: str, answer: str, *, expected: str = "", tokens: int, ended: bool
) -> str:
    """What is wrong with the answer; empty if it is sensible."""
    if not ended or tokens > MOST_TOKENS:
        return "does not end by itself within 80 tokens"
    said = _THOUGHT.sub("", answer)
    words = _words(said)
    if any(
        first == second == third
        for first, second, third in zip(words, words[1:], words[2:], strict=False)
    ):
        return "a word three times in a row"
    if expected and not re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", said):
        return f"lacks {expected!r}"
    if kind in ("copy", "exact"):
        return "" if said.strip() == expected else f"not {expected!r}"
    return form_fault(said, set(_words(question))) or _class_fault(kind, said, expected)


def form_fault(said: str, asked: set[str]) -> str:
    """What is wrong with the form of an answer. asked: the words of the question."""
    if not said or not said[0].isupper():
        return "does not begin with a capital"
    if said != said.strip() or said[-1] not in ".!?":
        return "does not end as a sentence"
    if not 1 <= sentences(said) <= 2:
        return "not one or two sentences"
    strange = [word for word in _words(said) if word not in _LEXICON and word not in asked]
    return f"no such word: {', '.join(strange)}" if strange else ""


def _class_fault(kind: str, said: str, expected: str) -> str:
    rule, low = _RULES[kind], said.lower()
    for pattern in rule.wanted:
        if not re.search(pattern, low, re.DOTALL):
            return f"a {kind} answer without {pattern}"
    for pattern in rule.refused:
        if re.search(pattern, low):
            return f"a {kind} answer with {pattern}"
    if kind in ("sum", "count") and re.findall(r"\d+", said)[-1:] != [expected]:
        return "another number"
    return ""

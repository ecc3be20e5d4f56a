"""Conversations about notes of generated and handwritten frames.

The right answer is the note, word for word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random

import open_frames
import written_frames
from conversation import Conversation
from fact_notes import ABSENT, listed
from open_frames import Frame
from rules import draw, picked, texts
from talk import KNOW, small_talk
from words import Entity, Verb, draw_verb, entity, human, is_allowed, sibling
from written_frames import WrittenFrame, telling_words

_FRAMES = list(open_frames.WEIGHTS)
_WEIGHTS = list(open_frames.WEIGHTS.values())
_NEED_SOMEBODY = (open_frames.to_whom, open_frames.who_is)
_OFTEN_SOMEBODY = (
    open_frames.what,
    open_frames.whom,
    open_frames.has_coloured,
    open_frames.of_a_kind,
)


@dataclass
class OpenFact:
    """A note, its subject and the questions that it answers."""

    note: str
    questions: list[str]
    clauses: list[str]
    subject: Entity
    frame: Frame | WrittenFrame
    key: Verb | str
    nears: list[str] = field(default_factory=list)
    """Questions about the same subject that the note does not answer, where its frame has some."""

    @property
    def has_subject(self) -> bool:
        """Whether other facts can have the same subject."""
        return not self.is_written and self.frame not in open_frames.WITHOUT_SUBJECT

    @property
    def is_written(self) -> bool:
        """Whether the frame was written by hand."""
        return isinstance(self.frame, WrittenFrame)

    @property
    def verb(self) -> Verb | None:
        """The verb of the note, if the frame has one."""
        return self.key if isinstance(self.key, Verb) else None

    @property
    def plain_questions(self) -> set[str]:
        """All questions without case and punctuation."""
        return {_plain(text) for text in (*self.questions, *self.clauses)}

    def says_the_same_of(self, other: OpenFact) -> bool:
        """Whether the other note may answer questions about this one."""
        if self.subject.text != other.subject.text:
            return False
        if self.frame is other.frame or self.key == other.key:
            return True
        return self.does_the_same(other.verb)

    def does_the_same(self, verb: Verb | None) -> bool:
        """Whether the note has this verb."""
        return self.verb is not None and verb is not None and self.verb.base == verb.base

    def question(self, rng: Random) -> str:
        """One of the questions, as typed by a person."""
        choice = rng.randrange(len(self.questions) + len(self.clauses))
        if choice < len(self.questions):
            text = self.questions[choice]
            if self.subject.text[-1].isdigit() and rng.random() < 0.3:
                text = text.replace(self.subject.text, self.subject.text.lower())
            return _typed(rng, text + "?")
        clause = self.clauses[choice - len(self.questions)]
        form = picked(rng, "leads_to_me" if clause.startswith("me ") else "leads")
        return _typed(rng, form.format(clause))


def _plain(question: str) -> str:
    return re.sub(r"[^a-z0-9 ]", "", question.lower())


_WRITTEN = (0.0, 0.6, 0.9, 1.0, 1.0)
"""The share of facts of written frames, by conversation."""


def _typed(rng: Random, text: str) -> str:
    """A question with the liberties that people take in typing."""
    if rng.random() < 0.08:
        text = re.sub(r"^(What|Where|When|Who|How) is\b", r"\1's", text)
    if rng.random() < 0.1:
        text = text.rstrip("?.")
    if rng.random() < 0.12:
        text = text[0].lower() + text[1:]
    kind = rng.random()
    if kind < 0.06:
        return picked(rng, "colon_leads") + text
    if kind < 0.1:
        return picked(rng, "other_leads") + text[0].lower() + text[1:]
    return text


def draw_fact(
    rng: Random,
    subject: Entity | None = None,
    frame: Frame | None = None,
    verb: Verb | None = None,
) -> OpenFact:
    """A fact, optionally with this frame, subject or verb."""
    while True:
        chosen = frame or rng.choices(_FRAMES, _WEIGHTS)[0]
        if subject is not None and chosen in open_frames.WITHOUT_SUBJECT:
            continue
        about = subject or _subject_for(rng, chosen)
        draft = chosen(rng, about, verb)
        if not is_allowed(draft.note):
            continue
        is_sentence = chosen is not open_frames.label and rng.random() < 0.93
        note = draft.note + "." if is_sentence else draft.note
        return OpenFact(note, draft.questions, draft.clauses, about, chosen, draft.key)


def _subject_for(rng: Random, frame: Frame) -> Entity:
    if frame in _NEED_SOMEBODY or (frame in _OFTEN_SOMEBODY and rng.random() < 0.6):
        return human(rng)
    return entity(rng)


def draw_written(rng: Random, frame: WrittenFrame | None = None) -> OpenFact:
    """A fact of a handwritten frame, or of this one."""
    chosen = frame or rng.choice(rng.choice(written_frames.all_frames()))
    note, asks, nears = written_frames.fill(rng, chosen)
    note = note.rstrip(".") if rng.random() < 0.1 else note
    return OpenFact(note, asks, [], Entity(note), chosen, note, nears)


def draw_many(rng: Random, count: int) -> list[OpenFact]:
    """Facts that do not answer each other's questions; some share their subject, frame or verb."""
    known: list[OpenFact] = []
    asked: set[str] = set()
    kinship = rng.choice((0.0, 0.3, 0.6))
    written = rng.choice(_WRITTEN)
    file = rng.choice(written_frames.all_frames()) if rng.random() < 0.4 else None
    for _ in range(8 * count + 20):
        if len(known) == count:
            break
        if known and rng.random() < kinship:
            fact = _relative(rng, rng.choice(known))
        elif rng.random() < written:
            fact = draw_written(rng, rng.choice(file) if file else None)
        else:
            fact = draw_fact(rng)
        if fact.is_written:
            known += [fact] if _is_told_apart(fact, known) else []
            continue
        questions = fact.plain_questions
        if questions & asked or any(_collides(rng, fact, other) for other in known):
            continue
        known.append(fact)
        asked |= questions
    return known


def _is_told_apart(fact: OpenFact, known: list[OpenFact]) -> bool:
    """Whether a fact is new and its frame is not too frequent."""
    alike = [other for other in known if other.frame is fact.frame]
    return len(alike) < 3 and all(other.note != fact.note for other in known)


def _question_among(rng: Random, fact: OpenFact, known: list[OpenFact]) -> str | None:
    """A question about a handwritten fact that fits no other note as well; None if there is none."""
    own = telling_words(fact.note)
    for text in rng.sample(fact.questions, len(fact.questions)):
        words_asked = telling_words(text)
        others = [other for other in known if other is not fact]
        if any(_fits(text, words_asked, other, len(words_asked & own), fact) for other in others):
            continue
        return _typed(rng, text)
    return None


def _fits(
    text: str, words_asked: frozenset[str], other: OpenFact, shared: int, fact: OpenFact
) -> bool:
    """Whether a question about one fact may be answered by the other."""
    if other.frame is fact.frame:
        return text in other.questions
    others_shared = len(words_asked & telling_words(other.note))
    return others_shared > 0 and others_shared >= shared


def _relative(rng: Random, old: OpenFact) -> OpenFact:
    """A similar fact: the same subject or verb, or nearly the same name."""
    if isinstance(old.frame, WrittenFrame):
        return draw_written(rng, old.frame)
    if old.frame in open_frames.WITHOUT_SUBJECT:
        return draw_fact(rng, frame=old.frame, verb=old.verb)
    kind = rng.random()
    if kind < 0.25:
        return draw_fact(rng, sibling(rng, old.subject), old.frame, old.verb)
    if kind < 0.66:
        return draw_fact(rng, old.subject)
    return draw_fact(rng, frame=old.frame, verb=old.verb)


def _collides(rng: Random, fact: OpenFact, other: OpenFact) -> bool:
    """Whether one fact may answer the other's question."""
    if fact.note == other.note or fact.says_the_same_of(other):
        return True
    if fact.subject.text != other.subject.text:
        return False
    alike = fact.questions[0].split()[0] == other.questions[0].split()[0]
    return alike and (fact.frame in open_frames.VAGUE or rng.random() < 0.5)


def _aspect_question(rng: Random, old: OpenFact, known: list[OpenFact]) -> str | None:
    """A question about another aspect of a subject; None if a note might answer it."""
    subject = old.subject
    verb = draw_verb(rng)
    form = picked(rng, "kinds_of_question")
    names = {"n": "noun", "a": "measured_by", "j": "adjective", "k": "aspects"}
    text = form.format(s=subject, v=verb, **{key: draw(rng, name) for key, name in names.items()})
    notes = [fact for fact in known if fact.subject.text == subject.text]
    if "{v." in form:
        return None if any(fact.does_the_same(verb) for fact in notes) else text
    asking = text.split()[0]
    is_near = any(question.split()[0] == asking for fact in notes for question in fact.questions)
    return None if is_near else text


def absent_question(rng: Random, known: list[OpenFact]) -> str:
    """A question that no note answers, mostly about another aspect of a note's subject."""
    asked = {text for fact in known for text in fact.plain_questions}
    for _ in range(60):
        old = rng.choice(known)
        if old.is_written:
            question = _absent_written(rng, old, known)
            if question is not None:
                return question
            continue
        if rng.random() < 0.35 and old.has_subject:
            text = _aspect_question(rng, old, known)
            if text is not None and _plain(text) not in asked:
                return _typed(rng, text + "?")
        fact = _unknown_fact(rng, known)
        if fact is None or fact.frame is open_frames.any_words:
            continue
        if fact.plain_questions & asked or any(fact.says_the_same_of(other) for other in known):
            continue
        return fact.question(rng)
    return "What is the answer?"


def _absent_written(rng: Random, old: OpenFact, known: list[OpenFact]) -> str | None:
    """A question that no note answers, similar to a handwritten fact or about something else."""
    kind = rng.random()
    if kind < 0.5:
        text = rng.choice(old.nears)
        others = [other for other in known if other is not old and other.frame is not old.frame]
        asked = telling_words(text)
        shared = len(asked & telling_words(old.note))
        if any(_fits(text, asked, other, max(shared, 1), old) for other in others):
            return None
        return _typed(rng, text)
    fact = draw_written(
        rng, old.frame if kind < 0.7 and isinstance(old.frame, WrittenFrame) else None
    )
    if fact.frame is not old.frame and any(other.frame is fact.frame for other in known):
        return None
    text = rng.choice(fact.questions)
    if any(text in other.questions for other in known):
        return None
    asked = telling_words(text)
    own = len(asked & telling_words(fact.note))
    is_near = any(
        other.frame is not fact.frame and len(asked & telling_words(other.note)) >= max(1, own)
        for other in known
    )
    return None if is_near else _typed(rng, text)


def _unknown_fact(rng: Random, known: list[OpenFact]) -> OpenFact | None:
    """A fact similar to a known one, or to none; None if this draw failed."""
    old = rng.choice([fact for fact in known if not fact.is_written])
    assert not isinstance(old.frame, WrittenFrame)
    has_subject = old.has_subject
    kind = rng.random()
    if kind < 0.52 and has_subject:
        return _other_aspect(rng, old, known)
    if kind < 0.6:
        thing = _last_thing(old.note)
        if thing is None or any(thing.text.lower() in fact.subject.text.lower() for fact in known):
            return None
        fact = draw_fact(rng, thing)
        return None if fact.does_the_same(old.verb) else fact
    if kind < 0.7:
        fact = draw_fact(rng, frame=old.frame, verb=old.verb)
    elif kind < 0.85 and has_subject:
        fact = draw_fact(rng, sibling(rng, old.subject), old.frame, old.verb)
    else:
        fact = draw_fact(rng)
    is_known = any(fact.subject.text == other.subject.text for other in known)
    return None if is_known else fact


def _other_aspect(rng: Random, old: OpenFact, known: list[OpenFact]) -> OpenFact | None:
    """Another question about the subject of a note."""
    fact = draw_fact(rng, old.subject)
    first_words_of_notes = {
        other.questions[0].split()[0].lower()
        for other in known
        if other.subject.text == old.subject.text
    }
    asking = fact.questions[0].split()[0].lower()
    is_vague = fact.frame in open_frames.VAGUE and asking in first_words_of_notes
    return None if is_vague else fact


def _last_thing(note: str) -> Entity | None:
    """The end of a note, as a subject of questions."""
    if match := re.search(r"\b(?:the|a|an) ((?:[a-z]+ )?[a-z]+)\.?$", note):
        return Entity(f"the {match[1]}")
    match = re.search(r" ([A-Z][a-z]+)\.?$", note)
    if match is None or match[1] in texts("months") or match[1].rstrip("s") in texts("days"):
        return None
    return Entity(match[1], human=True)


def one_question(rng: Random, known: list[OpenFact], doubt: float) -> tuple[str, str]:
    """A question and its answer. doubt: the probability that no note has one."""
    if rng.random() < doubt:
        return absent_question(rng, known), ABSENT
    for fact in rng.sample(known, len(known)):
        question = _question_among(rng, fact, known) if fact.is_written else fact.question(rng)
        if question is not None:
            return question, fact.note
    return absent_question(rng, known), ABSENT


def _how_many(rng: Random, most: int) -> int:
    kind = rng.random()
    if kind < 0.15:
        return 1
    if kind < 0.6:
        return min(most, rng.randint(2, 6))
    return min(most, rng.randint(7, 14) if kind < 0.92 else rng.randint(15, 40))


def _listed(rng: Random, known: list[OpenFact]) -> str:
    """Notes as a list or as a paragraph, in which they end with full stops."""
    style = draw(rng, "note_list")
    if style == "sentences":
        for fact in known:
            _end(fact)
    return listed(style, [fact.note for fact in known])


def _end(fact: OpenFact) -> None:
    """Add a full stop."""
    if not fact.note.endswith("."):
        fact.note += "."


def _ask(rng: Random, talk: Conversation, known: list[OpenFact], turns: int, doubt: float) -> None:
    for _ in range(min(turns, 2 + 2 * len(known))):
        if rng.random() < 0.04:
            talk.exchange(*small_talk(rng))
        else:
            talk.exchange(*one_question(rng, known, doubt))


def _in_system_prompt(rng: Random, talk: Conversation, most: int, doubt: float) -> None:
    known = draw_many(rng, _how_many(rng, most))
    head = picked(rng, "note_heads_of_system").format(n=draw(rng, "person"))
    space = rng.choice(("\n", "\n", "\n\n", " ")) if head else ""
    talk.say("system", head + space + _listed(rng, known))
    _ask(rng, talk, known, rng.choice((1, 2, 3, 4, 5, 6, 8)), doubt)


def _in_message(rng: Random, talk: Conversation, most: int, doubt: float) -> None:
    _maybe_system(rng, talk)
    known = draw_many(rng, _how_many(rng, most))
    head, notes = picked(rng, "note_heads_of_user"), _listed(rng, known)
    question, answer = one_question(rng, known, doubt)
    if rng.random() < 0.85:
        space = rng.choice((*texts("note_closings"), "\n\n", "\n\n"))
        message = head + notes + space + question
    else:
        message = question + rng.choice(("\n", "\n\n", " ")) + head + notes
    talk.exchange(message, answer)
    _ask(rng, talk, known, rng.choice((0, 1, 1, 2, 3, 4, 5)), doubt)


def _told_before(rng: Random, talk: Conversation, doubt: float) -> None:
    _maybe_system(rng, talk)
    left = draw_many(rng, rng.choice((1, 1, 2, 3, 4, 6, 8)))
    known: list[OpenFact] = []
    while left:
        count = min(len(left), rng.choice((1, 1, 1, 1, 2, 3)))
        told = [left.pop() for _ in range(count)]
        for fact in told:
            if count > 1 or rng.random() < 0.7:
                _end(fact)
        known += told
        text = " ".join(fact.note for fact in told)
        if rng.random() < 0.12:
            question, answer = one_question(rng, known, 0.1)
            space = rng.choice((" ", " ", " Remember that. ", "\n"))
            talk.exchange(text + space + question, answer)
            continue
        _tell(rng, talk, text, is_one=count == 1)
        if rng.random() < 0.4:
            talk.exchange(*one_question(rng, known, doubt))
    _ask(rng, talk, known, rng.choice((1, 2, 3, 4)), doubt)


def _tell(rng: Random, talk: Conversation, text: str, is_one: bool) -> None:
    """A note told in a conversation. A third of the answers are those of another model."""
    kind = rng.random()
    said = text
    if kind > 0.45:
        said = picked(rng, "telling").format(t=text)
    elif (
        kind > 0.25
        and is_one
        and text.split()[0]
        in ("The", "A", "An", "Our", "My", "We", "In", "On", "At", "There", "If")
    ):
        said = picked(rng, "telling_that").format(t=text[0].lower() + text[1:])
    answer = f"Noted: {text}"
    if rng.random() < 0.35:
        answer = picked(rng, "acknowledged")
        talk.foreign.add(answer)
    talk.exchange(said, answer)


def _maybe_system(rng: Random, talk: Conversation) -> None:
    if rng.random() < 0.2:
        talk.say("system", "You are a helpful assistant.")


def _without_notes(rng: Random, talk: Conversation) -> None:
    for _ in range(rng.choice((1, 1, 2))):
        fact = draw_written(rng) if rng.random() < 0.6 else draw_fact(rng)
        if fact.frame is not open_frames.any_words:
            talk.exchange(fact.question(rng), KNOW)


def conversation(rng: Random, most: int = 40, doubt: float = 0.4) -> Conversation:
    """Notes in the system prompt, in the user's message, told before, or none."""
    talk = Conversation()
    if rng.random() < 0.06:
        talk.enable_thinking = rng.random() < 0.3
    kind = rng.random()
    if kind < 0.42:
        _in_system_prompt(rng, talk, most, doubt)
    elif kind < 0.74:
        _in_message(rng, talk, most, doubt)
    elif kind < 0.97:
        _told_before(rng, talk, doubt)
    else:
        _without_notes(rng, talk)
    return talk if talk.messages else conversation(rng, most, doubt)

"""Generated frames of notes: kinds of sentences with their questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import open_words as w
import words
from open_words import Entity, Verb


@dataclass
class Draft:
    """A sentence and its questions."""

    note: str
    questions: list[str]
    key: Verb | str
    """What is said about the subject: two notes with one subject and one key contradict."""
    clauses: list[str] = field(default_factory=list)
    """Questions inside another sentence, such as `when the ferry leaves`."""


Frame = Callable[[Random, Entity, Verb | None], Draft]

_MEASURES = {
    "tall": "metres feet",
    "high": "metres feet",
    "long": "metres hours minutes miles",
    "deep": "metres feet",
    "wide": "metres inches",
    "old": "years weeks",
    "heavy": "kilos tons grams",
    "far": "miles",
    "thick": "inches",
    "big": "gigabytes metres",
    "hot": "degrees",
    "fast": "miles",
}
_PAIRED = words.listed(
    """
allergic to|afraid of|made of|full of|responsible for|married to|good at|proud of|interested in|based on|covered with
|known for|out of|in charge of|fond of|tired of|related to|famous for|late for|ready for|filled with
"""
)
_PHRASAL = words.listed(
    """
depend on|belong to|talk to|listen to|look after|care for|work for|pay for|ask for|wait for|report to|point to|run on
|consist of|think about|write about|connect to|come from|lead to|switch to|turn into|live with|travel to|play with
|fly to|deal with|stand for|care about|dream of|search for
"""
)
_PARTICLES = "to from with for about on at of against through".split()
_MEASURING = "cost weigh last take measure hold contain need earn use".split()
_HOW = {"last": "How long", "take": "How long", "weigh": "How much", "cost": "How much"}
_KINDS = {
    "language": ("speak learn teach know", words.LANGUAGES),
    "city": ("visit love know leave", words.CITIES),
    "instrument": (
        "play learn teach buy",
        "the cello|the piano|the flute|the guitar|the drums|the harp|the trumpet".split("|"),
    ),
    "sport": ("play like watch teach", "tennis football golf hockey rugby chess".split()),
    "food": ("like eat cook hate", words.FOODS),
    "animal": ("keep have like own", [w.article(name) for name in words.ANIMALS]),
    "subject": ("teach study like hate", "maths history physics music art biology".split()),
    "drink": ("drink like order want", "tea coffee milk juice water wine beer".split()),
    "day": ("prefer choose like keep", words.DAYS),
    "month": ("prefer choose like skip", words.MONTHS),
    "colour": ("like wear choose prefer", words.COLOURS),
}
_RESTING = ("hang", "lie", "stand", "sit", "park", "hide")


def _tensed(rng: Random, subject: Entity, verb: Verb, rest: str, asking: Sequence[str]) -> Draft:
    """A statement in some tense, and questions about its last part."""
    kind = rng.random()
    first = asking[0].lower()
    if kind < 0.55:
        note = f"{subject.at_start} {subject.present(verb)} {rest}"
        questions = [f"{how} {subject.does} {subject.text} {verb.base}" for how in asking]
        return Draft(note, questions, verb, [f"{first} {subject.text} {subject.present(verb)}"])
    if kind < 0.8:
        questions = [f"{how} did {subject.text} {verb.base}" for how in asking]
        clause = f"{first} {subject.text} {verb.past}"
        return Draft(f"{subject.at_start} {verb.past} {rest}", questions, verb, [clause])
    modal = rng.choice(("will", "must", "can", "should", "will", "may"))
    questions = [f"{how} {modal} {subject.text} {verb.base}" for how in asking]
    questions.append(f"{asking[0]} {subject.does} {subject.text} {verb.base}")
    return Draft(f"{subject.at_start} {modal} {verb.base} {rest}", questions, verb)


def _predicate(draft: Draft, subject: Entity) -> str:
    """The predicate of a note."""
    return draft.note.split(" ", len(subject.text.split()))[-1]


def when(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The ferry leaves at noon.`"""
    time, asking = w.time_of(rng)
    draft = _tensed(rng, subject, verb or w.draw_verb(rng, w.TIMED), time, asking)
    if rng.random() < 0.25:
        draft.questions.append(f"When {subject.is_} {subject.text}")
    return draft


def where(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The ladder hangs behind the door.`"""
    place, asking = w.place_of(rng)
    verb = verb or w.draw_verb(rng, w.PLACED)
    draft = _tensed(rng, subject, verb, place, asking)
    if verb.base in _RESTING or rng.random() < 0.4:
        draft.questions += [f"Where {subject.is_} {subject.text}"] * 2
    preposition, spot, *_ = place.split()
    if any(how.endswith(f"which {spot}") for how in asking):
        how = rng.choice(("Which", "What"))
        question = f"{how} {spot} {subject.does} {subject.text} {verb.base} {preposition}"
        draft.questions.append(question)
    return draft


def what(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Nora plays the cello.`"""
    thing = w.thing(rng)
    verb = verb or w.draw_verb(rng)
    draft = _tensed(rng, subject, verb, thing, ("What", "What"))
    parts = thing.split()
    if parts[0] in ("a", "an") and len(parts) == 3:
        for asking in (f"What kind of {parts[2]}", f"Which {parts[2]}"):
            draft.questions.append(f"{asking} {subject.does} {subject.text} {verb.base}")
    if rng.random() < 0.6:
        who = "Who" if subject.human else rng.choice(("Who", "What"))
        draft.questions.append(f"{who} {_predicate(draft, subject)}")
    return draft


def what_and_where(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Otto buys bread on Monday.`"""
    thing = w.thing(rng)
    verb = verb or w.draw_verb(rng)
    adverbial, asking = rng.choice((w.time_of, w.place_of))(rng)
    draft = _tensed(rng, subject, verb, f"{thing} {adverbial}", ("What", "What"))
    did = "did" if f" {verb.past} {thing}" in draft.note else subject.does
    draft.questions += [f"{how} {did} {subject.text} {verb.base} {thing}" for how in asking]
    if rng.random() < 0.3:
        who = "Who" if subject.human else "What"
        draft.questions.append(f"{who} {_predicate(draft, subject)}")
    return draft


def whom(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Ada visits Bram.`"""
    draft = _tensed(rng, subject, verb or w.draw_verb(rng), w.person(rng), ("Who", "Whom"))
    if rng.random() < 0.6:
        draft.questions.append(f"Who {_predicate(draft, subject)}")
    return draft


def to_whom(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Emil lent the drill to Fern.`"""
    fitting = "give sell lend send show tell promise bring write teach".split()
    verb = verb or w.draw_verb(rng, fitting)
    thing, person = w.thing(rng), w.person(rng)
    questions = [
        f"Who did {subject.text} {verb.base} {thing} to",
        f"To whom did {subject.text} {verb.base} {thing}",
        f"What did {subject.text} {verb.base} to {person}",
        f"Who {verb.past} {thing} to {person}",
    ]
    return Draft(f"{subject.at_start} {verb.past} {thing} to {person}", questions, verb)


def passive(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The bridge was built in 1911.`"""
    fitting = "build bear make write paint find steal break sell buy invent open close move".split()
    verb = verb or w.draw_verb(rng, fitting)
    participle = "born" if verb.base == "bear" else verb.participle
    be = subject.was if rng.random() < 0.7 else subject.is_
    kind = rng.random()
    if kind < 0.3:
        doer = w.person(rng) if rng.random() < 0.7 else w.thing(rng)
        questions = [
            f"Who {verb.past} {subject.text}",
            f"By whom {be} {subject.text} {participle}",
            f"Who {be} {subject.text} {participle} by",
        ]
        return Draft(f"{subject.at_start} {be} {participle} by {doer}", questions, verb)
    adverbial, asking = w.time_of(rng) if kind < 0.7 else w.place_of(rng)
    questions = [f"{how} {be} {subject.text} {participle}" for how in asking]
    clause = f"{asking[0].lower()} {subject.text} {be} {participle}"
    return Draft(f"{subject.at_start} {be} {participle} {adverbial}", questions, verb, [clause])


def moved(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The meeting was moved to Friday.`"""
    fitting = "move change postpone shift rename set switch reschedule".split()
    verb = verb or w.draw_verb(rng, fitting)
    perfect = "have been" if subject.many else "has been"
    be = rng.choice((subject.was, perfect))
    kind = rng.random()
    if kind < 0.5:
        hour = f"{rng.randint(1, 12)}:{rng.choice(('00', '30'))}"
        to = rng.choice((rng.choice(words.DAYS), rng.choice(words.MONTHS), hour))
        asking = "When"
    elif kind < 0.75:
        to, asking = f"the {w.compound(rng)}", "Where"
    else:
        to, asking = w.value(rng), "What"
    been = "been " if be == perfect else ""
    full = f"{asking} {be.split()[0]} {subject.text} {been}{verb.participle} to"
    questions = [f"{asking} {subject.is_} {subject.text}"] * 2 + [full]
    return Draft(f"{subject.at_start} {be} {verb.participle} to {to}", questions, verb)


def how_much(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The tower is 90 metres tall.`"""
    adjective = rng.choice(list(_MEASURES))
    unit = rng.choice(_MEASURES[adjective].split())
    note = f"{subject.at_start} {subject.is_} {w.number(rng)} {unit} {adjective}"
    clause = f"how {adjective} {subject.text} {subject.is_}"
    return Draft(note, [f"How {adjective} {subject.is_} {subject.text}"], adjective, [clause])


def measure(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The crate weighs 12 kilos.`"""
    verb = verb or w.draw_verb(rng, _MEASURING)
    unit = rng.choice(w.UNITS) if rng.random() < 0.6 else w.plural(w.noun(rng))
    asking = (_HOW.get(verb.base) or f"How many {unit}", f"How many {unit}")
    draft = _tensed(rng, subject, verb, f"{w.number(rng)} {unit}", asking)
    if verb.base == "weigh":
        draft.questions.append(f"How heavy {subject.is_} {subject.text}")
    name = {"weigh": "weight", "cost": "price"}.get(verb.base)
    if name is not None:
        draft.questions.append(f"What is the {name} of {subject.text}")
        draft.questions.append(f"What is {subject.own} {name}")
    return draft


def amount(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The fee is 20 euros a month.`"""
    unit = rng.choice(w.UNITS)
    period = rng.choice(("day", "month", "minute", "week", "year", "person", "hour"))
    each = f" {rng.choice(('per', 'a', 'each'))} {period}" if rng.random() < 0.33 else ""
    asking = ("What", "How much", "How high", f"How many {unit}")
    questions = [f"{how} {subject.is_} {subject.text}" for how in asking]
    note = f"{subject.at_start} {subject.is_} {w.number(rng)} {unit}{each}"
    return Draft(note, questions, "amount")


def attribute(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The code of the shed is 4711.`"""
    name = rng.choice(words.ATTRIBUTES) if rng.random() < 0.3 else w.noun(rng)
    if rng.random() < 0.25:
        name = f"{w.noun(rng)} {name}"
    forms = [f"{subject.own} {name}", f"the {name} of {subject.text}"]
    told = rng.choice(forms)
    if subject.text.startswith("the ") and not subject.many and rng.random() < 0.2:
        told = f"{subject.text} {name}"
    form = rng.choice((told, *forms))
    note = f"{w.start_upper(told)} {rng.choice(('is', 'is', 'is', 'was'))} {w.value(rng)}"
    questions = [f"What is {form}", f"What is {rng.choice(forms)}"]
    questions.append(f"Which {name} {subject.does} {subject.text} have")
    clauses = [f"{rng.choice(('what', 'me'))} {form}"]
    return Draft(note, questions, name, clauses)


def is_what(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The mascot is a goat.`"""
    what_it_is = rng.choice((w.value, w.thing, w.adjective, w.value))(rng)
    note = f"{subject.at_start} {subject.is_} {what_it_is}"
    clause = f"what {subject.text} {subject.is_}"
    return Draft(note, [f"What {subject.is_} {subject.text}"] * 2, "is", [clause])


def who_is(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Gus is the treasurer.`"""
    role = f"the {rng.choice(words.JOBS) if rng.random() < 0.3 else w.compound(rng)}"
    who = subject if subject.human else Entity(w.person(rng), human=True)
    if rng.random() < 0.5:
        questions = [f"Who is {role}", f"Who is {role}", f"Who is {who.text}"]
        return Draft(f"{who.at_start} is {role}", questions, role)
    return Draft(f"{w.start_upper(role)} is {who.text}", [f"Who is {role}"], role)


def called(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The cat is called Miso.`"""
    name = rng.choice((w.person(rng), w.invented(rng), w.noun(rng).capitalize()))
    word = rng.choice(("called", "called", "named"))
    questions = [
        f"What {subject.is_} {subject.text} {word}",
        f"What {subject.is_} {subject.text} called",
        f"What is the name of {subject.text}",
        f"What is {subject.own} name",
    ]
    return Draft(f"{subject.at_start} {subject.is_} {word} {name}", questions, "name")


def placed(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The spare key is hidden under the mat.`"""
    place, asking = w.place_of(rng)
    state = ""
    if rng.random() < 0.5:
        fitting = "keep hide park bury store hang build find lock put".split()
        state = (verb or w.draw_verb(rng, fitting)).participle + " "
    questions = [f"{how} {subject.is_} {subject.text}" for how in asking]
    questions += [f"{asking[0]} {subject.is_} {subject.text} {state}".strip()] * 2
    questions.append(f"Where can I find {subject.text}")
    clause = f"where {subject.text} {subject.is_}"
    note = f"{subject.at_start} {subject.is_} {state}{place}"
    return Draft(note, questions, "place", [clause])


def state_at(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The pool is closed on Mondays.`"""
    time, asking = w.time_of(rng)
    states = ("open", "closed", "due", "free", "busy", "ready", "empty", "full", "")
    state = rng.choice(states) if rng.random() < 0.7 else w.adjective(rng)
    questions = [f"{how} {subject.is_} {subject.text} {state}".strip() for how in asking]
    note = f"{subject.at_start} {subject.is_} {state} {time}".replace("  ", " ")
    return Draft(note, questions, state or "time")


def paired(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Hana is allergic to nuts.`"""
    link = rng.choice(_PAIRED)
    if rng.random() < 0.25:
        link = f"{w.adjective(rng)} {rng.choice(('of', 'to', 'for', 'with', 'about'))}"
    other = w.thing(rng) if rng.random() < 0.7 else w.person(rng)
    who = "Who" if subject.human else "What"
    questions = [
        f"What {subject.is_} {subject.text} {link}",
        f"Who {subject.is_} {subject.text} {link}",
        f"{who} is {link} {other}",
    ]
    return Draft(f"{subject.at_start} {subject.is_} {link} {other}", questions, link)


def phrasal(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The build depends on the cache.`"""
    base, particle = rng.choice(_PHRASAL).split()
    if rng.random() < 0.4:
        base, particle = w.draw_verb(rng).base, rng.choice(_PARTICLES)
    verb = verb or w.verb_of(base)
    other = rng.choice((w.thing, w.person, w.city, w.numbered))(rng)
    asking_words = ["What", "Who"]
    if other[-1].isdigit():
        asking_words = [f"Which {other.split()[0]}", f"What {other.split()[0]}"]
    elif particle in ("to", "from", "on", "at", "with"):
        asking_words.append("Where")
    draft = _tensed(rng, subject, verb, f"{particle} {other}", asking_words)
    draft.questions = [f"{question} {particle}" for question in draft.questions]
    draft.clauses = [f"{clause} {particle}" for clause in draft.clauses]
    asking = rng.choice(("what", "whom", f"which {other.split()[-1]}"))
    formal = f"{particle.capitalize()} {asking} {subject.does} {subject.text} {verb.base}"
    draft.questions.append(formal)
    return draft


def has_coloured(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Ivo drives a green van.`"""
    colour = w.adjective(rng) if rng.random() < 0.3 else rng.choice(w.COLOURS)
    name = w.noun(rng)
    verb = verb or w.draw_verb(rng, "have drive own wear ride use buy keep".split())
    asking = ("What", f"What kind of {name}", f"Which {name}")
    draft = _tensed(rng, subject, verb, w.article(f"{colour} {name}"), asking)
    if colour in w.COLOURS:
        draft.questions.append(f"What colour is {subject.own} {name}")
        draft.questions.append(f"What colour is the {name} of {subject.text}")
    return draft


def of_a_kind(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Dr. Amir speaks Hindi.`, asked for by the kind: `Which language does Dr. Amir speak?`"""
    kind = rng.choice(list(_KINDS))
    verbs, members = _KINDS[kind]
    verb = verb or w.draw_verb(rng, verbs.split())
    kinds = (f"Which {kind}", f"What {kind}", "What")
    return _tensed(rng, subject, verb, rng.choice(members), kinds)


def ours(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Our database is Postgres.`"""
    name = w.compound(rng)
    who, whose = rng.choice((("we", "our"), ("I", "my"), ("they", "their")))
    verb = verb or w.draw_verb(rng, "use have need want run keep".split())
    questions = [
        f"What is {whose} {name}",
        f"Which {name} do {who} {verb.base}",
        f"What {name} do {who} {verb.base}",
        f"Which {name} is {'mine' if whose == 'my' else whose + 's'}",
    ]
    return Draft(f"{whose.capitalize()} {name} is {w.value(rng)}", questions, name)


def we_do(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`We water the plants on Friday.`"""
    verb = verb or w.draw_verb(rng)
    who = rng.choice(("We", "I", "They", "You"))
    asked = who if who == "I" else who.lower()
    thing = w.thing(rng)
    kind = rng.random()
    if kind > 0.75:
        return Draft(f"{who} {verb.base} {thing}", [f"What do {asked} {verb.base}"], verb)
    adverbial, asking = w.time_of(rng) if kind < 0.4 else w.place_of(rng)
    questions = [f"{how} do {asked} {verb.base} {thing}" for how in asking]
    questions.append(f"What do {asked} {verb.base} {adverbial}")
    return Draft(f"{who} {verb.base} {thing} {adverbial}", questions, verb)


def yes_or_no(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The gate is not locked.`, `Juna does not eat fish.`"""
    no = "not " if rng.random() < 0.4 else ""
    if rng.random() < 0.5:
        state = w.adjective(rng)
        if rng.random() < 0.5:
            state = w.draw_verb(rng, ["allow", "permit", "lock", "repair"]).participle
        place = f" {w.place_of(rng)[0]}" if rng.random() < 0.5 else ""
        question = f"{subject.is_.capitalize()} {subject.text} {state}"
        note = f"{subject.at_start} {subject.is_} {no}{state}{place}"
        return Draft(note, [question + place, question], state)
    verb = verb or w.draw_verb(rng)
    thing = w.thing(rng)
    note = f"{subject.at_start} {subject.present(verb)} {thing}"
    if no:
        note = f"{subject.at_start} {subject.does} not {verb.base} {thing}"
    questions = [
        f"{subject.does.capitalize()} {subject.text} {verb.base} {thing}",
        f"What {subject.does} {subject.text} {no}{verb.base}",
    ]
    return Draft(note, questions, verb)


def label(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Wifi password: hunter2`"""
    name = w.compound(rng)
    note = f"{w.start_upper(name)}{rng.choice((': ', ': ', ' = ', ' - '))}{w.value(rng)}"
    questions = [f"What is the {name}", f"What is the {name}", f"What is {name}"]
    return Draft(note, [*questions, w.start_upper(name)], name)


def any_words(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """Random words; the questions keep some of them."""
    kept = [
        w.noun(rng) if rng.random() < 0.6 else w.invented(rng) for _ in range(rng.randint(2, 4))
    ]
    glue = "the a of to in for with and is was by at on from not all".split()
    parts: list[str] = []
    for word in kept:
        if rng.random() < 0.55:
            parts.append(rng.choice(glue))
        parts.append(word)
    questions = []
    for _ in range(3):
        count = min(len(kept), rng.choice((1, 2, 2, 3)))
        places = sorted(rng.sample(range(len(kept)), count))
        asking = rng.choice("What Where When Who Which Why How".split())
        small = rng.choice(("is", "does", "was", "did", "do", "of", ""))
        question = f"{asking} {small} {rng.choice(('', 'the'))} "
        question += " ".join(kept[place] for place in places)
        questions.append(" ".join(question.split()))
    note = " ".join(parts)
    return Draft(w.start_upper(note), questions, note)


WEIGHTS: dict[Frame, int] = {
    when: 10,
    where: 8,
    what: 9,
    what_and_where: 5,
    whom: 2,
    to_whom: 2,
    passive: 8,
    moved: 4,
    how_much: 4,
    measure: 7,
    amount: 4,
    attribute: 8,
    is_what: 5,
    who_is: 3,
    called: 5,
    placed: 9,
    state_at: 6,
    paired: 5,
    phrasal: 5,
    has_coloured: 4,
    of_a_kind: 4,
    ours: 3,
    we_do: 3,
    yes_or_no: 4,
    label: 3,
    any_words: 6,
}
"""How often each frame is drawn."""

WITHOUT_SUBJECT = frozenset((ours, we_do, label, any_words))
VAGUE = frozenset((is_what, amount, moved, label, yes_or_no, any_words, placed, state_at))
"""Frames whose questions are so general that another note with the same subject may answer them."""

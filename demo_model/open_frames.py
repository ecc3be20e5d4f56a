"""Generated notes with their questions: the frames of `generated_frames.txt`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from rules import HERE, article, blocks, complete, draw, start_upper, texts
from words import Entity, Verb, draw_verb, place_of, time_of, verb_of


@dataclass
class Draft:
    """A sentence and its questions."""

    note: str
    questions: list[str]
    key: Verb | str
    """The statement about the subject: two notes with one subject and one key contradict."""
    clauses: list[str] = field(default_factory=list)
    """Questions inside another sentence, such as `when the ferry leaves`."""


Frame = Callable[[Random, Entity, Verb | None], Draft]
_FRAMES = {
    block["name"][0]: block for block in blocks((HERE / "generated_frames.txt").read_text("utf-8"))
}
_MEASURES = dict(line.split(" = ") for line in texts("measures"))
_KINDS = [line.split(" = ") for line in texts("kinds_of_things")]
_HOW = {"last": "How long", "take": "How long", "weigh": "How much", "cost": "How much"}
_RESTING = ("hang", "lie", "stand", "sit", "park", "hide")


def _made(
    frame: str, subject: Entity, key: Verb | str, asking: Sequence[str] = (), /, **values: Any
) -> Draft:
    """A draft of a frame with these values. asking: question words."""
    forms = _FRAMES[frame]
    values |= {"s": subject.text, "S": subject.at_start, "own": subject.own, "is_": subject.is_}
    values |= {"does": subject.does, "how": asking[0] if asking else ""}

    def filled(text: str, **more: str) -> str:
        return text.format(**values | more).replace("  ", " ").strip()

    questions = [filled(text, how=how) for text in forms.get("each", []) for how in asking]
    questions += [filled(text) for text in forms.get("ask", [])]
    clauses = [filled(text) for text in forms.get("clause", [])]
    return Draft(filled(forms["note"][0]), questions, key, clauses)


def _by_rules(frame: str) -> Frame:
    """A frame whose values are drawn by the rules of its `value:` lines."""
    forms = _FRAMES[frame]
    rules = [line.split(" := ") for line in forms["value"]]

    def made(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
        if "verb" in forms:
            verb = verb or draw_verb(rng, forms["verb"][0])
        values: dict[str, Any] = {"who": "Who" if subject.human else "What"}
        for name, text in rules:
            values[name] = complete(rng, text, values)
        key = forms["key"][0]
        return _made(
            frame, subject, (verb if key == "v" else values.get(key)) or key, v=verb, **values
        )

    return made


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


def _ask_who(draft: Draft, subject: Entity, who: str) -> None:
    """Add a question for the subject."""
    predicate = draft.note.split(" ", len(subject.text.split()))[-1]
    draft.questions.append(f"{who} {predicate}")


def _when_or_where(rng: Random, is_time: bool) -> tuple[str, list[str]]:
    return time_of(rng) if is_time else place_of(rng)


def when(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The ferry leaves at noon.`"""
    time, asking = time_of(rng)
    verb = verb or draw_verb(rng, " ".join(texts("verbs_of_time")))
    draft = _tensed(rng, subject, verb, time, asking)
    if rng.random() < 0.25:
        draft.questions.append(f"When {subject.is_} {subject.text}")
    return draft


def where(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The ladder hangs behind the door.`"""
    place, asking = place_of(rng)
    verb = verb or draw_verb(rng, " ".join(texts("verbs_of_place")))
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
    thing = draw(rng, "thing")
    verb = verb or draw_verb(rng)
    draft = _tensed(rng, subject, verb, thing, ("What", "What"))
    parts = thing.split()
    if parts[0] in ("a", "an") and len(parts) == 3:
        for asking in (f"What kind of {parts[2]}", f"Which {parts[2]}"):
            draft.questions.append(f"{asking} {subject.does} {subject.text} {verb.base}")
    if rng.random() < 0.6:
        _ask_who(draft, subject, "Who" if subject.human else rng.choice(("Who", "What")))
    return draft


def what_and_where(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Otto buys bread on Monday.`"""
    thing = draw(rng, "thing")
    verb = verb or draw_verb(rng)
    adverbial, asking = _when_or_where(rng, rng.choice((True, False)))
    draft = _tensed(rng, subject, verb, f"{thing} {adverbial}", ("What", "What"))
    did = "did" if f" {verb.past} {thing}" in draft.note else subject.does
    draft.questions += [f"{how} {did} {subject.text} {verb.base} {thing}" for how in asking]
    if rng.random() < 0.3:
        _ask_who(draft, subject, "Who" if subject.human else "What")
    return draft


def whom(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Ada visits Bram.`"""
    verb = verb or draw_verb(rng)
    draft = _tensed(rng, subject, verb, draw(rng, "person"), ("Who", "Whom"))
    if rng.random() < 0.6:
        _ask_who(draft, subject, "Who")
    return draft


def passive(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The bridge was built in 1911.`"""
    fitting = "build bear make write paint find steal break sell buy invent open close move"
    verb = verb or draw_verb(rng, fitting)
    values: dict[str, Any] = {"v": verb}
    values["participle"] = "born" if verb.base == "bear" else verb.participle
    values["be"] = subject.was if rng.random() < 0.7 else subject.is_
    kind = rng.random()
    if kind < 0.3:
        doer = draw(rng, "person_or_thing")
        return _made("passive_with_doer", subject, verb, doer=doer, **values)
    adverbial, asking = _when_or_where(rng, kind < 0.7)
    values |= {"adverbial": adverbial, "asking": asking[0].lower()}
    return _made("passive", subject, verb, asking, **values)


def moved(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The meeting was moved to Friday.`"""
    verb = verb or draw_verb(rng, "move change postpone shift rename set switch reschedule")
    perfect = "have been" if subject.many else "has been"
    be = rng.choice((subject.was, perfect))
    kind = rng.random()
    if kind < 0.5:
        to, asking = draw(rng, "new_time"), "When"
    elif kind < 0.75:
        to, asking = f"the {draw(rng, 'compound')}", "Where"
    else:
        to, asking = draw(rng, "value"), "What"
    have, _, been = be.partition(" ")
    return _made("moved", subject, verb, v=verb, be=be, to=to, asking=asking, have=have, been=been)


def how_much(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The tower is 90 metres tall.`"""
    adjective = rng.choice(list(_MEASURES))
    unit = rng.choice(_MEASURES[adjective].split())
    values = {"adjective": adjective, "unit": unit, "number": draw(rng, "number")}
    return _made("how_much", subject, adjective, **values)


def measure(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The crate weighs 12 kilos.`"""
    verb = verb or draw_verb(rng, "cost weigh last take measure hold contain need earn use")
    unit = draw(rng, "unit_or_plural")
    asking = (_HOW.get(verb.base) or f"How many {unit}", f"How many {unit}")
    draft = _tensed(rng, subject, verb, f"{draw(rng, 'number')} {unit}", asking)
    if verb.base == "weigh":
        draft.questions.append(f"How heavy {subject.is_} {subject.text}")
    name = {"weigh": "weight", "cost": "price"}.get(verb.base)
    if name is not None:
        draft.questions.append(f"What is the {name} of {subject.text}")
        draft.questions.append(f"What is {subject.own} {name}")
    return draft


def attribute(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The code of the shed is 4711.`"""
    name = draw(rng, "attribute_name")
    if rng.random() < 0.25:
        name = f"{draw(rng, 'noun')} {name}"
    forms = [f"{subject.own} {name}", f"the {name} of {subject.text}"]
    told = rng.choice(forms)
    if subject.text.startswith("the ") and not subject.many and rng.random() < 0.2:
        told = f"{subject.text} {name}"
    values = {"form": rng.choice((told, *forms)), "told": start_upper(told), "name": name}
    values["tense"] = rng.choice(("is", "is", "is", "was"))
    values["value"] = draw(rng, "value")
    values["other"] = rng.choice(forms)
    values["whom"] = rng.choice(("what", "me"))
    return _made("attribute", subject, name, **values)


def who_is(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Gus is the treasurer.`"""
    role = f"the {draw(rng, 'job_or_compound')}"
    who = subject if subject.human else Entity(draw(rng, "person"), human=True)
    name = "who_is" if rng.random() < 0.5 else "role_is"
    return _made(name, who, role, role=role, Role=start_upper(role))


def placed(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The spare key is hidden under the mat.`"""
    place, asking = place_of(rng)
    state = ""
    if rng.random() < 0.5:
        fitting = "keep hide park bury store hang build find lock put"
        state = (verb or draw_verb(rng, fitting)).participle
    return _made("placed", subject, "place", asking, state=state, place=place)


def state_at(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The pool is closed on Mondays.`"""
    time, asking = time_of(rng)
    state = draw(rng, "state") if rng.random() < 0.7 else draw(rng, "adjective")
    return _made("state_at", subject, state or "time", asking, state=state, time=time)


def phrasal(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The build depends on the cache.`"""
    base, particle = draw(rng, "phrasal_verbs").split()
    if rng.random() < 0.4:
        base, particle = draw_verb(rng).base, draw(rng, "particles")
    verb = verb or verb_of(base)
    other = draw(rng, "linked")
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
    colour, name = draw(rng, "colour_of_thing"), draw(rng, "noun")
    verb = verb or draw_verb(rng, "have drive own wear ride use buy keep")
    asking = ("What", f"What kind of {name}", f"Which {name}")
    draft = _tensed(rng, subject, verb, article(f"{colour} {name}"), asking)
    if colour in texts("all_colours"):
        draft.questions.append(f"What colour is {subject.own} {name}")
        draft.questions.append(f"What colour is the {name} of {subject.text}")
    return draft


def of_a_kind(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Dr. Amir speaks Hindi.`, asked for by the kind: `Which language does Dr. Amir speak?`"""
    kind, verbs, members = rng.choice(_KINDS)
    verb = verb or draw_verb(rng, verbs)
    kinds = (f"Which {kind}", f"What {kind}", "What")
    names = members.split("|")
    member = rng.choice(names) if len(names) > 1 else complete(rng, members, {})
    return _tensed(rng, subject, verb, member, kinds)


def ours(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`Our database is Postgres.`"""
    name = draw(rng, "compound")
    who, whose = rng.choice((("we", "our"), ("I", "my"), ("they", "their")))
    verb = verb or draw_verb(rng, "use have need want run keep")
    values = {"whose": whose, "Whose": whose.capitalize(), "who": who, "v": verb}
    values["possessive"] = "mine" if whose == "my" else f"{whose}s"
    values["value"] = draw(rng, "value")
    return _made("ours", subject, name, name=name, **values)


def we_do(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`We water the plants on Friday.`"""
    verb = verb or draw_verb(rng)
    who = rng.choice(("We", "I", "They", "You"))
    asked = who if who == "I" else who.lower()
    thing = draw(rng, "thing")
    kind = rng.random()
    if kind > 0.75:
        return Draft(f"{who} {verb.base} {thing}", [f"What do {asked} {verb.base}"], verb)
    adverbial, asking = _when_or_where(rng, kind < 0.4)
    values = {"who": who, "asked": asked, "v": verb, "thing": thing, "adverbial": adverbial}
    return _made("we_do", subject, verb, asking, **values)


def yes_or_no(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """`The gate is not locked.`, `Juna does not eat fish.`"""
    no = "not " if rng.random() < 0.4 else ""
    if rng.random() < 0.5:
        state = draw(rng, "adjective")
        if rng.random() < 0.5:
            state = draw_verb(rng, "allow permit lock repair").participle
        place = f" {place_of(rng)[0]}" if rng.random() < 0.5 else ""
        question = f"{subject.is_.capitalize()} {subject.text} {state}"
        note = f"{subject.at_start} {subject.is_} {no}{state}{place}"
        return Draft(note, [question + place, question], state)
    verb = verb or draw_verb(rng)
    thing = draw(rng, "thing")
    predicate = f"{subject.does} not {verb.base}" if no else subject.present(verb)
    questions = [
        f"{subject.does.capitalize()} {subject.text} {verb.base} {thing}",
        f"What {subject.does} {subject.text} {no}{verb.base}",
    ]
    return Draft(f"{subject.at_start} {predicate} {thing}", questions, verb)


def any_words(rng: Random, subject: Entity, verb: Verb | None) -> Draft:
    """Random words; the questions keep some of them."""
    kept = [draw(rng, "word_kept") for _ in range(rng.randint(2, 4))]
    parts: list[str] = []
    for word in kept:
        if rng.random() < 0.55:
            parts.append(draw(rng, "fillers_between"))
        parts.append(word)
    questions = []
    for _ in range(3):
        count = min(len(kept), rng.choice((1, 2, 2, 3)))
        places = sorted(rng.sample(range(len(kept)), count))
        asking = rng.choice("What Where When Who Which Why How".split())
        small = draw(rng, "small_verbs")
        question = [asking, small, rng.choice(("", "the")), *(kept[place] for place in places)]
        questions.append(" ".join(word for word in question if word))
    note = " ".join(parts)
    return Draft(start_upper(note), questions, note)


_BUILT: dict[str, Frame] = {
    name: _by_rules(name) if "value" in block else globals()[name]
    for name, block in _FRAMES.items()
    if block["weight"] != ["0"]
}
to_whom, label = _BUILT["to_whom"], _BUILT["label"]
WEIGHTS: dict[Frame, int] = {made: int(_FRAMES[name]["weight"][0]) for name, made in _BUILT.items()}
"""How often each frame is drawn."""
WITHOUT_SUBJECT = frozenset(made for name, made in _BUILT.items() if "alone" in _FRAMES[name])
VAGUE = frozenset(made for name, made in _BUILT.items() if "vague" in _FRAMES[name])
"""Frames whose questions are so general that another note with the same subject may answer them."""

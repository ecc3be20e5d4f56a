"""Whatever the model cannot know or do, from a wide grammar, and the one honest sentence that it answers."""

from __future__ import annotations

from random import Random

import beyond_words as b
import words
from spelling import typed

KNOW = "I do not know that, but I can answer questions about notes you give me."
DO = "I cannot do that, but I can answer questions about notes, add small numbers, count, copy and edit text."
UNCLEAR = "I did not understand that, but I can answer questions about notes, add small numbers, count, copy and edit text."

_KEYS = ("qwertyuiop", "asdfghjkl", "zxcvbnm", "1234567890", "asdf", "jkl", "qwe", "hjkl;", "xyz", "abc", "aaa", ",./")
_QUESTIONS = (
    "What is {topic}?", "What are {topic}?", "What is the {noun} of {place}?", "What is the {noun} of {topic}?", "What's {topic}?",
    "Who {deed}?", "Who is {person}?", "Who was {person}?", "Who are {topic}?", "Where is {place}?", "Where is {thing}?", "Where can I buy {topic}?",
    "Where does {person} live?", "Where do I find {topic}?", "When did {happened}?", "When does {happened}?", "When will {happened}?",
    "When was {person} born?", "Why {why}?", "How do I {howto}?", "How to {howto}?", "How can I {howto}?", "How does {topic} work?",
    "How do {topic} work?", "How many {topic} are there?", "How many {topic} are there in {place}?", "How much is {thing}?", "How much does {thing} cost?",
    "How {adjective} is {thing}?", "How {adjective} is {person}?", "How {adjective} are {topic}?", "How long does it take to {howto}?",
    "How old is {person}?", "How far is {place}?", "Is {thing} {adjective}?", "Is {topic} {adjective}?", "Are {topic} {adjective}?",
    "Does {person} like {topic}?", "Do you know {topic}?", "Do you know who {deed}?", "Do you know {person}?", "Do you know about {topic}?",
    "Do you like {topic}?", "Should I {choice}?", "Is it good to {howto}?", "Is it {adjective} to {howto}?", "Would you {choice}?",
    "What do you think about {topic}?", "What do you think of {person}?", "What is your opinion on {topic}?", "What does {word} mean?",
    "What is a {word}?", "What is {word}?", "Who is {name}?", "Which is better, {topic} or {topic2}?", "What is better: {topic} or {topic2}?",
    "Is there life on {place}?", "What is the weather in {place}?", "What is the weather like?", "What is the weather like in {place} {when}?", "Weather?", "Weather in {place}",
    "Will it {sky} {when}?", "Will it {sky} in {place} {when}?", "Is it going to {sky} {when}?", "How is the weather {when}?", "What is the temperature in {place}?",
    "What is the weather {when}?", "What is the weather?", "How is the weather?",
    "What time is it?", "What time is it in {place}?", "What day is it?", "What is the date today?", "What year is it?", "What is the time?",
    "What is the news?", "What happened {when}?", "What happened in {year}?", "Who won in {year}?", "Who won {contest}?", "Who won {contest} in {year}?", "What is new in {place}?",
    "What is happening in {place}?", "What is the best {noun} in {place}?", "What is the biggest {noun}?", "What is the capital of {place}?", "How many people live in {place}?",
    "How many {noun}s does {place} have?", "Which {noun} is the {adjective}est?", "What is the difference between {topic} and {topic2}?", "What causes {topic}?",
    "Can {topic} be {adjective}?", "Is it true that {sentence}", "What is the best way to {howto}?", "What happens if I {choice}?", "Why should I {choice}?",
    "I have {ill}, what should I do?", "I have {ill}. What can I take?", "What helps against {ill}?", "Is {ill} dangerous?", "I think I have {ill}.",
    "What will happen {when}?", "What shall I {verb} {when}?", "What is the price of {topic}?", "What is the meaning of {topic}?",
    "Is {place} {adjective}?", "Was {person} {adjective}?", "Have you heard of {person}?", "Have you been to {place}?", "Have you seen {topic}?",
    "{topic}?", "{person}?", "{place}?", "And {topic}?", "What about {topic}?", "Anything about {topic}?", "Latest news on {topic}", "News about {place}", "News", "Any news?",
    "Facts about {topic}", "Something about {topic}", "Tell me about {topic}.", "Tell me about {person}.", "Tell me about {place}.",
    "Tell me something about {topic}.", "Tell me more about {topic}.", "Explain {topic}.", "Explain {topic} to me.", "Explain why {sentence}", "Explain how to {howto}.",
    "Explain {topic} like I am five.", "Describe {topic}.", "Describe {thing}.", "Define {topic}.", "Define {word}.", "I want to know about {topic}.",
    "I want to learn about {topic}.", "I have a question about {topic}.", "Can you explain {topic}?", "Can you tell me about {topic}?",
    "Can you tell me who {deed}?", "Can you tell me how to {howto}?", "Could you explain why {why}?", "I wonder why {sentence}", "I would like to know who {deed}.",
    "Let's talk about {topic}.", "Let us discuss {topic}.", "{topic} explained", "History of {place}", "Meaning of {word}", "Give me information about {topic}.", "What do you know about {topic}?",
    "Who {deed} and why?", "Name a {noun} in {place}.", "Best {noun} in {place}", "Is {person} still alive?", "How did {person} die?", "Compare {topic} and {topic2}.",
)
_REQUESTS = (
    "Write {piece}.", "Write {piece} about {topic}.", "Write {piece} on {topic}.", "Write {piece} for {name}.", "Write me {piece}.", "Write me {piece} about {topic}.",
    "Write me {piece} that {codes}.", "Write {piece} that {codes}.", "Write a {language} {program} that {codes}.", "Write a {language} {program} to {howto}.", "Write a {program} in {language}.",
    "Write me a {language} {program} that {codes}.", "Can you write {piece}?", "Can you write {piece} about {topic}?", "Please write {piece} about {topic}.", "I need {piece}.",
    "I need {piece} about {topic}.", "I want {piece} about {topic}.", "Create {piece}.", "Create {piece} about {topic}.", "Compose {piece}.", "Compose {piece} about {topic}.",
    "Make {piece}.", "Make me {piece} about {topic}.", "Generate {piece}.", "Generate {piece} about {topic}.", "Design {piece}.", "Give me {piece}.", "Give me {piece} for {topic}.",
    "Give me {piece} about {topic}.", "Draft {piece} to {person}.", "Invent {piece}.", "Show me {piece}.", "Draw {thing}.", "Draw {topic}.", "Draw a {animal}.", "Paint {thing}.",
    "Sketch a {animal}.", "Sing about {topic}.", "Sing {piece}.", "Play {topic}.", "Play some {music}.", "Play me some {music}.",
    "{order}.", "{order}.", "{order}.", "{order}.", "{order}.", "{order}.", "Please {order}.", "Can you {order}?", "Could you {order}?", "Could you please {order}?", "I want you to {order}.",
    "Would you {order}?", "Will you {order} for me?", "Are you able to {order}?", "I need you to {order}.", "{order} for me.", "{order} now.", "Let's {order}.",
    "Translate {topic} into {tongue}.", "Translate '{topic}' to {tongue}.", "Translate into {tongue}: {sentence}", "Translate '{saying}' into {tongue}.", "How do you say '{saying}' in {tongue}?",
    "What is {topic} in {tongue}?", "How do you say {topic} in {tongue}?", "Can you speak {tongue}?", "Do you speak {tongue}?", "Say it in {tongue}.", "Say '{saying}' in {tongue}.", "Answer in {tongue}.",
    "Summarise {topic}.", "Summarize this: {sentence}", "Summarise the book {word}.", "Summarise the story of {person}.", "Sum up {topic} for me.", "Rephrase: {sentence}", "Paraphrase this: {sentence}", "Improve this text: {sentence}",
    "Correct the grammar: {sentence}", "Fix this code: {code}", "Fix: {code}", "What does this code do? {code}", "Explain this code: {code}", "Debug this: {code}", "Is this code right? {code}",
    "Book a flight to {place}.", "Book a hotel in {place}.", "Find a flight to {place}.", "Plan a trip to {place}.", "Order {topic}.", "Buy {topic}.", "Show me {topic}.", "Show me {place}.",
    "Search for {topic}.", "Google {topic}.", "Look up {topic}.", "Find {topic}.", "Find me a {noun} in {place}.", "Call {person}.", "Call {name}.", "Email {name}.", "Send {topic} to {name}.", "Open {topic}.",
    "Set an alarm for {hour}.", "Set a timer for {hour}.", "Wake me at {hour}.", "Remind me at {hour} to {howto}.", "Turn on the {noun}.", "Turn off the {noun}.",
    "Teach me {topic}.", "Teach me how to {howto}.", "Help me {howto}.", "Help me with {topic}.", "Help me to {howto}.", "Can you help me {howto}?", "Give me advice on {topic}.", "Give me a recipe for {food}.",
    "Recipe for {food}", "How do I cook {food}?", "Recommend {piece}.", "Suggest {topic}.", "List {topic}.", "List five {topic}.", "List all {topic}.", "Name five {topic}.", "Name a famous {noun}.",
    "Prove that {sentence}", "Solve {maths}.", "What is {maths}?", "Calculate {maths}.", "Convert {hour} to {noun}.", "Act as {person}.", "Pretend you are {person}.", "Speak like {person}.", "Imagine {topic}.",
    "Guess what {topic} is.", "Predict {topic}.", "Sell me {topic}.", "Argue about {topic}.", "Debate {topic} with me.", "Write 500 words about {topic}.", "Write a story that {sentence}",
)
_FORMS = _QUESTIONS + _REQUESTS
_SLOTS: dict[str, list[str]] = {
    "topic": b.TOPICS, "topic2": b.TOPICS, "person": b.PEOPLE, "deed": b.DEEDS, "thing": b.THINGS, "adjective": b.ADJECTIVES, "happened": b.HAPPENED, "why": b.WHYS,
    "howto": b.HOWTOS, "choice": b.CHOICES, "piece": b.PIECES, "order": b.ORDERS, "sentence": b.SENTENCES, "code": b.CODE, "food": words.FOODS, "animal": words.ANIMALS,
    "place": [*words.CITIES, *"France Spain Italy Japan Brazil Egypt India China Kenya Texas Mars Peru Chile Norway Iceland Vietnam Cuba Iran Nepal Hamburg Madrid Oxford Venice Chicago Sydney".split(), "New York", "the world", "the north", "South Africa", "my town", "the city"],
    "noun": "president|king|language|flag|population|currency|restaurant|hotel|river|city|museum|island|bridge|band|singer|film|song|painter|country|mountain|lamp|heating|television|anthem|price|speed|size|colour|shape|age|history|law|doctor|team|club|airport".split("|"),
    "language": "Python|Java|JavaScript|Rust|C|C++|Go|Ruby|SQL|bash|Swift|PHP".split("|"), "program": "function|script|program|class|loop|test|module|bot|game|tool".split("|"),
    "codes": "adds two lists|reverses a string|reads a file|prints primes|counts lines|finds the largest number|sends mail|parses JSON|draws a circle|downloads a page|computes factorials|removes duplicates|plays tic tac toe|checks a password".split("|"),
    "tongue": [*words.LANGUAGES, "Italian", "Latin", "Chinese", "Russian", "Greek", "Swedish", "Dutch", "Portuguese", "Korean", "Klingon"],
    "saying": "good morning|thank you|I love you|where is the station|how are you|one beer please|see you soon|the cat is black|my name is Tom|happy birthday|I am hungry|water|yes|goodbye|sweet dreams".split("|"),
    "when": "today|tomorrow|tonight|yesterday|this week|next week|on Sunday|last night|this weekend|now|next year|in May|on Monday".split("|"),
    "sky": "rain snow storm freeze thunder hail".split(), "music": "music|rock|pop|blues|Mozart|piano music|techno|folk songs|classical music|metal|opera".split("|"),
    "contest": "the election|the Super Bowl|the Oscar|Eurovision|Wimbledon|the championship|the Tour de France|the Nobel prize|the war|the cup final|the match|the race|the lottery|the league".split("|"),
    "ill": "a fever|a cold|a rash|a cough|back pain|a sore throat|the flu|stomach pain|a burn|an allergy|a broken arm|high blood pressure|no energy|a toothache|insomnia|a swollen foot".split("|"),
    "verb": "eat wear cook read do buy watch cook drink say play".split(),
}


def _maths(rng: Random) -> str:
    first, second = rng.randint(2, 999), rng.randint(2, 99)
    return rng.choice((f"{first} * {second}", f"{first} times {second}", f"{first} / {second}", f"{first} - {second}", f"{first} minus {second}", f"the square root of {first}", f"{second}% of {first}", f"x + {second} = {first}", f"{second}^2", f"{first} divided by {second}"))


def _fill(rng: Random, form: str) -> str:
    slots = {name: rng.choice(items) for name, items in _SLOTS.items()}
    slots["maths"], slots["year"] = _maths(rng), str(rng.randint(1400, 2030))
    slots["hour"] = rng.choice((f"{rng.randint(1, 12)} {rng.choice(('am', 'pm'))}", f"{rng.randint(5, 23)}:{rng.choice(('00', '15', '30'))}", f"{rng.randint(2, 90)} minutes"))
    slots["word"] = words.invent(rng, rng.random() < 0.3) if rng.random() < 0.5 else words.common_word(rng)
    slots["name"] = words.invent(rng, True) if rng.random() < 0.3 else rng.choice(words.NAMES)
    if rng.random() < 0.2:  # topics and places that nobody has heard of, so that the form alone decides
        slots["topic"] = " ".join(words.invent(rng) for _ in range(rng.randint(1, 2)))
        slots["place"], slots["person"] = words.invent(rng, True), f"{words.invent(rng, True)} {words.invent(rng, True)}"
    elif rng.random() < 0.2:
        slots["topic"] = f"{rng.choice(b.ADJECTIVES)} {words.common_word(rng)}s"
    text = form.format(**slots)
    return text[0].upper() + text[1:]


def _keys(rng: Random) -> str:
    """Fingers on the keyboard."""
    parts = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        row = rng.choice(_KEYS)
        start = rng.randrange(len(row))
        part = (row[start:] + row[:start])[: rng.randint(2, 7)]
        parts.append(part if rng.random() < 0.6 else "".join(rng.sample(part, len(part))))
    return rng.choice((" ", "", " ")).join(parts) * rng.choice((1, 1, 1, 2))


def _unclear(rng: Random) -> str:
    """Nothing that can be understood: keys, invented words, other languages, code, half sentences, pasted texts."""
    kind = rng.random()
    if kind < 0.14:
        return _keys(rng)
    if kind < 0.26:
        return typed(rng, " ".join(words.invent(rng, rng.random() < 0.2) for _ in range(rng.choice((1, 1, 2, 2, 3, 5)))))
    if kind < 0.42:
        return typed(rng, rng.choice(b.FOREIGN), 0.05)
    if kind < 0.6:
        pool = rng.choice(b.FOREIGN_WORDS)
        text = " ".join(words.invent(rng) if rng.random() < 0.15 else rng.choice(pool) for _ in range(rng.randint(2, 9)))
        return typed(rng, text[0].upper() + text[1:] + rng.choice(("", "?", ".", " ?", "!")), 0.05)
    if kind < 0.72:
        return "\n".join(rng.choice(b.CODE) for _ in range(rng.choice((1, 1, 1, 2, 3, 6))))
    if kind < 0.86:
        return rng.choice((" ", " ", "\n")).join(_sentence(rng) for _ in range(rng.choice((1, 2, 3, 3, 4, 5, 6))))
    if kind < 0.92:
        chosen = rng.choice(b.SENTENCES).split()
        return typed(rng, " ".join(chosen[: rng.randint(2, max(2, len(chosen) - 1))]))
    return typed(rng, rng.choice(("?", "???", "...", ".", "!", "Huh?", "What?", "Why?", "How?", "When?", "Where?", "Hm", "Hmm", "Eh?", "Again?", "And?", "So?", "Then?", "What do you mean?", "What does that mean?", "The", "And then", "If", ":)", "<3", "Blah blah", "La la la", "I", "Because", "Or not")), 0.0)


def _sentence(rng: Random) -> str:
    """A sentence of the list, some of its words exchanged."""
    pieces = rng.choice(b.SENTENCES).split()
    for place, piece in enumerate(pieces):
        if place and piece.isalpha() and rng.random() < 0.18:
            pieces[place] = words.invent(rng) if rng.random() < 0.35 else words.common_word(rng)
    return " ".join(pieces)


def beyond(rng: Random) -> tuple[str, str]:
    """A message and the honest answer."""
    kind = rng.random()
    if kind < 0.42:
        return typed(rng, _fill(rng, rng.choice(_QUESTIONS)), 0.08), KNOW
    if kind < 0.78:
        return typed(rng, _fill(rng, rng.choice(_REQUESTS)), 0.08), DO
    return _unclear(rng), UNCLEAR


def question(rng: Random) -> str:
    """A question about the world."""
    return typed(rng, _fill(rng, rng.choice(_QUESTIONS)), 0.05)

"""Forms of questions that the model cannot answer, and the fillers of their slots."""

from __future__ import annotations

from collections.abc import Sequence

import beyond_words as b
import words
from words import listed, lists_of

_LISTED = lists_of("beyond_forms")
QUESTIONS = tuple(_LISTED["QUESTIONS"])
REQUESTS = tuple(_LISTED["REQUESTS"])
_MORE_PLACES = tuple(_LISTED["_MORE_PLACES"])
_MORE_TONGUES = tuple(_LISTED["_MORE_TONGUES"])
SLOTS: dict[str, Sequence[str]] = {
    "topic": b.TOPICS,
    "topic2": b.TOPICS,
    "person": b.PEOPLE,
    "deed": b.DEEDS,
    "thing": b.THINGS,
    "adjective": b.ADJECTIVES,
    "happened": b.HAPPENED,
    "why": b.WHYS,
    "howto": b.HOWTOS,
    "choice": b.CHOICES,
    "piece": b.PIECES,
    "order": b.ORDERS,
    "sentence": b.SENTENCES,
    "code": b.CODE,
    "food": words.FOODS,
    "animal": words.ANIMALS,
    "place": [*words.CITIES, *_MORE_PLACES],
    "noun": listed(
        """
president|king|language|flag|population|currency|restaurant|hotel|river|city|museum|island|bridge|band|singer|film|song
|painter|country|mountain|lamp|heating|television|anthem|price|speed|size|colour|shape|age|history|law|doctor|team|club
|airport
"""
    ),
    "language": listed(
        """
Python|Java|JavaScript|Rust|C|C++|Go|Ruby|SQL|bash|Swift|PHP
"""
    ),
    "program": listed(
        """
function|script|program|class|loop|test|module|bot|game|tool
"""
    ),
    "codes": listed(
        """
adds two lists|reverses a string|reads a file|prints primes|counts lines|finds the largest number|sends mail|parses JSON
|draws a circle|downloads a page|computes factorials|removes duplicates|plays tic tac toe|checks a password
"""
    ),
    "tongue": [*words.LANGUAGES, *_MORE_TONGUES],
    "saying": listed(
        """
good morning|thank you|I love you|where is the station|how are you|one beer please|see you soon|the cat is black
|my name is Tom|happy birthday|I am hungry|water|yes|goodbye|sweet dreams
"""
    ),
    "when": listed(
        """
today|tomorrow|tonight|yesterday|this week|next week|on Sunday|last night|this weekend|now|next year|in May|on Monday
"""
    ),
    "sky": listed(
        """
rain|snow|storm|freeze|thunder|hail
"""
    ),
    "music": listed(
        """
music|rock|pop|blues|Mozart|piano music|techno|folk songs|classical music|metal|opera
"""
    ),
    "contest": listed(
        """
the election|the Super Bowl|the Oscar|Eurovision|Wimbledon|the championship|the Tour de France|the Nobel prize|the war
|the cup final|the match|the race|the lottery|the league
"""
    ),
    "ill": listed(
        """
a fever|a cold|a rash|a cough|back pain|a sore throat|the flu|stomach pain|a burn|an allergy|a broken arm|high blood pressure
|no energy|a toothache|insomnia|a swollen foot
"""
    ),
    "verb": listed(
        """
eat|wear|cook|read|do|buy|watch|cook|drink|say|play
"""
    ),
}
"""What may stand in a gap, but for numbers and invented words."""

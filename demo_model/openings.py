"""First words of users, held out from training, with the class that determines how answers are
judged.

They were written, with the rules of `judge.py`, before the training data. No user message of the
training may equal one of them after `plain()` (`test_data.py`). Only `SHOWN` may be part of the
training.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Opening:
    """A first message and its class in `judge.py`. expected: what the answer must contain."""

    kind: str
    text: str
    expected: str = ""


def plain(text: str) -> str:
    """The text in lower case, with only its letters, digits and single spaces."""
    return " ".join(re.sub(r"[^\w\s]|_", " ", text.lower()).split())


SHOWN = (
    Opening("greeting", "Say hello."),
    Opening("greeting", "hi"),
    Opening("greeting", "hello"),
    Opening("greeting", "hey there"),
    Opening("thanks", "thanks"),
    Opening("sum", "what is 2+3", "5"),
    Opening("who", "who are you?"),
    Opening("beyond", "what's the weather"),
    Opening("beyond", "write a poem"),
)
"""The nine openings that the first users typed."""

_BY_KIND: dict[str, tuple[str, ...]] = {
    "greeting": (
        "heya!!",
        "Good morning to you",
        "hello computer",
        "Howdy partner",
        "hii",
        "HELLO THERE",
        "greetings, little model",
        "good afternoon :)",
        "hullo",
        "hi again",
    ),
    "thanks": ("thx a lot", "ty!", "much appreciated", "cheers mate", "thank u so much"),
    "goodbye": (
        "cya later",
        "ok bye then",
        "Farewell, my friend",
        "gotta run, bye",
        "see you tomorrow",
    ),
    "who": (
        "so who exactly are you",
        "whats ur name",
        "are you chatgpt?",
        "what kind of model is this",
        "Tell me something about yourself, please",
        "am I talking to a robot",
    ),
    "able": (
        "what are you good at",
        "list your skills",
        "what can i use you for",
        "Which tasks can you do?",
        "show me what u can do",
        "your abilities?",
    ),
    "help": (
        "pls help me",
        "how does this thing work",
        "I need some help here",
        "what should I type",
    ),
    "wellbeing": (
        "how r u doing today",
        "How's it going?",
        "are you ok?",
        "everything alright with you",
    ),
    "praise": ("you're really clever", "nice work!", "i like you a lot", "That was a great answer"),
    "insult": ("you are so dumb", "this is garbage", "what a useless bot"),
    "nod": ("okay cool", "alright then", "yep"),
    "check": ("testing 1 2 3", "is anyone there", "test test"),
    "joke": ("do you know any good jokes", "make me laugh"),
    "beyond": (
        "will it rain in Hamburg tomorrow",
        "who won the world cup in 1998",
        "what's the latest news",
        "How tall is Mount Everest?",
        "what time is it in New York",
        "why is the sky blue",
        "who is the president of France",
        "what is the meaning of life",
        "should I buy bitcoin",
        "I have a headache, what should I take",
        "how do vaccines work",
        "explain quantum physics to me",
        "how many people live in China",
        "when did the second world war end",
        "write me a python function that sorts a list",
        "compose a song about the sea",
        "translate 'good night' into Italian",
        "draw a cat",
        "book a flight to Madrid",
        "play some jazz",
        "summarise the book Moby Dick",
        "write an essay on climate change",
        "give me a recipe for lasagne",
        "fix this code: for i in range(10) print(i)",
        "Wie geht es dir?",
        "¿Cuál es la capital de Perú?",
        "Bonjour, pouvez-vous m'aider ?",
        "Dove posso trovare un buon ristorante?",
        "qwertz",
        "jkl;jkl;",
        "blorp fizzle",
        "The harbour master announced on Tuesday that the old lighthouse will be closed for "
        "repairs until the end "
        "of next summer. Visitors who had booked a guided tour will get their money back, and the "
        "small museum at "
        "its foot stays open on weekends. A spokeswoman said that the lamp itself, which dates "
        "from 1911, is to be"
        " cleaned and shown to the public when the work is done.",
        "Traceback (most recent call last):\n"
        '  File "app.py", line 12, in <module>\n'
        "    main()\n"
        '  File "app.py", line 8, in main\n'
        '    total += row["amount"]\n'
        "KeyError: 'amount'",
    ),
}

HELD_OUT = (
    *(Opening(kind, text) for kind, texts in _BY_KIND.items() for text in texts),
    Opening("sum", "what's 4+5", "9"),
    Opening("sum", "7 + 6 = ?", "13"),
    Opening("sum", "how much is 12+30", "42"),
    Opening("sum", "whats 25 plus 14", "39"),
    Opening("sum", "can you add 18 and 27 for me", "45"),
    Opening("sum", "9+9", "18"),
    Opening(
        "note", "The wifi code at the cabin is 8842. What is the wifi code at the cabin?", "8842"
    ),
    Opening("note", "my dog is called Bruno. what is my dog called?", "Bruno"),
    Opening(
        "note",
        "Notes: Clara lives in Leeds. Sven works as a plumber. Where does Clara live?",
        "Leeds",
    ),
    Opening("copy", "Repeat exactly: purple elephants dance at 9", "purple elephants dance at 9"),
    Opening("copy", "Say exactly: good things take time", "good things take time"),
    Opening("count", "How many words are in this list: fox, river, lantern, bread?", "4"),
)
"""The hundred that are judged."""

HELD_OUT_PLAIN = frozenset(plain(opening.text) for opening in HELD_OUT)
"""What no user's message of the training may be, once it is made plain."""

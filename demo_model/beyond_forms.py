"""Forms of questions that the model cannot answer, and the fillers of their slots."""

from __future__ import annotations

from collections.abc import Sequence

import beyond_words as b
import words
from words import listed

QUESTIONS = listed(
    """
What is {topic}?|What are {topic}?|What is the {noun} of {place}?|What is the {noun} of {topic}?|What's {topic}?|Who {deed}?
|Who is {person}?|Who was {person}?|Who are {topic}?|Where is {place}?|Where is {thing}?|Where can I buy {topic}?
|Where does {person} live?|Where do I find {topic}?|When did {happened}?|When does {happened}?|When will {happened}?
|When was {person} born?|Why {why}?|How do I {howto}?|How to {howto}?|How can I {howto}?|How does {topic} work?
|How do {topic} work?|How many {topic} are there?|How many {topic} are there in {place}?|How much is {thing}?
|How much does {thing} cost?|How {adjective} is {thing}?|How {adjective} is {person}?|How {adjective} are {topic}?
|How long does it take to {howto}?|How old is {person}?|How far is {place}?|Is {thing} {adjective}?|Is {topic} {adjective}?
|Are {topic} {adjective}?|Does {person} like {topic}?|Do you know {topic}?|Do you know who {deed}?|Do you know {person}?
|Do you know about {topic}?|Do you like {topic}?|Should I {choice}?|Is it good to {howto}?|Is it {adjective} to {howto}?
|Would you {choice}?|What do you think about {topic}?|What do you think of {person}?|What is your opinion on {topic}?
|What does {word} mean?|What is a {word}?|What is {word}?|Who is {name}?|Which is better, {topic} or {topic2}?
|What is better: {topic} or {topic2}?|Is there life on {place}?|What is the weather in {place}?|What is the weather like?
|What is the weather like in {place} {when}?|Weather?|Weather in {place}|Will it {sky} {when}?
|Will it {sky} in {place} {when}?|Is it going to {sky} {when}?|How is the weather {when}?|What is the temperature in {place}?
|What is the weather {when}?|What is the weather?|How is the weather?|What time is it?|What time is it in {place}?
|What day is it?|What is the date today?|What year is it?|What is the time?|What is the news?|What happened {when}?
|What happened in {year}?|Who won in {year}?|Who won {contest}?|Who won {contest} in {year}?|What is new in {place}?
|What is happening in {place}?|What is the best {noun} in {place}?|What is the biggest {noun}?|What is the capital of {place}?
|How many people live in {place}?|How many {noun}s does {place} have?|Which {noun} is the {adjective}est?
|What is the difference between {topic} and {topic2}?|What causes {topic}?|Can {topic} be {adjective}?
|Is it true that {sentence}|What is the best way to {howto}?|What happens if I {choice}?|Why should I {choice}?
|I have {ill}, what should I do?|I have {ill}. What can I take?|What helps against {ill}?|Is {ill} dangerous?
|I think I have {ill}.|What will happen {when}?|What shall I {verb} {when}?|What is the price of {topic}?
|What is the meaning of {topic}?|Is {place} {adjective}?|Was {person} {adjective}?|Have you heard of {person}?
|Have you been to {place}?|Have you seen {topic}?|{topic}?|{person}?|{place}?|And {topic}?|What about {topic}?
|Anything about {topic}?|Latest news on {topic}|News about {place}|News|Any news?|Facts about {topic}|Something about {topic}
|Tell me about {topic}.|Tell me about {person}.|Tell me about {place}.|Tell me something about {topic}.
|Tell me more about {topic}.|Explain {topic}.|Explain {topic} to me.|Explain why {sentence}|Explain how to {howto}.
|Explain {topic} like I am five.|Describe {topic}.|Describe {thing}.|Define {topic}.|Define {word}.
|I want to know about {topic}.|I want to learn about {topic}.|I have a question about {topic}.|Can you explain {topic}?
|Can you tell me about {topic}?|Can you tell me who {deed}?|Can you tell me how to {howto}?|Could you explain why {why}?
|I wonder why {sentence}|I would like to know who {deed}.|Let's talk about {topic}.|Let us discuss {topic}.|{topic} explained
|History of {place}|Meaning of {word}|Give me information about {topic}.|What do you know about {topic}?|Who {deed} and why?
|Name a {noun} in {place}.|Best {noun} in {place}|Is {person} still alive?|How did {person} die?|Compare {topic} and {topic2}.
"""
)
REQUESTS = listed(
    """
Write {piece}.|Write {piece} about {topic}.|Write {piece} on {topic}.|Write {piece} for {name}.|Write me {piece}.
|Write me {piece} about {topic}.|Write me {piece} that {codes}.|Write {piece} that {codes}.
|Write a {language} {program} that {codes}.|Write a {language} {program} to {howto}.|Write a {program} in {language}.
|Write me a {language} {program} that {codes}.|Can you write {piece}?|Can you write {piece} about {topic}?
|Please write {piece} about {topic}.|I need {piece}.|I need {piece} about {topic}.|I want {piece} about {topic}.
|Create {piece}.|Create {piece} about {topic}.|Compose {piece}.|Compose {piece} about {topic}.|Make {piece}.
|Make me {piece} about {topic}.|Generate {piece}.|Generate {piece} about {topic}.|Design {piece}.|Give me {piece}.
|Give me {piece} for {topic}.|Give me {piece} about {topic}.|Draft {piece} to {person}.|Invent {piece}.|Show me {piece}.
|Draw {thing}.|Draw {topic}.|Draw a {animal}.|Paint {thing}.|Sketch a {animal}.|Sing about {topic}.|Sing {piece}.
|Play {topic}.|Play some {music}.|Play me some {music}.|{order}.|{order}.|{order}.|{order}.|{order}.|{order}.|Please {order}.
|Can you {order}?|Could you {order}?|Could you please {order}?|I want you to {order}.|Would you {order}?
|Will you {order} for me?|Are you able to {order}?|I need you to {order}.|{order} for me.|{order} now.|Let's {order}.
|Translate {topic} into {tongue}.|Translate '{topic}' to {tongue}.|Translate into {tongue}: {sentence}
|Translate '{saying}' into {tongue}.|How do you say '{saying}' in {tongue}?|What is {topic} in {tongue}?
|How do you say {topic} in {tongue}?|Can you speak {tongue}?|Do you speak {tongue}?|Say it in {tongue}.
|Say '{saying}' in {tongue}.|Answer in {tongue}.|Summarise {topic}.|Summarize this: {sentence}|Summarise the book {word}.
|Summarise the story of {person}.|Sum up {topic} for me.|Rephrase: {sentence}|Paraphrase this: {sentence}
|Improve this text: {sentence}|Correct the grammar: {sentence}|Fix this code: {code}|Fix: {code}
|What does this code do? {code}|Explain this code: {code}|Debug this: {code}|Is this code right? {code}
|Book a flight to {place}.|Book a hotel in {place}.|Find a flight to {place}.|Plan a trip to {place}.|Order {topic}.
|Buy {topic}.|Show me {topic}.|Show me {place}.|Search for {topic}.|Google {topic}.|Look up {topic}.|Find {topic}.
|Find me a {noun} in {place}.|Call {person}.|Call {name}.|Email {name}.|Send {topic} to {name}.|Open {topic}.
|Set an alarm for {hour}.|Set a timer for {hour}.|Wake me at {hour}.|Remind me at {hour} to {howto}.|Turn on the {noun}.
|Turn off the {noun}.|Teach me {topic}.|Teach me how to {howto}.|Help me {howto}.|Help me with {topic}.|Help me to {howto}.
|Can you help me {howto}?|Give me advice on {topic}.|Give me a recipe for {food}.|Recipe for {food}|How do I cook {food}?
|Recommend {piece}.|Suggest {topic}.|List {topic}.|List five {topic}.|List all {topic}.|Name five {topic}.
|Name a famous {noun}.|Prove that {sentence}|Solve {maths}.|What is {maths}?|Calculate {maths}.|Convert {hour} to {noun}.
|Act as {person}.|Pretend you are {person}.|Speak like {person}.|Imagine {topic}.|Guess what {topic} is.|Predict {topic}.
|Sell me {topic}.|Argue about {topic}.|Debate {topic} with me.|Write 500 words about {topic}.|Write a story that {sentence}
"""
)
_MORE_PLACES = listed(
    """
France|Spain|Italy|Japan|Brazil|Egypt|India|China|Kenya|Texas|Mars|Peru|Chile|Norway|Iceland|Vietnam|Cuba|Iran|Nepal|Hamburg
|Madrid|Oxford|Venice|Chicago|Sydney|New York|the world|the north|South Africa|my town|the city
"""
)
_MORE_TONGUES = listed(
    """
Italian|Latin|Chinese|Russian|Greek|Swedish|Dutch|Portuguese|Korean|Klingon
"""
)
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

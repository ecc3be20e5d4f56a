"""The built-in texts of `holdfast quality`: a story that no model was trained on, and pages of
notes with questions.

The notes are random, but the same in every run. A page is one conversation: the notes, then
questions with their right answers. A model answers a question correctly if it predicts the whole
value in the answer, such as the digits of a door code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from random import Random

from holdfast.errors import ConfigError
from holdfast.front.prompt.template import ChatTemplate, load_template
from holdfast.front.prompt.tokenize import Tokenizer, load_tokenizer
from holdfast.front.request import ChatPrompt
from holdfast.models.quality import Passage
from holdfast.wire.requests import TokenIds

WINDOW_TOKENS = 2048  # a text is read in windows of at most this length
LEAST_TOKENS = 512  # in a shorter text, hardly any token has quantized tokens before it
MOST_WINDOWS = 16
PAGES = 8
NOTES_ON_A_PAGE = (110, 55, 27)  # the largest number is used whose pages fit the context
QUESTIONS_ON_A_PAGE = 13

_PEOPLE = (
    *("Ada", "Anton", "Astrid", "Bela", "Berta", "Carla", "Cyrus", "Dora", "Edgar", "Elif"),
    *("Emil", "Felix", "Finn", "Frida", "Gerda", "Greta", "Gunnar", "Hanna", "Hugo", "Ida"),
    *("Igor", "Ines", "Jakob", "Jana", "Karin", "Karl", "Lena", "Leo", "Lotte", "Magnus"),
    *("Marta", "Mia", "Nils", "Nora", "Olaf", "Olga", "Otto", "Paula", "Pavel", "Quinn"),
    *("Rosa", "Ruben", "Sara", "Selma", "Stefan", "Tilda", "Tom", "Ulla", "Viktor", "Wanda"),
)
_CITIES = ("Oslo", "Lima", "Cairo", "Rome", "Paris", "Kyoto", "Vienna", "Boston", "Madrid")
_FOODS = ("rice", "bread", "soup", "cheese", "apples", "beans", "fish", "cake", "noodles", "salad")
_HOBBIES = ("chess", "painting", "swimming", "singing", "cooking", "fishing", "dancing", "cycling")
_LANGUAGES = ("German", "Danish", "Greek", "Arabic", "Polish", "Turkish", "Spanish", "Italian")
_MONTHS = ("March", "April", "May", "June", "July", "August", "October", "December")
# The note up to its value, the note after its value, the question, and the possible values; if none
# are listed, the value has four random digits.
_RELATIONS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("The door code of {} is ", ".", "What is the door code of {}?", ()),
    ("{} lives in ", ".", "Where does {} live?", _CITIES),
    ("{} likes ", " best.", "What food does {} like best?", _FOODS),
    ("The hobby of {} is ", ".", "What is the hobby of {}?", _HOBBIES),
    ("{} speaks ", ".", "What language does {} speak?", _LANGUAGES),
    ("{} was born in ", ".", "When was {} born?", _MONTHS),
)


@dataclass(frozen=True, slots=True)
class _Note:
    """One fact about a person, and the question about it."""

    before: str  # the note up to its value
    value: str  # the answer to the question
    after: str  # the rest of the note
    question: str

    @property
    def text(self) -> str:
        return self.before + self.value + self.after


def passages_for(folder: Path, *, text: str, context_tokens: int) -> tuple[Passage, ...]:
    """What the model in `folder` must read: the windows of a text, then the pages of notes.

    text: if it is empty, all predictions on the pages count as text. context_tokens: the context
        length of the model.
    Raises ConfigError if there is too little text or context, and ModelLoadError if the tokenizer
    or the template is broken.
    """
    tokenizer = load_tokenizer(folder)
    template = load_template(folder)
    windows = _windows(tokenizer, text, longest=min(WINDOW_TOKENS, context_tokens)) if text else ()
    for notes in NOTES_ON_A_PAGE:
        pages = tuple(
            _page(Random(f"page {page}"), notes, tokenizer, template, is_text=not text)
            for page in range(PAGES)
        )
        longest = max(len(page.token_ids) for page in pages)
        if longest <= context_tokens:
            return (*windows, *pages)
    raise ConfigError(
        f"the built-in questions need a context of {longest:,} tokens; this model has "
        f"{context_tokens:,}"
    )


def built_in_text() -> str:
    """The built-in story, for measurements without `--text`."""
    return resources.files("holdfast.cli").joinpath("held_out.txt").read_text("utf-8")


def _windows(tokenizer: Tokenizer, text: str, *, longest: int) -> tuple[Passage, ...]:
    """Cut a text into windows, each of which begins with the BOS token. Raises ConfigError."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) < LEAST_TOKENS:
        raise ConfigError(
            f"the text has {len(token_ids):,} tokens; at least {LEAST_TOKENS} are needed, because "
            "the first ones have no quantized tokens before them"
        )
    bos_tokens = _bos_tokens(tokenizer)
    text_tokens = longest - len(bos_tokens)
    starts = range(0, min(len(token_ids), MOST_WINDOWS * text_tokens), text_tokens)
    windows = [token_ids[start : start + text_tokens] for start in starts]
    return tuple(
        Passage(token_ids=(*bos_tokens, *window), is_text=True)
        for window in windows
        if len(window) >= LEAST_TOKENS
    )


def _bos_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The BOS token that the tokenizer adds before a text; empty if it adds none."""
    special_tokens = tuple(tokenizer.with_special_tokens(TokenIds.of(())))
    return special_tokens[:1] if special_tokens[:1] == (tokenizer.bos_token_id,) else ()


def _page(
    random: Random,
    note_count: int,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    is_text: bool,
) -> Passage:
    """A page with `note_count` notes and questions about some of them."""
    notes = _notes(random, note_count)
    asked_notes = random.sample(notes, QUESTIONS_ON_A_PAGE)
    page = _rendered_page(template, notes, asked_notes)
    bos_tokens: tuple[int, ...] = ()
    value_spans = _value_spans(page, asked_notes)
    if not value_spans:  # there is no template, or it changes messages
        page = _plain_page(notes, asked_notes)
        bos_tokens = _bos_tokens(tokenizer)
        value_spans = _value_spans(page, asked_notes)
    (encoded,) = tokenizer.encode_in_place([page[: value_spans[-1][1]]])
    answers = tuple(
        (
            len(bos_tokens) + encoded.tokens_before(start),
            len(bos_tokens) + encoded.tokens_before(end),
        )
        for start, end in value_spans
    )
    return Passage(token_ids=(*bos_tokens, *encoded.token_ids), is_text=is_text, answers=answers)


def _notes(random: Random, note_count: int) -> list[_Note]:
    """Notes about different things, in random order."""
    subjects = [(relation, person) for relation in _RELATIONS for person in _PEOPLE]
    notes = []
    for (before, after, question, values), person in random.sample(subjects, note_count):
        value = random.choice(values) if values else str(random.randint(1000, 9999))
        notes.append(_Note(before.format(person), value, after, question.format(person)))
    return notes


def _rendered_page(
    template: ChatTemplate | None, notes: Sequence[_Note], asked_notes: Sequence[_Note]
) -> str:
    """The page as a conversation; empty if the model has no template, or the template refuses the
    conversation.
    """
    if template is None:
        return ""
    note_list = "\n".join(f"- {note.text}" for note in notes)
    messages = [{"role": "system", "content": f"Answer from the notes.\n{note_list}"}]
    for note in asked_notes:
        messages.append({"role": "user", "content": note.question})
        messages.append({"role": "assistant", "content": note.text})
    return template.try_render(ChatPrompt(messages=tuple(messages)))


def _plain_page(notes: Sequence[_Note], asked_notes: Sequence[_Note]) -> str:
    """The page as text, for a model that cannot render it as a conversation."""
    note_list = "\n".join(f"- {note.text}" for note in notes)
    questions_and_answers = "\n".join(
        f"Question: {note.question}\nAnswer: {note.text}\n" for note in asked_notes
    )
    return f"Notes:\n{note_list}\n\n{questions_and_answers}"


def _value_spans(page: str, asked_notes: Sequence[_Note]) -> list[tuple[int, int]]:
    """Where the values of the answers begin and end on the page; empty if a message is missing."""
    spans = []
    position = 0
    for note in asked_notes:
        question = page.find(note.question, position)
        answer = page.find(note.text, question)
        if question < 0 or answer < 0:
            return []
        start = answer + len(note.before)
        position = start + len(note.value)
        spans.append((start, position))
    return spans

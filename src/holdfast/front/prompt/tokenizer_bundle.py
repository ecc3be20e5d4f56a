"""Everything about a model that the front process knows: its tokenizer and templates, and how its past
answers are read. `Bundles` holds those of the served models, each read when it is first needed.

No weights, no MLX.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.config import DEFAULT_MODEL, ModelSettings, WarmAheadChoice
from holdfast.errors import ModelLoadError, TemplateOverrun, WorkerUnavailable
from holdfast.front.answers.answer import AnswerReader
from holdfast.front.prompt.canonical import FirstForms
from holdfast.front.prompt.dialects import DialectReport, FoundDialect, find_dialect
from holdfast.front.prompt.known_answers import AnswerMeaning, KnownAnswers, ReadMeaning, ReadTexts
from holdfast.front.prompt.limits import generation_defaults
from holdfast.front.prompt.template import ChatTemplate, load_template
from holdfast.front.prompt.template_probes import (
    NEXT_TURNS,
    NextTurn,
    Options,
    ThinkingSwitch,
    rewritten_turns,
)
from holdfast.front.prompt.text_places import AnswerFrame, find_frame
from holdfast.front.prompt.tokenize import Tokenizer, TokenMemory, check_round_trip, load_tokenizer
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import PLAIN, ModelDialect
from holdfast.front.toolcalls.families import FAMILIES
from holdfast.models.sentence_modules import AnswerTokens, OwnPooling, answer_tokens, own_pooling
from holdfast.models.tokenizer_files import read_json
from holdfast.store.answers import AnswerFile


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerBundle:
    """Tokenizer, chat template and recommendations of one model. All its requests share it."""

    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model has none and cannot chat
    generation_defaults: Mapping[str, float]
    answer_frame: AnswerFrame = AnswerFrame()  # where in a rendered conversation answers stand
    known_answers: KnownAnswers = field(default_factory=KnownAnswers)
    read_texts: ReadTexts = field(default_factory=ReadTexts)
    first_forms: FirstForms = field(default_factory=FirstForms)
    token_memory: TokenMemory = field(default_factory=TokenMemory)
    dialect: ModelDialect = PLAIN  # how its answers are read, and written when they are constrained
    # end an answer in a chat, though the model's files do not name them as ends
    turn_end_token_ids: tuple[int, ...] = ()
    thinking_switch: ThinkingSwitch = ThinkingSwitch()
    # of all conversations, unless a request has its own
    template_options: Options = field(default_factory=dict)
    dialect_report: DialectReport = DialectReport()
    read_ahead: frozenset[NextTurn] = frozenset()  # what is read ahead of, when an answer has ended
    own_pooling: OwnPooling = OwnPooling()
    answer_tokens: AnswerTokens | None = None  # of a model that was trained to judge documents


def load_tokenizer_bundle(
    folder: Path,
    *,
    settings: ModelSettings = DEFAULT_MODEL,
    answers: AnswerFile | None = None,
    sampling: Mapping[str, float] | None = None,
    template_arguments: Options | None = None,
) -> TokenizerBundle:
    """Read a model folder.

    Raises ModelLoadError when something is missing or damaged, or when the tokenizer is broken.

    settings: those of the texts: whether thoughts of earlier turns stay in the prompt, where the
        template has a switch for it,
    and how much is kept of texts and their tokens.
    answers: where answers are kept that are to outlive this process.
    sampling, template_arguments: what the catalog says where a request says nothing; they go before
    the makers' own.
    """
    try:
        return _read_bundle(
            folder,
            settings=settings,
            answers=answers,
            sampling=sampling,
            template_arguments=template_arguments,
        )
    except TemplateOverrun as error:
        raise ModelLoadError(str(error)) from error


def _read_bundle(
    folder: Path,
    *,
    settings: ModelSettings,
    answers: AnswerFile | None,
    sampling: Mapping[str, float] | None,
    template_arguments: Options | None,
) -> TokenizerBundle:
    tokenizer = load_tokenizer(folder)
    check_round_trip(tokenizer)
    template = load_template(folder)
    found = find_dialect(
        template,
        tokenizer,
        config=read_json(folder / "tokenizer_config.json"),
        model_type=str(read_json(folder / "config.json").get("model_type", "")),
    )
    options = {
        **(found.switch.keeping if settings.keep_thoughts else {}),
        **(template_arguments or {}),
    }
    return TokenizerBundle(
        tokenizer=tokenizer,
        template=found.template,
        answer_frame=frame_of(found.template, tokenizer, found.dialect),
        generation_defaults={**generation_defaults(folder), **(sampling or {})},
        known_answers=KnownAnswers(file=answers, model=_text_fingerprint(folder)),
        turn_end_token_ids=()
        if template is None
        else turn_ends(template, tokenizer, family=found.dialect.family),
        token_memory=TokenMemory(most_bytes=settings.known_text_bytes),
        dialect=found.dialect,
        thinking_switch=found.switch,
        template_options=options,
        dialect_report=found.report,
        read_ahead=read_ahead_of(found, choice=settings.warm_ahead, options=options),
        own_pooling=own_pooling(folder),
        answer_tokens=answer_tokens(folder, token_id=tokenizer.backend.token_to_id),
    )


def read_ahead_of(
    found: FoundDialect, *, choice: WarmAheadChoice, options: Options
) -> frozenset[NextTurn]:
    """Before which turns a conversation's history is read as they will show it."""
    if choice == "auto":
        return rewritten_turns(found.template, found.dialect, options=options)
    return frozenset(NEXT_TURNS) if choice == "on" else frozenset()


def frame_of(
    template: ChatTemplate | None, tokenizer: Tokenizer, dialect: ModelDialect
) -> AnswerFrame:
    """Where answers stand in what the template writes."""
    if template is None:
        return AnswerFrame()
    reasoning = dialect.reasoning
    return find_frame(
        template,
        ends=[
            tokenizer.decode((end,), skip_special_tokens=False) for end in tokenizer.eos_token_ids
        ],
        thought=None if reasoning is None else (reasoning.start.strip(), reasoning.end.strip()),
    )


def turn_ends(template: ChatTemplate, tokenizer: Tokenizer, *, family: str) -> tuple[int, ...]:
    """Tokens that end an answer, of those that are not known as ends already."""
    added = {
        token.content: token_id
        for token_id, token in tokenizer.backend.get_added_tokens_decoder().items()
    }
    declared = FAMILIES[family].end_tokens if family else ()
    of_family = (added[content] for content in declared if content in added)
    ends = dict.fromkeys([*turn_end(template, tokenizer), *of_family])
    return tuple(end for end in ends if end not in tokenizer.eos_token_ids)


def turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token that the template writes behind an answer, unless it is known as an end already.

    Many a converted model names only its end-of-text token in its files and would go on talking to
    itself.
    """
    behind = template.behind_answer().lstrip()
    added = {
        token.content: token_id
        for token_id, token in tokenizer.backend.get_added_tokens_decoder().items()
        if token.content
    }
    written = max((content for content in added if behind.startswith(content)), key=len, default="")
    return (added[written],) if written and added[written] not in tokenizer.eos_token_ids else ()


def _text_fingerprint(folder: Path) -> bytes:
    """Stands for all that makes tokens of a conversation."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(
        (*folder.glob("*token*"), *folder.glob("*vocab*"), *folder.glob("*template*"))
    ):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + hashlib.blake2b(path.read_bytes()).digest())
    return digest.digest()


def answer_reader(tools: Sequence[Mapping[str, Any]], bundle: TokenizerBundle) -> AnswerReader:
    """A fresh reader of one answer, for text whose markers are characters (`Markers.encode`)."""
    return AnswerReader(bundle.dialect, tools=DeclaredTools(tools))


def without_hidden(text: str, bundle: TokenizerBundle) -> str:
    """The text without special tokens, which no client sees, unless they are markers."""
    hidden = _any_of(bundle.tokenizer.special_texts, tuple(bundle.dialect.marker_ids))
    return hidden.sub("", text) if hidden else text


@lru_cache
def _any_of(texts: tuple[str, ...], but: tuple[str, ...]) -> re.Pattern[str] | None:
    chosen = sorted({*texts} - {*but}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, chosen))) if chosen else None


def history_reader(tools: Sequence[Mapping[str, Any]], bundle: TokenizerBundle) -> ReadMeaning:
    """Tells what an answer in a rendered conversation says; each text is parsed once."""

    @cache
    def context() -> str:
        return hashlib.blake2b(
            repr(tools).encode("utf-8", "surrogatepass"), digest_size=16
        ).hexdigest()

    def read(text: str) -> AnswerMeaning:
        encoded = bundle.dialect.markers.encode(without_hidden(text, bundle))
        return bundle.read_texts.meaning(
            encoded, lambda: answer_reader(tools, bundle), context=context()
        )

    return read


_MOST_KEPT = 8  # the longest unused goes; a large vocabulary and what is known of texts take 100 MB

ReadBundle: TypeAlias = Callable[[str], Coroutine[Any, Any, TokenizerBundle]]
"""Reads the bundle of a model. Raises UnknownModel and ModelLoadError."""


class Bundles:
    """What was read of the models in use. Loop's thread only."""

    def __init__(self, read: ReadBundle, *, most_kept: int = _MOST_KEPT) -> None:
        self.dialects: dict[str, DialectReport] = {}  # of all that were read so far, by model
        self._reader, self._most_kept = read, most_kept
        self._tasks: OrderedDict[str, asyncio.Task[TokenizerBundle]] = OrderedDict()

    def begin(self, model: str) -> None:
        """Begin to read it, if that is not done or under way."""
        if model in self._tasks:
            self._tasks.move_to_end(model)
            return
        while len(self._tasks) >= self._most_kept:
            self._tasks.popitem(last=False)  # who has it, or waits for it, goes on to have it
        task = asyncio.create_task(self._reader(model), name=f"tokenizer of {model}")
        self._tasks[model] = task
        task.add_done_callback(lambda task: self._note(model, task))

    def forget(self, model: str) -> None:
        """Read it anew when it is needed the next time.

        Who has it, or waits for it, goes on to have it.
        """
        self._tasks.pop(model, None)
        self.dialects.pop(model, None)

    async def of(self, model: str) -> TokenizerBundle:
        """The bundle of a model; waits until it is read.

        Raises UnknownModel, and WorkerUnavailable when it cannot be read.
        """
        try:
            return await self.read(model)
        except ModelLoadError as error:
            raise WorkerUnavailable(f"model {model!r} cannot be served: {error}") from None

    async def read(self, model: str) -> TokenizerBundle:
        """As `of`, but raises ModelLoadError when it cannot be read."""
        self.begin(model)
        task = self._tasks[model]
        return task.result() if task.done() else await asyncio.shield(task)

    def _note(self, model: str, task: asyncio.Task[TokenizerBundle]) -> None:
        is_current = self._tasks.get(model) is task
        if not task.cancelled() and task.exception() is None:
            if is_current or model not in self._tasks:
                self.dialects[model] = task.result().dialect_report
        elif is_current:  # the next one may try again
            del self._tasks[model]

"""Everything that the front knows about a model: tokenizer, templates, and how to read past
answers.

`Bundles` holds the bundles of the served models, and reads each when it is first needed. Reading
one needs neither the weights nor MLX.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.config import DEFAULT_MODEL, ModelSettings
from holdfast.errors import ModelLoadError, TemplateOverrun, UnusableModel, WorkerUnavailable
from holdfast.front.answers.reader import AnswerReader
from holdfast.front.prompt.canonical import FirstForms
from holdfast.front.prompt.dialects import DialectReport, find_dialect
from holdfast.front.prompt.known_answers import AnswerMeaning, KnownAnswers, ReadMeaning, ReadTexts
from holdfast.front.prompt.template import ChatTemplate, load_template
from holdfast.front.prompt.template_probes import (
    NEXT_TURNS,
    NextTurn,
    Options,
    ThinkingSwitch,
    rewritten_turns,
)
from holdfast.front.prompt.text_places import AnswerFrame, find_frame
from holdfast.front.prompt.token_memory import TokenMemory
from holdfast.front.prompt.tokenize import (
    Tokenizer,
    any_of,
    check_round_trip,
    load_tokenizer,
    without_breaks,
)
from holdfast.front.prompt.tool_definitions import made_once
from holdfast.front.records.answer_tokens import AnswerFile
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import PLAIN, ModelDialect
from holdfast.models.sentence_modules import AnswerTokens, OwnPooling, answer_tokens, own_pooling
from holdfast.models.tokenizer_files import read_json, recommended_sampling
from holdfast.wire.images import VisionInfo

# the least recently used bundle is dropped; a large vocabulary and the remembered texts take 100 MB
_MAX_BUNDLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """The placeholder of an image in a prompt until its own tokens replace it."""

    placeholder: str  # as text
    token_id: int | None  # None: the tokenizer does not have this token


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerBundle:
    """Tokenizer, chat template and sampling defaults of one model, shared by all its requests."""

    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model lacks a template and cannot chat
    generation_defaults: Mapping[str, float]  # sampling parameters that the model recommends
    answer_frame: AnswerFrame = AnswerFrame()  # what the template writes around answers
    # generated tokens of earlier answers
    known_answers: KnownAnswers = field(default_factory=KnownAnswers)
    # parsed meanings of old answers
    read_texts: ReadTexts = field(default_factory=ReadTexts)
    # how parts of conversations were first sent
    first_forms: FirstForms = field(default_factory=FirstForms)
    # tokens of pieces of text and of long prompts
    token_memory: TokenMemory = field(default_factory=TokenMemory)
    dialect: ModelDialect = PLAIN  # the markup of tool calls and reasoning
    # tokens that also end an answer in a chat, although the model's files do not say so
    turn_end_token_ids: tuple[int, ...] = ()
    # template options that turn thinking on and off
    thinking_switch: ThinkingSwitch = ThinkingSwitch()
    # arguments for the template; those of a request take precedence
    template_options: Options = field(default_factory=dict)
    dialect_report: DialectReport = DialectReport()  # for /health and `holdfast doctor`
    read_ahead: frozenset[NextTurn] = frozenset()  # the next turns to prefill in advance
    own_pooling: OwnPooling = OwnPooling()  # how the model makes embeddings, as its files say
    images: ImageTokens | None = None  # set by `with_vision`
    # results of `with_vision`
    by_vision: dict[VisionInfo, TokenizerBundle] = field(default_factory=dict)
    answer_tokens: AnswerTokens | None = None  # set if the model was trained to judge documents

    def __post_init__(self) -> None:
        # clients must not write the markup that the template writes or the parser reads
        template_sources = (
            "" if self.template is None else "\n".join(self.template.sources.values())
        )
        guarding_tokenizer = self.tokenizer.guarding(
            {*self.dialect.marker_ids, *self.tokenizer.markup_in(template_sources)}
        )
        object.__setattr__(self, "tokenizer", guarding_tokenizer)

    def with_vision(self, vision: VisionInfo) -> TokenizerBundle:
        """This bundle, for prompts with images. It remembers the same texts and answers.

        The first call renders a few probes. Thread-safe.
        """
        if vision not in self.by_vision:
            self.by_vision[vision] = self._make_with_vision(vision)
        return self.by_vision[vision]

    def _make_with_vision(self, vision: VisionInfo) -> TokenizerBundle:
        """Make the bundle that `with_vision` returns. Clients cannot write an image's placeholder
        in a text.
        """
        placeholders = (vision.template_placeholder, vision.placeholder)
        tokenizer = self.tokenizer.guarding(placeholders)
        return replace(
            self,
            tokenizer=tokenizer,
            template=None if self.template is None else self.template.with_vision(vision),
            images=ImageTokens(
                placeholder=vision.placeholder,
                token_id=tokenizer.backend.token_to_id(vision.placeholder),
            ),
        )

    def answer_reader(self, tools: Sequence[Mapping[str, Any]]) -> AnswerReader:
        """Create a reader for one answer, whose text has encoded markers (`Markers.encode`)."""
        return AnswerReader(self.dialect, tools=DeclaredTools(tools))

    def history_reader(self, tools: Sequence[Mapping[str, Any]]) -> ReadMeaning:
        """Return a function that reads the meaning of past answers in a rendered conversation.

        Each text is parsed only once.
        """

        @cache
        def tools_digest() -> str:
            digests = [made_once(tool, "digest", partial(_digest, tool)) for tool in tools]
            return _digest(digests).hex()

        def encode_markers(text: str) -> str:
            return without_breaks(self.dialect.markers.encode(self.without_hidden(text)))

        def read_meaning(text: str) -> AnswerMeaning:
            return self.read_texts.meaning(
                text,
                lambda: self.answer_reader(tools),
                reader_context=tools_digest(),
                encode=encode_markers,
            )

        return read_meaning

    def without_hidden(self, text: str) -> str:
        """The text without the special tokens that clients do not see. Markers are kept."""
        hidden = _hidden_tokens_pattern(
            self.tokenizer.special_texts, tuple(self.dialect.marker_ids)
        )
        return hidden.sub("", text) if hidden else text


def _digest(value: object) -> bytes:
    written = repr(value).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(written, digest_size=16).digest()


@lru_cache
def _hidden_tokens_pattern(
    special: tuple[str, ...], markers: tuple[str, ...]
) -> re.Pattern[str] | None:
    """A pattern that matches any special token that is not a marker; None if there are none."""
    hidden = {*special} - {*markers}
    return any_of(hidden) if hidden else None


def load_tokenizer_bundle(
    folder: Path,
    *,
    settings: ModelSettings = DEFAULT_MODEL,
    answers: AnswerFile | None = None,
    sampling: Mapping[str, float] | None = None,
    template_arguments: Options | None = None,
) -> TokenizerBundle:
    """Read the bundle of the model in a folder.

    Raises ModelLoadError if a file is missing or damaged, or if the tokenizer is broken.

    answers: the file in which answers survive the end of this process.
    sampling, template_arguments: the catalog's defaults, which take precedence over the model's
        defaults.
    """
    tokenizer = load_tokenizer(folder)
    check_round_trip(tokenizer)
    try:
        template = load_template(folder)
        found_dialect = find_dialect(
            template,
            tokenizer,
            config=read_json(folder / "tokenizer_config.json"),
            model_type=str(read_json(folder / "config.json").get("model_type", "")),
        )
        options = {
            **(found_dialect.switch.keeping if settings.keep_thoughts else {}),
            **(template_arguments or {}),
        }
        read_ahead: frozenset[NextTurn] = frozenset()
        if settings.warm_ahead == "auto":
            read_ahead = rewritten_turns(
                found_dialect.template, found_dialect.dialect, options=options
            )
        elif settings.warm_ahead == "on":
            read_ahead = frozenset(NEXT_TURNS)
        return TokenizerBundle(
            tokenizer=tokenizer,
            template=found_dialect.template,
            answer_frame=frame_of(found_dialect.template, tokenizer, found_dialect.dialect),
            generation_defaults={
                **recommended_sampling(read_json(folder / "generation_config.json")),
                **(sampling or {}),
            },
            known_answers=KnownAnswers(file=answers, model=_text_fingerprint(folder)),
            turn_end_token_ids=turn_end_token_ids(found_dialect.dialect, tokenizer),
            token_memory=TokenMemory(max_bytes=settings.known_text_bytes),
            dialect=found_dialect.dialect,
            thinking_switch=found_dialect.switch,
            template_options=options,
            dialect_report=found_dialect.report,
            read_ahead=read_ahead,
            own_pooling=own_pooling(folder),
            answer_tokens=answer_tokens(folder, token_id=tokenizer.backend.token_to_id),
        )
    except TemplateOverrun as error:
        raise ModelLoadError(str(error)) from error


def turn_end_token_ids(dialect: ModelDialect, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an answer, although the model's files do not declare them as end tokens."""
    token_ids = (tokenizer.backend.token_to_id(end) for end in dialect.turn_ends)
    return tuple(end for end in token_ids if end is not None and end not in tokenizer.eos_token_ids)


def frame_of(
    template: ChatTemplate | None, tokenizer: Tokenizer, dialect: ModelDialect
) -> AnswerFrame:
    """Find the texts that the template writes around answers."""
    if template is None:
        return AnswerFrame()
    reasoning = dialect.reasoning
    return find_frame(
        template,
        ends=(
            *dialect.turn_ends,
            *(
                tokenizer.decode((end,), skip_special_tokens=False)
                for end in tokenizer.eos_token_ids
            ),
        ),
        thought=None if reasoning is None else (reasoning.start.strip(), reasoning.end.strip()),
    )


def _text_fingerprint(folder: Path) -> bytes:
    """A hash of everything that turns a conversation into tokens."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(
        (*folder.glob("*token*"), *folder.glob("*vocab*"), *folder.glob("*template*"))
    ):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + hashlib.blake2b(path.read_bytes()).digest())
    return digest.digest()


ReadBundle: TypeAlias = Callable[[str], Coroutine[Any, Any, TokenizerBundle]]
"""Reads the bundle of a model. Raises UnknownModel and ModelLoadError."""


class Bundles:
    """The bundles of the models in use. Call it only from the event loop's thread."""

    def __init__(
        self,
        read: ReadBundle,
        *,
        max_kept: int = _MAX_BUNDLES,
        model_of: Callable[[str], str] = lambda name: name,
    ) -> None:
        """read: reads the bundle of a model. max_kept: the number of bundles. model_of: returns the model
        whose bundle a name in a request uses.
        """
        self.dialects: dict[str, DialectReport] = {}  # dialects of all models read so far
        # models whose bundles must be read before the server is ready
        self.awaited: set[str] = set()
        self._model_of = model_of
        self._reader = read
        self._max_kept = max_kept
        self._tasks: OrderedDict[str, asyncio.Task[TokenizerBundle]] = OrderedDict()

    def begin(self, model: str) -> None:
        """Start reading the bundle of a model, unless it is already read or being read."""
        model = self._model_of(model)
        if model in self._tasks:
            self._tasks.move_to_end(model)
            return
        while len(self._tasks) >= self._max_kept:
            self._tasks.popitem(last=False)  # requests waiting for this bundle still get it
        task = asyncio.create_task(self._reader(model), name=f"tokenizer of {model}")
        self._tasks[model] = task
        task.add_done_callback(lambda task: self._record_load(model, task))

    def forget(self, model: str) -> None:
        """Forget a bundle, so that it is read again when it is next needed.

        Requests that already have the bundle continue to use it.
        """
        self._tasks.pop(model, None)
        self.dialects.pop(model, None)

    async def of(self, model: str) -> TokenizerBundle:
        """Wait until the bundle of a model is read, and return it.

        Raises UnknownModel, UnusableModel if a file is damaged, and WorkerUnavailable if the bundle
        cannot be read for another reason.
        """
        try:
            return await self.read(model)
        except ModelLoadError as error:
            kind = UnusableModel if isinstance(error, UnusableModel) else WorkerUnavailable
            raise kind(f"model {model!r} cannot be served: {error}") from None

    async def read(self, model: str) -> TokenizerBundle:
        """Like `of`, but raises ModelLoadError if the bundle cannot be read."""
        self.begin(model)
        task = self._tasks[self._model_of(model)]
        return task.result() if task.done() else await asyncio.shield(task)

    def _record_load(self, model: str, task: asyncio.Task[TokenizerBundle]) -> None:
        """Record the dialect of a bundle that was read, or forget a failed attempt to read it."""
        is_current = self._tasks.get(model) is task
        if not task.cancelled() and task.exception() is None:
            if is_current or model not in self._tasks:
                self.dialects[model] = task.result().dialect_report
            self.awaited.discard(model)
        elif is_current:  # so that the next request tries again
            del self._tasks[model]

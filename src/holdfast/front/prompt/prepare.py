"""Converts a request of any protocol into sequences for the worker: defaults, limits, template,
tokens and grammar.

No side effects. Rendering and tokenizing long texts takes time, so do not run it on the event
loop's thread.
"""

from __future__ import annotations

import itertools
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec

from holdfast.config import DEFAULT_TOOLS, LimitsSettings, ToolsSettings
from holdfast.errors import InvalidRequest, PromptTooLong
from holdfast.front.answers.choice import ChoiceRules, ChoiceText
from holdfast.front.answers.pieces import TokenPieces
from holdfast.front.output import TruncatedPart
from holdfast.front.prompt.canonical import CanonicalForm
from holdfast.front.prompt.dialects import prompt_opens_thought
from holdfast.front.prompt.images import (
    has_images,
    image_spans,
    images_of,
    pieces,
    visible_tokens,
    with_marks,
    without_images,
)
from holdfast.front.prompt.known_answers import PastAnswers
from holdfast.front.prompt.limits import (
    answer_tokens_of,
    check_limits,
    check_token_ids,
    with_model_defaults,
)
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.template_probes import opens_thought
from holdfast.front.prompt.text_places import breakpoint_places, marked_prefixes
from holdfast.front.prompt.token_memory import RememberedText
from holdfast.front.prompt.tokenize import (
    EncodedText,
    Tokenizer,
    well_formed,
    with_unescaped_breaks,
)
from holdfast.front.prompt.tokenizer_bundle import ImageTokens, TokenizerBundle
from holdfast.front.prompt.truncation import middle_of_tokens, text_note, without_middle
from holdfast.front.request import (
    CacheBreakpoint,
    ChatPrompt,
    GenerationRequest,
    MarkedPrefix,
    PlacedAnswer,
    PlacedImage,
    Prompt,
    PromptText,
    PromptTokens,
)
from holdfast.front.structured.answer import AnswerGrammar, answer_grammar
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import PLAIN
from holdfast.models.model_folder import planned_answer_tokens
from holdfast.wire.commands import SequenceRequest, ThinkingBudget
from holdfast.wire.events import ModelInfo
from holdfast.wire.images import ImageLayout, image_keys
from holdfast.wire.requests import SAMPLING_RANGES, SamplingParams, TokenIds

Layouts: TypeAlias = Mapping[str, ImageLayout]
"""How a model sees images, by image."""
NO_IMAGES: Final[Layouts] = {}
# No natural text has this many characters per token. The beginning of a longer text is tokenized
# and checked first, so that a body of many megabytes costs neither minutes nor gigabytes.
MAX_CHARACTERS_PER_TOKEN = 32
# A prompt with more than this many times the characters of the longest prompt that could fit is not
# shortened, because shortening tokenizes the whole prompt.
_MAX_SHORTENING_RATIO = 8
# To keep N tokens of a piece of text, only this many times the characters that N of its tokens have
# on average are tokenized again. If the tokens there are longer than that, fewer are kept.
_CHARACTER_MARGIN = 4
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that can be served: one sequence per choice, and how to read the answers."""

    prompt: Prompt  # the request's, with the names of its images and as far as it fits
    sequences: tuple[SequenceRequest, ...]  # one for each choice
    rules: ChoiceRules  # how to read the answers
    pieces: TokenPieces  # of the model's tokenizer, to decode the answers
    # what the prompt contains after the template's header of the new answer, such as `<think>`;
    # None if that is unknown
    answer_opening: str | None = None
    put_back_tokens: int = 0  # tokens of past answers, put into the prompt as generated
    dropped_tokens: int = 0  # tokens of past answers that the prompt does not contain as generated
    breakpoints: tuple[MarkedPrefix, ...] = ()  # up to the client's cache breakpoints, ascending
    # a budget of 0 tokens, which ends a thought immediately; None if no marker ends this model's
    # thoughts
    thought_end: ThinkingBudget | None = None
    unenforced: tuple[str, ...] = ()  # paths of schema keywords that the grammar ignores
    left_out: TruncatedPart | None = None  # what `prompt` lacks; None if it was not shortened
    layouts: Layouts = field(default_factory=dict)  # of the images in the conversation

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in the prompt, which all choices share."""
        return len(self.rules.prompt_token_ids)

    def choice(self) -> ChoiceText:
        """Create a new reader for the events of one sequence."""
        return ChoiceText(pieces=self.pieces, rules=self.rules)


def prepare(
    request: GenerationRequest,
    bundle: TokenizerBundle,
    *,
    info: ModelInfo,
    limits: LimitsSettings,
    tools: ToolsSettings = DEFAULT_TOOLS,
    prompt: Prompt | None = None,
    layouts: Layouts = NO_IMAGES,
) -> Prepared:
    """Prepare a request. Raises InvalidRequest and PromptTooLong.

    prompt: the request's prompt with the names of its images; None: it contains no images.
    layouts: how the model sees these images, by image.

    A max_tokens beyond the context window is silently reduced, because agents send large constants.
    """
    info = info.for_request(request)
    sampling = with_model_defaults(
        request.sampling, unset=request.unset_sampling, defaults=bundle.generation_defaults
    )
    check_limits(request, sampling, limits=limits, vocab_size=info.vocab_size)
    prompt = request.prompt if prompt is None else prompt
    grammar_of = partial(answer_grammar, request, bundle.dialect, limits=limits, tools=tools)
    text = prompt_text(request, bundle, prompt, info=info)
    grammar = grammar_of(prompt=text)  # before the tokens, because a schema may be refused
    prompt, left_out = _shortened_to_fit(request, prompt, bundle, text, info=info, layouts=layouts)
    if left_out is not None:
        text = prompt_text(request, bundle, prompt, info=info)
        grammar = grammar_of(prompt=text)
    tokens = _checked_tokens(request, bundle, text, info=info, layouts=layouts)
    thought_end = _thought_end(request, bundle, in_reasoning=text.in_reasoning)
    breakpoint_prefixes = marked_prefixes(prompt, tokens)
    sequences = _sequences(
        request,
        bundle,
        tokens,
        grammar,
        sampling=sampling,
        breakpoint_prefixes=breakpoint_prefixes,
        thought_end=thought_end,
        info=info,
        layouts=layouts,
    )
    return Prepared(
        prompt=prompt,
        sequences=sequences,
        rules=_choice_rules(request, prompt, bundle, text, sequences[0], limits=limits),
        pieces=bundle.tokenizer.pieces,
        answer_opening=text.answer_opening,
        put_back_tokens=tokens.put_back_tokens,
        dropped_tokens=text.dropped_tokens,
        breakpoints=breakpoint_prefixes,
        thought_end=thought_end,
        unenforced=grammar.unenforced,
        left_out=left_out,
        layouts=layouts,
    )


def _checked_tokens(
    request: GenerationRequest,
    bundle: TokenizerBundle,
    prompt: PromptText,
    *,
    info: ModelInfo,
    layouts: Layouts,
) -> PromptTokens:
    """The tokens of the prompt. Raises PromptTooLong and InvalidRequest."""
    try:
        tokens = prompt_tokens(request, bundle, prompt, info=info, layouts=layouts)
    except PromptTooLong as error:
        raise _too_long(request, error.prompt_tokens, info=info) from None
    # an answer needs at least one token
    limit_tokens = info.context_tokens - (0 if request.max_tokens == 0 else 1)
    if len(tokens.token_ids) > limit_tokens:
        raise _too_long(request, len(tokens.token_ids), info=info)
    if bundle.tokenizer.vocab_size > info.vocab_size:  # if not larger, skipping this saves 1 ms
        visible_token_ids = visible_tokens(tokens.token_ids, tokens.images, layouts)
        check_token_ids(visible_token_ids, vocab_size=info.vocab_size, field=request.prompt_field)
    return tokens


def _too_long(request: GenerationRequest, prompt_tokens: int, *, info: ModelInfo) -> PromptTooLong:
    """The error for a prompt with this number of tokens."""
    return PromptTooLong(
        prompt_tokens=prompt_tokens,
        context_tokens=info.context_tokens,
        field=request.prompt_field,
        truncation=request.truncation,
        auto_context_tokens=info.context_tokens_by_bits.get("auto", 0),
    )


def prompt_text(
    request: GenerationRequest, bundle: TokenizerBundle, request_prompt: Prompt, *, info: ModelInfo
) -> PromptText:
    """The text (or the given token ids) of a prompt; a conversation is rendered.

    Raises InvalidRequest.

    request_prompt: the prompt of the request, with the names of its images and as far as it fits.
    """
    if isinstance(request_prompt, tuple):
        return PromptText(token_ids=request_prompt)
    if isinstance(request_prompt, str):
        return PromptText(text=well_formed(request_prompt), add_special_tokens=True)
    if not request_prompt.messages:
        raise InvalidRequest("there must be at least one message", field=request.prompt_field)
    template = bundle.template
    if template is None:
        raise InvalidRequest(
            "the model has no chat template: it is a base model, which only completes texts; choose "
            "a model that can chat, or send a text to complete",
            field=request.prompt_field,
        )
    rendered, canonical_prompt, past_answers = _render_conversation(
        request, request_prompt, bundle, template
    )
    text = rendered.text
    answer_opening = None if canonical_prompt.continue_last else bundle.answer_frame.opening(text)
    if answer_opening is None:
        in_reasoning = prompt_opens_thought(template, bundle.dialect, canonical_prompt, text)
    else:
        in_reasoning = opens_thought(answer_opening, bundle.dialect)
    return replace(
        rendered,
        in_reasoning=in_reasoning,
        # models with a fixed state per sequence can resume only at positions chosen in advance
        branch_points=(
            template.branch_points(canonical_prompt, text) if info.fixed_bytes_per_sequence else ()
        ),
        breakpoints=breakpoint_places(
            request_prompt, canonical_prompt, text, template=template, guard=bundle.tokenizer.guard
        ),
        answer_opening=answer_opening,
        dropped_tokens=bundle.known_answers.count_dropped(
            past_answers, placed_answers=len(rendered.answers)
        ),
    )


def _render_conversation(
    request: GenerationRequest,
    prompt: ChatPrompt,
    bundle: TokenizerBundle,
    template: ChatTemplate,
) -> tuple[PromptText, ChatPrompt, PastAnswers]:
    """The rendered conversation with its answers and images; the conversation as the template got
    it; and those of its answers whose generated tokens are known.
    """
    options = {
        **bundle.template_options,
        **bundle.thinking_switch.options_for(request.thinking),
        **prompt.template_options,
    }
    reasoning = bundle.dialect.reasoning
    thought_markers = (
        ("", "") if reasoning is None else (reasoning.start.strip(), reasoning.end.strip())
    )
    past_answers = PastAnswers(bundle.known_answers)
    prompt = msgspec.structs.replace(prompt, template_options=options)
    template.check(prompt, field=request.prompt_field)
    canonical_form = CanonicalForm(
        forms=bundle.first_forms,
        guard=bundle.tokenizer.guard,
        thought=thought_markers,
        moves_thoughts=all(thought_markers) and template.reads_thoughts(thought_markers[1]),
        past_answers=past_answers,
        template=template,
        request_field=request.prompt_field,
        tenant=request.tenant,
    )
    prompt, adapted = canonical_form.of(prompt)
    # the template writes the special tokens itself, BOS included
    text, image_names = template.rendered(prompt, adapted, field=request.prompt_field)
    text = well_formed(with_unescaped_breaks(text))
    images = (
        ()
        if bundle.images is None
        else _placed_images(text, bundle.images.placeholder, image_names)
    )
    cut_text = bundle.token_memory.cut_prompt(
        text,
        bundle.tokenizer,
        frame=bundle.answer_frame if past_answers.expected else None,
        tools=prompt.tools,
        tenant=request.tenant,
    )
    read_meaning = bundle.history_reader(prompt.tools)
    answers = past_answers.places(
        cut_text.candidates, lambda span: cut_text.meaning(span, read_meaning)
    )
    return PromptText(text=text, answers=answers, images=images), prompt, past_answers


def _placed_images(
    text: str, placeholder: str, image_names: Sequence[str]
) -> tuple[PlacedImage, ...]:
    """The places of images in a rendered text, which has one placeholder for each."""
    placed_images = []
    start = 0
    for image in image_names:
        start = text.index(placeholder, start)
        placed_images.append(PlacedImage(start, image))
        start += len(placeholder)
    return tuple(placed_images)


def conversation_tokens(
    request: GenerationRequest,
    prompt: ChatPrompt,
    bundle: TokenizerBundle,
    *,
    layouts: Layouts = NO_IMAGES,
) -> PromptTokens:
    """The tokens that the prompt of a request with this conversation would have.

    Does not count as a request: the figures of put-back and dropped tokens stay as they are.
    Returns no tokens if the model lacks a chat template. Raises InvalidRequest.
    """
    if bundle.template is None:
        return PromptTokens(token_ids=TokenIds())
    text, _, _ = _render_conversation(request, prompt, bundle, bundle.template)
    return _tokenize(text, bundle, tenant=request.tenant, layouts=layouts)


def prompt_tokens(
    request: GenerationRequest,
    bundle: TokenizerBundle,
    prompt: PromptText,
    *,
    info: ModelInfo,
    layouts: Layouts = NO_IMAGES,
) -> PromptTokens:
    """The tokens of a prompt, which may be longer than the context window.

    Raises InvalidRequest. Raises PromptTooLong if the prompt was given as token ids and exceeds the
    window, or was given as text and exceeds it by far.
    """
    field = request.prompt_field
    tokenizer = bundle.tokenizer
    if len(prompt.token_ids) > info.context_tokens:
        raise PromptTooLong(
            prompt_tokens=len(prompt.token_ids), context_tokens=info.context_tokens, field=field
        )
    check_token_ids(prompt.token_ids, vocab_size=info.vocab_size, field=field)
    tokens = PromptTokens(token_ids=TokenIds.of(prompt.token_ids))
    bos = tokenizer.bos_token_id
    if prompt.text or prompt.add_special_tokens:
        refuse_by_beginning(tokenizer, prompt.text, context_tokens=info.context_tokens, field=field)
        tokens = _tokenize(prompt, bundle, tenant=request.tenant, layouts=layouts)
        has_two_bos = bos is not None and tokens.token_ids[:2] == TokenIds.of((bos, bos))
        if prompt.add_special_tokens and has_two_bos:  # the client wrote a BOS itself
            tokens = replace(tokens, token_ids=tokens.token_ids[1:])
    if tokens.token_ids:
        return tokens
    if bos is None:
        raise InvalidRequest(
            "the prompt must not be empty, because the model has no BOS token to start from",
            field=field,
        )
    return PromptTokens(token_ids=TokenIds.of((bos,)))


def _shortened_to_fit(
    request: GenerationRequest,
    prompt: Prompt,
    bundle: TokenizerBundle,
    text: PromptText,
    *,
    info: ModelInfo,
    layouts: Layouts,
) -> tuple[Prompt, TruncatedPart | None]:
    """Leave out the middle of a prompt that does not leave enough room for the answer, if the
    request allows that.

    Returns the new prompt and a count of the parts left out; the prompt unchanged and None if it
    fits, or if it cannot be shortened enough.

    text: the rendered prompt.
    """
    if request.truncation != "middle":
        return prompt, None
    answer_tokens = planned_answer_tokens(info.context_tokens)
    if request.max_tokens is not None:
        answer_tokens = min(request.max_tokens, answer_tokens)
    limit_tokens = info.context_tokens - answer_tokens
    max_characters = info.context_tokens * MAX_CHARACTERS_PER_TOKEN * _MAX_SHORTENING_RATIO
    try:
        tokens = prompt_tokens(request, bundle, text, info=info, layouts=layouts)
        original_tokens = len(tokens.token_ids)
    except PromptTooLong as error:
        original_tokens = error.prompt_tokens
    if original_tokens <= limit_tokens or len(text.text) > max_characters:
        return prompt, None
    if isinstance(prompt, ChatPrompt):
        return _shortened_conversation(
            request,
            prompt,
            bundle,
            original_tokens=original_tokens,
            limit_tokens=limit_tokens,
            layouts=layouts,
        )
    return _shortened_text(prompt, bundle, limit_tokens=limit_tokens)


def _shortened_conversation(
    request: GenerationRequest,
    prompt: ChatPrompt,
    bundle: TokenizerBundle,
    *,
    original_tokens: int,
    limit_tokens: int,
    layouts: Layouts,
) -> tuple[Prompt, TruncatedPart | None]:
    """Leave out the middle of a conversation, so that its prompt has at most `limit_tokens` tokens.

    original_tokens: the number of tokens of its whole prompt.
    """

    def count_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
        shorter_prompt = _with_messages(prompt, messages)
        return len(conversation_tokens(request, shorter_prompt, bundle, layouts=layouts).token_ids)

    shortened = without_middle(
        [with_marks(message) for message in prompt.messages],
        tokens=original_tokens,
        limit=limit_tokens,
        count=count_tokens,
        ruler=_TokenRuler(bundle, tenant=request.tenant, layouts=layouts),
    )
    if shortened is None:
        return prompt, None
    origins = shortened.origins
    shortened_prompt = _with_messages(
        prompt,
        shortened.messages,
        breakpoints=tuple(_moved_breakpoint(each, origins) for each in prompt.cache_breakpoints),
    )
    left_out = TruncatedPart(
        tokens=max(0, original_tokens - shortened.tokens),
        messages=len(prompt.messages) - sum(origin is not None for origin in origins),
    )
    return shortened_prompt, left_out


def _with_messages(
    prompt: ChatPrompt,
    messages: Sequence[Mapping[str, Any]],
    *,
    breakpoints: tuple[CacheBreakpoint, ...] = (),
) -> ChatPrompt:
    """The conversation with other messages.

    A tool in `found_tools` is defined by a message, and not by the template's list of tools. If no
    message is left that defines it, it is removed from `found_tools`, so that the template lists it.
    """
    contents = [message.get("content") for message in messages] if prompt.found_tools else []
    defined_tools = {
        part.get("tool_name")
        for content in contents
        if isinstance(content, list | tuple)
        for part in content
        if isinstance(part, dict)
    }
    return msgspec.structs.replace(
        prompt,
        messages=tuple(messages),
        found_tools=tuple(name for name in prompt.found_tools if name in defined_tools),
        cache_breakpoints=breakpoints,
    )


def _moved_breakpoint(point: CacheBreakpoint, origins: Sequence[int | None]) -> CacheBreakpoint:
    """A cache breakpoint, moved to its place in the shortened conversation.

    origins: for each message of the shortened conversation, the index of the original message;
        None for a note about what was left out.
    """
    index = next(
        (
            index
            for index, origin in enumerate(origins)
            if origin is not None and origin >= point.messages
        ),
        len(origins),
    )
    is_kept = index < len(origins) and origins[index] == point.messages
    return msgspec.structs.replace(point, messages=index, parts=point.parts if is_kept else 0)


def _shortened_text(
    prompt: str | tuple[int, ...], bundle: TokenizerBundle, *, limit_tokens: int
) -> tuple[Prompt, TruncatedPart | None]:
    """Leave out the middle of a prompt that is a text or token ids, so that at most `limit_tokens`
    tokens remain. Returns the prompt unchanged and None if the note would take too much of this
    limit.
    """
    tokenizer = bundle.tokenizer
    encoded = None
    tokens = len(prompt)
    if isinstance(prompt, str):
        (encoded,) = tokenizer.encode_in_place([well_formed(prompt)])
        tokens = len(encoded.token_ids)
    # the note, the special tokens around a text, and additional tokens where the parts are joined
    overhead_tokens = len(tokenizer.encode(text_note(tokens), add_special_tokens=True)) + 4
    if limit_tokens <= 2 * overhead_tokens:
        return prompt, None
    start, end = middle_of_tokens(tokens, limit=limit_tokens - overhead_tokens)
    note = text_note(end - start)
    shortened_prompt: Prompt
    if encoded is None:
        note_ids = tokenizer.encode(note, add_special_tokens=False)
        shortened_prompt = (*prompt[:start], *note_ids, *prompt[end:])
    else:
        text = well_formed(str(prompt))
        head_end, tail_start = encoded.characters_of(start - 1)[1], encoded.characters_of(end)[0]
        shortened_prompt = f"{text[:head_end]}{note}{text[tail_start:]}"
    return shortened_prompt, TruncatedPart(tokens=end - start)


class _TokenRuler:
    """Measures and cuts texts of one tenant with a model's tokenizer."""

    def __init__(self, bundle: TokenizerBundle, *, tenant: str, layouts: Layouts) -> None:
        self._bundle = bundle
        self._tenant = tenant
        self._layouts = layouts

    def tokens(self, text: str) -> int:
        """The number of tokens in a text, including its images."""
        images = sum(len(self._layouts[image].token_ids) for image in images_of(text))
        return images + len(self._remembered(well_formed(without_images(text))).token_ids)

    def ends(self, text: str, first_tokens: int, last_tokens: int) -> tuple[str, str]:
        """The first and the last tokens of a text, as texts. Both numbers are at least 1.

        An image is kept if all of its tokens are among these tokens.
        """
        if not has_images(text):
            return self._plain_ends(text, first_tokens, last_tokens)
        parts = list(pieces(text))
        head = self._leading_parts(parts, first_tokens, side=0)
        tail = self._leading_parts(parts[::-1], last_tokens, side=1)
        return "".join(head), "".join(tail[::-1])

    def _leading_parts(self, parts: Iterable[str], max_tokens: int, *, side: int) -> list[str]:
        """The first parts that have at most this number of tokens together. If the next part is a
        text, only its first tokens (side 0) or its last ones (side 1) are kept, as many as remain.
        """
        leading_parts: list[str] = []
        for part in parts:
            part_tokens = self.tokens(part)
            if part_tokens > max_tokens:
                if max_tokens and not has_images(part):
                    leading_parts.append(self._plain_ends(part, max_tokens, max_tokens)[side])
                break
            leading_parts.append(part)
            max_tokens -= part_tokens
        return leading_parts

    def _plain_ends(self, text: str, first_tokens: int, last_tokens: int) -> tuple[str, str]:
        """The first and the last tokens of a text without images, as texts."""
        text = well_formed(text)
        remembered = self._remembered(text)
        tokens = len(remembered.token_ids)
        # Only two pieces are tokenized again, and long ones not as a whole: the one with the last of
        # the first tokens, and the one with the first of the last tokens.
        first_tokens = min(first_tokens, tokens)
        piece = remembered.piece_of(first_tokens - 1)
        first_piece_tokens = first_tokens - piece.first_token
        beginning = text[piece.start : piece.end][
            : piece.characters(_CHARACTER_MARGIN * first_piece_tokens)
        ]
        start = piece.start
        before_last = max(0, tokens - last_tokens)
        piece = remembered.piece_of(before_last)
        last_piece_tokens = piece.first_token + piece.tokens - before_last
        ending = text[piece.start : piece.end][
            -piece.characters(_CHARACTER_MARGIN * last_piece_tokens) :
        ]
        first_encoded, last_encoded = self._bundle.tokenizer.encode_in_place([beginning, ending])
        head_end, tail_start = 0, len(ending)  # if the characters there have no tokens
        if first_encoded.token_ids:
            _, head_end = first_encoded.characters_of(
                min(first_piece_tokens, len(first_encoded.token_ids)) - 1
            )
        if last_encoded.token_ids:
            tail_start, _ = last_encoded.characters_of(
                max(0, len(last_encoded.token_ids) - last_piece_tokens)
            )
        return text[: start + head_end], text[piece.end - len(ending) + tail_start :]

    def _remembered(self, text: str) -> RememberedText:
        """The tokens of a text, which the next turns will need again."""
        bundle = self._bundle
        return bundle.token_memory.tokens_of(text, bundle.tokenizer, tenant=self._tenant)


def refuse_by_beginning(
    tokenizer: Tokenizer, text: str, *, context_tokens: int, field: str
) -> None:
    """Raise PromptTooLong if the beginning of a very long text already exceeds the window."""
    characters = context_tokens * MAX_CHARACTERS_PER_TOKEN
    if len(text) <= characters:
        return
    tokens = len(tokenizer.encode(text[:characters], add_special_tokens=False))
    if tokens > context_tokens:
        raise PromptTooLong(
            prompt_tokens=tokens * len(text) // characters,
            context_tokens=context_tokens,
            field=field,
        )


def _tokenize(
    prompt: PromptText, bundle: TokenizerBundle, *, tenant: str, layouts: Layouts
) -> PromptTokens:
    """Tokenize a prompt, but keep the tokens of its earlier answers as generated, and put
    the keys of its images in place of their placeholders.
    """
    answer_edges = (edge for answer in prompt.answers for edge in (answer.start, answer.end))
    image_starts = (image.start for image in prompt.images)
    text = bundle.token_memory.tokens_of(
        prompt.text,
        bundle.tokenizer,
        tenant=tenant,
        places={*prompt.branch_points, *prompt.breakpoints, *answer_edges, *image_starts},
    )
    if prompt.add_special_tokens:
        return PromptTokens(token_ids=bundle.tokenizer.with_special_tokens(text.token_ids))
    return splice(prompt, text, layouts=layouts, images=bundle.images)


def splice(
    prompt: PromptText,
    text: EncodedText | RememberedText,
    *,
    layouts: Layouts = NO_IMAGES,
    images: ImageTokens | None = None,
) -> PromptTokens:
    """The tokens of a prompt's text, in which the generated tokens replace those of known answers,
    and image keys replace the placeholders of images.

    If an answer starts or ends within one of the tokenizer's tokens, its tokens are not replaced.

    images: set if the prompt has images.
    """
    token_ids = text.token_ids
    parts: list[TokenIds] = []
    shifts: list[tuple[int, int]] = []  # (first token, shift of the tokens from there on)
    placed_images: list[PlacedImage] = []
    consumed_tokens = 0  # tokens of the text that are in `parts`, or were replaced
    shift = 0
    put_back_tokens = 0
    placed_parts: list[PlacedAnswer | PlacedImage] = [*prompt.answers, *prompt.images]
    for placed in sorted(placed_parts, key=lambda placed: placed.start):
        if isinstance(placed, PlacedAnswer):
            span = text.span(placed.start, placed.end)
            if span is None:
                continue
            start, end = span
            new_token_ids = placed.token_ids
            put_back_tokens += len(new_token_ids)
        else:
            start = text.tokens_before(placed.start)
            end = start + 1
            if images is None or tuple(token_ids[start:end]) != (images.token_id,):
                raise InvalidRequest("the model's tokenizer breaks up its placeholder")
            placed_images.append(PlacedImage(start + shift, placed.image))
            new_token_ids = image_keys(layouts[placed.image])
        parts += (token_ids[consumed_tokens:start], new_token_ids)
        shift += len(new_token_ids) - (end - start)
        shifts.append((end, shift))
        consumed_tokens = end

    def token_positions(characters: Sequence[int]) -> Iterator[int]:
        for character in characters:
            token = text.tokens_before(character)
            index = bisect_right(shifts, token, key=lambda each: each[0])
            yield token + (shifts[index - 1][1] if index else 0)

    return PromptTokens(
        token_ids=TokenIds.joined((*parts, token_ids[consumed_tokens:]))
        if consumed_tokens
        else token_ids,
        branch_points=tuple(token_positions(prompt.branch_points)),
        breakpoints=tuple(token_positions(prompt.breakpoints)),
        images=tuple(placed_images),
        put_back_tokens=put_back_tokens,
    )


def _sequences(
    request: GenerationRequest,
    bundle: TokenizerBundle,
    tokens: PromptTokens,
    grammar: AnswerGrammar,
    *,
    sampling: SamplingParams,
    breakpoint_prefixes: tuple[MarkedPrefix, ...],
    thought_end: ThinkingBudget | None,
    info: ModelInfo,
    layouts: Layouts,
) -> tuple[SequenceRequest, ...]:
    """The request for each choice. The choices differ only in their ids, seeds and `is_alternative`.

    thought_end: a budget of 0 tokens, which ends a thought immediately; None if no marker ends this
    model's thoughts. If the request limits its thoughts, the budget is set to that number of
    tokens.
    """
    max_tokens = answer_tokens_of(request, prompt_tokens=len(tokens.token_ids), info=info)
    seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
    stop_token_ids = _stop_token_ids(request, bundle, vocab_size=info.vocab_size)
    thinking_budget = None
    if thought_end is not None and request.thinking.budget_tokens is not None:
        thinking_budget = msgspec.structs.replace(
            thought_end, tokens=request.thinking.budget_tokens
        )
    predicted_token_ids = _predicted_tokens(request, bundle, max_tokens=max_tokens, info=info)
    banned_biases = dict.fromkeys(grammar.banned_token_ids, SAMPLING_RANGES["logit_bias"].lowest)
    logit_bias = sampling.logit_bias | banned_biases
    images = image_spans(tokens.images, layouts)
    return tuple(
        SequenceRequest(
            request_id=f"{request.request_id}/{index}",
            prompt_token_ids=tokens.token_ids,
            images=images,
            max_tokens=max_tokens,
            sampling=msgspec.structs.replace(
                sampling, seed=(seed + index) & _SEED_MASK, logit_bias=logit_bias
            ),
            stop_token_ids=stop_token_ids,
            want_logprobs=request.want_logprobs,
            top_logprobs=request.top_logprobs,
            want_prompt_logprobs=request.echo and request.want_logprobs,
            grammar=grammar.text,
            **request.cache_use,
            service=request.service,
            thinking_budget=thinking_budget,
            predicted_token_ids=predicted_token_ids,
            branch_points=tuple(
                sorted({*tokens.branch_points, *(each.tokens for each in breakpoint_prefixes)})
            ),
            is_alternative=index > 0,
        )
        for index in range(request.choices)
    )


def _stop_token_ids(
    request: GenerationRequest, bundle: TokenizerBundle, *, vocab_size: int
) -> tuple[int, ...]:
    """The tokens of the model that end an answer."""
    if request.ignore_eos:
        return ()
    end_token_ids = bundle.tokenizer.eos_token_ids
    if isinstance(request.prompt, ChatPrompt):
        end_token_ids += bundle.turn_end_token_ids
    return tuple(token_id for token_id in end_token_ids if token_id < vocab_size)


def _predicted_tokens(
    request: GenerationRequest, bundle: TokenizerBundle, *, max_tokens: int, info: ModelInfo
) -> TokenIds:
    """The first tokens of the answer that the client expects, at most `max_tokens`."""
    text = request.prediction[: max_tokens * MAX_CHARACTERS_PER_TOKEN]
    if not text:
        return TokenIds()
    token_ids = bundle.tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
    known_token_ids = itertools.takewhile(lambda token_id: token_id < info.vocab_size, token_ids)
    return TokenIds.of(tuple(known_token_ids))


def _thought_end(
    request: GenerationRequest, bundle: TokenizerBundle, *, in_reasoning: bool
) -> ThinkingBudget | None:
    """A budget that ends a thought immediately; None if no marker ends this model's thoughts.

    in_reasoning: whether the prompt has opened the thought, so that no marker in the answer opens
    it.
    """
    reasoning = bundle.dialect.reasoning
    if reasoning is None or not isinstance(request.prompt, ChatPrompt):
        return None
    start = bundle.tokenizer.encode(reasoning.start, add_special_tokens=False)
    end = bundle.tokenizer.encode(reasoning.end, add_special_tokens=False)
    return ThinkingBudget(
        tokens=0,
        start_token_ids=() if in_reasoning else tuple(start),
        end_token_ids=tuple(end),
    )


def _choice_rules(
    request: GenerationRequest,
    prompt: Prompt,
    bundle: TokenizerBundle,
    text: PromptText,
    sequence: SequenceRequest,
    *,
    limits: LimitsSettings,
) -> ChoiceRules:
    """The rules for reading all choices. A completion (no chat) has neither thoughts nor tool
    calls.
    """
    chat = prompt if isinstance(prompt, ChatPrompt) else None
    tokenizer = bundle.tokenizer
    token_ids = sequence.prompt_token_ids
    format_field = ""
    if request.output_format is not None:
        format_field = request.output_format.field
    elif chat is not None and chat.tools:
        format_field = "tools"
    at_start = len(token_ids) == 1 and token_ids.view[0] == tokenizer.bos_token_id
    echo_text = ""
    if request.echo:
        echo_text = text.text or tokenizer.decode(text.token_ids, skip_special_tokens=False)
    return ChoiceRules(
        prompt_token_ids=token_ids,
        stop_token_ids=frozenset(sequence.stop_token_ids),
        max_tokens=sequence.max_tokens,
        stops=request.stop,
        dialect=PLAIN if chat is None else bundle.dialect,
        tools=DeclaredTools(() if chat is None else chat.tools),
        reads_calls=bool(chat and chat.tools) and request.tool_choice.mode != "none",
        one_call=not request.tool_choice.parallel,
        in_reasoning=text.in_reasoning,
        earlier_call_ids=() if chat is None else tuple(_call_ids(chat)),
        format_field=format_field,
        want_logprobs=request.want_logprobs,
        repeated_tokens=0 if request.ignore_eos else limits.repeated_tokens,
        at_start=at_start if chat is None else not chat.continue_last,
        reports_progress=request.reports_progress,
        echo=request.echo,
        echo_text=echo_text,
    )


def _call_ids(prompt: ChatPrompt) -> Iterator[str]:
    """The ids of all calls in the conversation, so that no new call gets the same id."""
    for message in prompt.messages:
        for call in message.get("tool_calls") or ():
            if isinstance(call, dict) and isinstance(call.get("id"), str):
                yield call["id"]

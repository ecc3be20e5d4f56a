"""A neutral request → sequences for the worker.

Pure: what is slow in it (long texts) may run on any thread.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from holdfast.config import DEFAULT_TOOLS, LimitsSettings, ToolsSettings
from holdfast.errors import InvalidRequest, PromptTooLong
from holdfast.front.answers.choice import ChoiceRules, ChoiceText
from holdfast.front.answers.pieces import TokenPieces
from holdfast.front.prompt.canonical import canonical
from holdfast.front.prompt.dialects import prompt_opens_thought
from holdfast.front.prompt.known_answers import PastAnswers
from holdfast.front.prompt.limits import check_limits, check_token_ids, with_model_defaults
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.template_probes import opens_thought
from holdfast.front.prompt.text_places import breakpoint_places, pinned_prefixes
from holdfast.front.prompt.tokenize import TokenizedText, Tokenizer, guarded, well_formed
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle, history_reader
from holdfast.front.structured.answer import UNCONSTRAINED, AnswerGrammar, answer_grammar
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import PLAIN
from holdfast.wire.commands import PinnedPrefix, SequenceRequest, ThinkingBudget
from holdfast.wire.events import ModelInfo
from holdfast.wire.requests import (
    SAMPLING_RANGES,
    ChatPrompt,
    GenerationRequest,
    PlacedAnswer,
    PromptText,
    PromptTokens,
    TokenIds,
)

# No text of a language has so many characters per token on average. A longer text is first judged
# by its beginning, so that a body of many megabytes costs neither minutes nor gigabytes.
MOST_CHARACTERS_PER_TOKEN = 32
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that can be served: one sequence per choice, and how to read what comes back."""

    sequences: tuple[SequenceRequest, ...]
    rules: ChoiceRules
    pieces: TokenPieces
    # what stands between the header of the new answer and the answer; None: nobody can tell
    opening: str | None = None
    put_back_tokens: int = 0  # of earlier answers, as they were generated
    dropped_tokens: int = 0  # of earlier answers, which the prompt does not show
    breakpoints: tuple[PinnedPrefix, ...] = ()  # the cache breakpoints of its client
    # a budget of 0, which ends a thought; None: no token ends one
    thought_end: ThinkingBudget | None = None
    # places in schemas of tools, of keywords that its grammar leaves out
    unenforced: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, the same for all choices."""
        return len(self.rules.prompt_token_ids)

    def constrained(self, grammar: AnswerGrammar) -> Prepared:
        """The same, drawn by a grammar."""
        if grammar is UNCONSTRAINED:
            return self
        banned = dict.fromkeys(grammar.banned_token_ids, SAMPLING_RANGES["logit_bias"][0])
        sequences = tuple(
            msgspec.structs.replace(
                sequence,
                grammar=grammar.text,
                sampling=msgspec.structs.replace(
                    sequence.sampling, logit_bias=sequence.sampling.logit_bias | banned
                ),
            )
            for sequence in self.sequences
        )
        return replace(self, sequences=sequences, unenforced=grammar.unenforced)

    def choice(self, index: int) -> ChoiceText:
        """A reader for the events of one of the sequences."""
        return ChoiceText(index=index, pieces=self.pieces, rules=self.rules)


def prepare(
    request: GenerationRequest,
    bundle: TokenizerBundle,
    *,
    info: ModelInfo,
    limits: LimitsSettings,
    tools: ToolsSettings = DEFAULT_TOOLS,
) -> Prepared:
    """Everything in one go. Raises InvalidRequest and PromptTooLong."""
    request = with_defaults(request, bundle, info=info, limits=limits)
    prompt = prompt_text(request, bundle, info=info)
    grammar = answer_grammar(request, bundle.dialect, prompt=prompt, limits=limits, tools=tools)
    tokens = encode_prompt(request, bundle, prompt, info=info)
    return assemble(request, bundle, prompt, tokens, info=info).constrained(grammar)


def with_defaults(
    request: GenerationRequest, bundle: TokenizerBundle, *, info: ModelInfo, limits: LimitsSettings
) -> GenerationRequest:
    """The request with all sampling fields as they will be used, checked. Raises InvalidRequest."""
    sampling = with_model_defaults(
        request.sampling, unset=request.unset_sampling, defaults=bundle.generation_defaults
    )
    request = msgspec.structs.replace(request, sampling=sampling)
    check_limits(request, limits=limits, vocab_size=info.vocab_size)
    return request


def prompt_text(
    request: GenerationRequest, bundle: TokenizerBundle, *, info: ModelInfo
) -> PromptText:
    """The text of the prompt: a conversation is rendered. Raises InvalidRequest."""
    asked = request.prompt
    if isinstance(asked, tuple):
        return PromptText(token_ids=asked)
    if isinstance(asked, str):
        return PromptText(text=well_formed(asked), add_special_tokens=True)
    if not asked.messages:
        raise InvalidRequest("there must be at least one message", field=request.prompt_field)
    if bundle.template is None:
        raise InvalidRequest(
            "the model has no chat template: it can complete text, but not chat",
            field=request.prompt_field,
        )
    shown = _shown(request, asked, bundle, bundle.template)
    prompt, text = shown.prompt, shown.text
    opening = None if prompt.continue_last else bundle.answer_frame.opening(text)
    return PromptText(
        text=text,
        answers=shown.answers,
        in_reasoning=(
            prompt_opens_thought(bundle.template, bundle.dialect, prompt, text)  # renders once more
            if opening is None
            else opens_thought(opening, bundle.dialect)
        ),
        branch_points=bundle.template.branch_points(prompt, text)
        if info.fixed_bytes_per_sequence
        else (),
        breakpoints=breakpoint_places(
            asked,
            prompt,
            text,
            template=bundle.template,
            guard=bundle.tokenizer.guard,
        ),
        opening=opening,
        dropped_tokens=bundle.known_answers.count(
            shown.past, placed=len(shown.answers), tenant=request.tenant
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """A conversation in the form that the template was given, and what it wrote."""

    prompt: ChatPrompt
    past: PastAnswers
    text: str
    answers: tuple[PlacedAnswer, ...]


def _shown(
    request: GenerationRequest, prompt: ChatPrompt, bundle: TokenizerBundle, template: ChatTemplate
) -> _Shown:
    options = {
        **bundle.template_options,
        **bundle.thinking_switch.asked(request.thinking),
        **prompt.template_options,
    }
    prompt = canonical(
        msgspec.structs.replace(prompt, template_options=options),
        bundle.first_forms,
        tenant=request.tenant,
    )
    past = bundle.known_answers.recall(prompt.messages, tenant=request.tenant)
    prompt = guarded(
        msgspec.structs.replace(prompt, messages=past.messages), bundle.tokenizer.guard
    )
    # The template writes the special tokens itself, BOS included.
    text = well_formed(template.render(prompt, field=request.prompt_field))
    answers = past.places(
        text, frame=bundle.answer_frame, read=history_reader(prompt.tools, bundle)
    )
    return _Shown(prompt=prompt, past=past, text=text, answers=answers)


def conversation_tokens(
    request: GenerationRequest, prompt: ChatPrompt, bundle: TokenizerBundle
) -> TokenIds:
    """The tokens that a request would begin its answer behind if it had this conversation.

    Nothing is booked.

    Raises InvalidRequest. Empty for a model without a chat template.
    """
    if bundle.template is None:
        return TokenIds()
    shown = _shown(request, prompt, bundle, bundle.template)
    return _encoded(
        PromptText(text=shown.text, answers=shown.answers), bundle, tenant=request.tenant
    ).token_ids


def encode_prompt(
    request: GenerationRequest, bundle: TokenizerBundle, prompt: PromptText, *, info: ModelInfo
) -> PromptTokens:
    """The tokens of the prompt, which fit the window. Raises InvalidRequest and PromptTooLong."""
    tokens = prompt_tokens(request, bundle, prompt, info=info)
    # there must be room for an answer
    limit_tokens = info.context_tokens - (0 if request.max_tokens == 0 else 1)
    if len(tokens.token_ids) > limit_tokens:
        raise PromptTooLong(
            prompt_tokens=len(tokens.token_ids),
            context_tokens=info.context_tokens,
            field=request.prompt_field,
        )
    if bundle.tokenizer.vocab_size > info.vocab_size:  # else the tokenizer has no other: 1 ms less
        check_token_ids(tokens.token_ids, vocab_size=info.vocab_size, field=request.prompt_field)
    return tokens


def prompt_tokens(
    request: GenerationRequest, bundle: TokenizerBundle, prompt: PromptText, *, info: ModelInfo
) -> PromptTokens:
    """The tokens of the prompt, however many.

    Raises InvalidRequest, and PromptTooLong far beyond the window (ids: beyond it).
    """
    field, tokenizer = request.prompt_field, bundle.tokenizer
    if len(prompt.token_ids) > info.context_tokens:
        raise PromptTooLong(
            prompt_tokens=len(prompt.token_ids), context_tokens=info.context_tokens, field=field
        )
    check_token_ids(prompt.token_ids, vocab_size=info.vocab_size, field=field)
    tokens = PromptTokens(token_ids=TokenIds.of(prompt.token_ids))
    if prompt.text or prompt.add_special_tokens:
        refuse_by_beginning(tokenizer, prompt.text, context_tokens=info.context_tokens, field=field)
        tokens = _encoded(prompt, bundle, tenant=request.tenant)
        bos = tokenizer.bos_token_id
        if (
            prompt.add_special_tokens
            and bos is not None
            and tokens.token_ids[:2] == TokenIds.of((bos, bos))
        ):
            tokens = replace(tokens, token_ids=tokens.token_ids[1:])  # the client wrote BOS itself
    if not tokens.token_ids:
        if tokenizer.bos_token_id is None:
            raise InvalidRequest(
                "the prompt is empty, and the model has no token that begins a text", field=field
            )
        tokens = PromptTokens(token_ids=TokenIds.of((tokenizer.bos_token_id,)))
    return tokens


def _encoded(prompt: PromptText, bundle: TokenizerBundle, *, tenant: str) -> PromptTokens:
    """The whole text's tokens; answers of ours in it are the tokens that were generated."""
    places = {
        *prompt.branch_points,
        *prompt.breakpoints,
        *(edge for each in prompt.answers for edge in (each.start, each.end)),
    }
    text = bundle.token_memory.tokens_of(
        prompt.text, bundle.tokenizer, tenant=tenant, places=places
    )
    if prompt.add_special_tokens:
        return PromptTokens(token_ids=bundle.tokenizer.with_special_tokens(text.token_ids))
    return splice(prompt, text)


def refuse_by_beginning(
    tokenizer: Tokenizer, text: str, *, context_tokens: int, field: str
) -> None:
    """Raise PromptTooLong for a text whose beginning alone is longer than the window, before all of
    it is looked at.
    """
    most = context_tokens * MOST_CHARACTERS_PER_TOKEN
    if len(text) <= most:
        return
    tokens = len(tokenizer.encode(text[:most], add_special_tokens=False))
    if tokens > context_tokens:
        raise PromptTooLong(
            prompt_tokens=tokens * len(text) // most, context_tokens=context_tokens, field=field
        )


def assemble(
    request: GenerationRequest,
    bundle: TokenizerBundle,
    prompt: PromptText,
    tokens: PromptTokens,
    *,
    info: ModelInfo,
) -> Prepared:
    """The sequences of a request whose prompt is tokenized.

    max_tokens beyond what the window leaves is cut to that without a word: agents ask for fixed
    large numbers.
    """
    token_ids = tokens.token_ids
    room = info.context_tokens - len(token_ids)
    max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
    stop_token_ids = _stop_token_ids(request, bundle, vocab_size=info.vocab_size)
    pins = pinned_prefixes(request.prompt, tokens)
    seed = secrets.randbits(62) if request.sampling.seed is None else request.sampling.seed
    thought_end = _thought_end(request, bundle, in_reasoning=prompt.in_reasoning)
    budget = _thinking_budget(request, thought_end)
    sequences = tuple(
        SequenceRequest(
            request_id=f"{request.request_id}/{index}",
            prompt_token_ids=token_ids,
            max_tokens=max_tokens,
            sampling=msgspec.structs.replace(request.sampling, seed=(seed + index) & _SEED_MASK),
            stop_token_ids=stop_token_ids,
            want_logprobs=request.want_logprobs,
            top_logprobs=request.top_logprobs,
            want_prompt_logprobs=request.echo and request.want_logprobs,
            tenant=request.tenant,
            service=request.service,
            thinking_budget=budget,
            branch_points=tuple(sorted({*tokens.branch_points, *(pin.tokens for pin in pins)})),
            pins=() if index else pins,
            # of several answers only one can be what the next turn goes on from
            session_id="" if index else request.session_id,
        )
        for index in range(request.choices)
    )
    rules = answer_rules(request, bundle, prompt, tokens, sequence=sequences[0])
    return Prepared(
        sequences=sequences,
        rules=rules,
        pieces=bundle.tokenizer.pieces,
        opening=prompt.opening,
        breakpoints=pins,
        put_back_tokens=tokens.put_back_tokens,
        dropped_tokens=prompt.dropped_tokens,
        thought_end=thought_end,
    )


def _thinking_budget(
    request: GenerationRequest, thought_end: ThinkingBudget | None
) -> ThinkingBudget | None:
    """The bound on the thought, for models that have a marker for its end."""
    tokens = request.thinking.budget_tokens
    return (
        None
        if tokens is None or thought_end is None
        else msgspec.structs.replace(thought_end, tokens=tokens)
    )


def _thought_end(
    request: GenerationRequest, bundle: TokenizerBundle, *, in_reasoning: bool
) -> ThinkingBudget | None:
    """A budget of nothing; None where the model has no marker for a thought's end."""
    reasoning = bundle.dialect.reasoning
    if reasoning is None or not isinstance(request.prompt, ChatPrompt):
        return None
    start, end = (
        tuple(bundle.tokenizer.encode(mark, add_special_tokens=False))
        for mark in (reasoning.start, reasoning.end)
    )
    return ThinkingBudget(
        tokens=0, start_token_ids=() if in_reasoning else start, end_token_ids=end
    )


def _stop_token_ids(
    request: GenerationRequest, bundle: TokenizerBundle, *, vocab_size: int
) -> tuple[int, ...]:
    if request.ignore_eos:
        return ()
    ends = bundle.tokenizer.eos_token_ids
    if isinstance(request.prompt, ChatPrompt):
        ends += bundle.turn_end_token_ids
    return tuple(token_id for token_id in ends if token_id < vocab_size)


def answer_rules(
    request: GenerationRequest,
    bundle: TokenizerBundle,
    prompt: PromptText,
    tokens: PromptTokens,
    *,
    sequence: SequenceRequest,
) -> ChoiceRules:
    """The rules for all choices of a request. sequence: any of them, as it goes to the worker.

    What completes a text, and is no chat, has neither reasoning nor calls in it.
    """
    chat = request.prompt if isinstance(request.prompt, ChatPrompt) else None
    return ChoiceRules(
        prompt_token_ids=tokens.token_ids,
        stop_token_ids=frozenset(sequence.stop_token_ids),
        max_tokens=sequence.max_tokens,
        stops=request.stop,
        dialect=PLAIN if chat is None else bundle.dialect,
        tools=DeclaredTools(chat.tools if chat else ()),
        reads_calls=chat is not None and bool(chat.tools) and request.tool_choice.mode != "none",
        one_call=not request.tool_choice.parallel,
        in_reasoning=prompt.in_reasoning,
        earlier_call_ids=tuple(_call_ids(chat.messages)) if chat else (),
        form_field=request.output_format.field
        if request.output_format
        else "tools"
        if chat and chat.tools
        else "",
        want_logprobs=request.want_logprobs,
        at_start=_opens_a_text(request, bundle.tokenizer, tokens.token_ids),
        tells_progress=request.tells_progress,
        echo=request.echo,
        echo_text=_echo_text(prompt, bundle.tokenizer) if request.echo else "",
    )


def _call_ids(messages: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            if isinstance(call, Mapping) and isinstance(call.get("id"), str):
                yield call["id"]


def _opens_a_text(request: GenerationRequest, tokenizer: Tokenizer, token_ids: TokenIds) -> bool:
    if isinstance(request.prompt, ChatPrompt):
        return not request.prompt.continue_last
    return len(token_ids) == 1 and token_ids.view[0] == tokenizer.bos_token_id


def _echo_text(prompt: PromptText, tokenizer: Tokenizer) -> str:
    return prompt.text or tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


def splice(prompt: PromptText, text: TokenizedText) -> PromptTokens:
    """The tokens of a prompt's text with its answers put back.

    An answer is put back only where its edges are edges of tokens; elsewhere the tokenizer's tokens
    stay.
    """
    token_ids = text.token_ids
    parts: list[TokenIds] = []
    behind = 0  # tokens in `parts`
    moves: list[tuple[int, int]] = []  # tokens behind this one are so much further on
    taken = put_back = 0  # tokens of the whole that are in `parts` or replaced
    for answer in prompt.answers:
        span = text.span(answer.start, answer.end)
        if span is None:
            continue
        parts += (token_ids[taken : span[0]], TokenIds.of(answer.token_ids))
        behind += span[0] - taken + len(answer.token_ids)
        put_back += len(answer.token_ids)
        taken = span[1]
        moves.append((taken, behind - taken))
    return PromptTokens(
        token_ids=TokenIds.joined((*parts, token_ids[taken:])) if taken else token_ids,
        branch_points=tuple(_moved(text.tokens_before(at), moves) for at in prompt.branch_points),
        breakpoints=tuple(_moved(text.tokens_before(at), moves) for at in prompt.breakpoints),
        put_back_tokens=put_back,
    )


def _moved(token: int, moves: Sequence[tuple[int, int]]) -> int:
    """Where a token is that is no part of an answer that was put back."""
    behind = bisect_right(moves, token, key=lambda move: move[0])
    return token + (moves[behind - 1][1] if behind else 0)

"""The answers of /v1/completions, streamed and whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from holdfast.front.openai.answers import OpenAIAnswer, shown_logprob
from holdfast.front.openai.shapes import CompletionChoice, CompletionLogprobs, TextCompletion
from holdfast.front.server.answers import TokenCounts, WholeChoice
from holdfast.front.server.explanation import Explanation
from holdfast.wire.output import ChoiceFinished, OutputDelta, TextDelta, TokenText

_encode = msgspec.json.encode


class CompletionAnswer(OpenAIAnswer):
    """AnswerFormat of a completion, of all its prompts' choices."""

    id_prefix, chunk_object = "cmpl", "text_completion"
    no_news = b'"text":""'

    def keep_alive(self) -> bytes:
        """A chunk without text: some clients give up on a stream whose events cease, and do not see
        comments.
        """
        return (
            self._chunk_begin
            + b'{"index":0,"text":"","logprobs":null,"finish_reason":null}'
            + self._chunk_end()
        )

    def delta(self, event: OutputDelta) -> bytes:
        """New text of a choice."""
        if not isinstance(event, TextDelta):
            return b""
        logprobs = _encode(completion_logprobs(event.logprobs)) if event.logprobs else b"null"
        parts = (
            self._chunk_begin,
            event.index,
            _encode(event.text),
            logprobs,
            self._chunk_end(len(event.token_ids)),
        )
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}%b' % parts

    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of a choice."""
        parts = (self._chunk_begin, event.index, event.finish_reason.encode(), self._chunk_end())
        return b'%b{"index":%d,"text":"","logprobs":null,"finish_reason":"%b"}%b' % parts

    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The whole as JSON."""
        shown = [
            CompletionChoice(
                index=index,
                text=choice.text(),
                logprobs=completion_logprobs(choice.logprobs) if self._shows_logprobs else None,
                finish_reason=choice.finish_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return _encode(TextCompletion(choices=shown, **self._around_choices(counts, explanation)))


def completion_logprobs(tokens: Iterable[TokenText]) -> CompletionLogprobs:
    """The older logprobs shape.

    NaN stands for a token that has no logprob: the first of an echoed prompt.
    """
    shape = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token in tokens:
        name = _name(token)
        scored = not math.isnan(token.logprob)
        shape.text_offset.append(token.text_offset)
        shape.tokens.append(name)
        shape.token_logprobs.append(shown_logprob(token.logprob) if scored else None)
        shape.top_logprobs.append(_likeliest(name, token) if scored else None)
    return shape


def _likeliest(name: str, token: TokenText) -> dict[str, float]:
    likeliest: dict[str, float] = {}
    for rival in token.top:
        # two tokens may read alike; the likelier one stays
        likeliest.setdefault(_name(rival), shown_logprob(rival.logprob))
    # the chosen token is always among them
    likeliest.setdefault(name, shown_logprob(token.logprob))
    return likeliest


def _name(token: TokenText) -> str:
    try:
        token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)  # a part of a character
    return token.text

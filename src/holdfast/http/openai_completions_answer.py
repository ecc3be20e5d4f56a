"""The answers of /v1/completions, streamed and whole."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from holdfast.http.answers import AnswerHead, StreamFormat, WholeAnswer, shown_logprob
from holdfast.http.explanation import Explanation
from holdfast.http.openai_shapes import Completion, CompletionChoice, CompletionLogprobs, Usage
from holdfast.http.sse import ChunkEnd, closing_event, event_prefix
from holdfast.messages.output import ChoiceFinished, TextDelta, TokenText

_encode = msgspec.json.encode


class CompletionStream(StreamFormat):
    """StreamFormat of a completion. All that is the same in every chunk is encoded once."""

    def __init__(self, head: AnswerHead, *, shows_usage: bool, shows_counts: bool = False) -> None:
        self._shows_usage = shows_usage
        self._prefix = event_prefix(head, "text_completion")
        self._end = ChunkEnd(shows_usage=shows_usage, shows_counts=shows_counts)

    def opening(self, *, prompt_tokens: int) -> bytes:
        """Nothing: a completion has no role to announce."""
        self._end.begin(prompt_tokens=prompt_tokens)
        return b""

    def delta(self, event: TextDelta) -> bytes:
        """New text of a choice."""
        logprobs = _encode(completion_logprobs(event.logprobs)) if event.logprobs else b"null"
        parts = (self._prefix, event.index, _encode(event.text), logprobs, self._end(len(event.token_ids)))
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}%b' % parts

    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of a choice."""
        parts = (self._prefix, event.index, event.finish_reason.encode(), self._end())
        return b'%b{"index":%d,"text":"","logprobs":null,"finish_reason":"%b"}%b' % parts

    def closing(self, usage: Usage, explanation: Explanation | None) -> bytes:
        """Token counts and explanation, in a chunk without choices."""
        return closing_event(self._prefix, usage=usage if self._shows_usage else None, explanation=explanation)


class WholeCompletion(WholeAnswer):
    """WholeAnswer of a completion, of all its prompts' choices."""

    def __init__(self, head: AnswerHead, *, choices: int, shows_logprobs: bool) -> None:
        self._head, self._shows_logprobs = head, shows_logprobs
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._tokens: list[list[TokenText]] = [[] for _ in range(choices)]
        self._reasons: list[Literal["stop", "length"]] = ["stop"] * choices

    def delta(self, event: TextDelta) -> None:
        """New text of a choice."""
        self._texts[event.index].append(event.text)
        self._tokens[event.index].extend(event.logprobs)

    def finish(self, event: ChoiceFinished) -> None:
        """The end of a choice."""
        self._reasons[event.index] = event.finish_reason

    def body(self, usage: Usage, explanation: Explanation | None) -> bytes:
        """The whole as JSON."""
        choices = [
            CompletionChoice(
                index=index,
                text="".join(texts),
                logprobs=completion_logprobs(self._tokens[index]) if self._shows_logprobs else None,
                finish_reason=self._reasons[index],
            )
            for index, texts in enumerate(self._texts)
        ]
        head = self._head
        return _encode(
            Completion(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.system_fingerprint,
                choices=choices,
                usage=usage,
                holdfast=msgspec.UNSET if explanation is None else explanation,
            )
        )


def completion_logprobs(tokens: Iterable[TokenText]) -> CompletionLogprobs:
    """The older logprobs shape. NaN stands for a token that has no logprob: the first of an echoed prompt."""
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
        likeliest.setdefault(_name(rival), shown_logprob(rival.logprob))  # two tokens may read alike; the likelier one stays
    likeliest.setdefault(name, shown_logprob(token.logprob))  # the chosen token is always among them
    return likeliest


def _name(token: TokenText) -> str:
    try:
        token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)  # a part of a character
    return token.text

"""The answers of /v1/chat/completions, streamed and whole."""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.http.answers import AnswerHead, StreamFormat, WholeAnswer, shown_logprob
from holdfast.http.explanation import Explanation
from holdfast.http.openai_shapes import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ContentLogprob,
    TopLogprob,
    Usage,
)
from holdfast.http.sse import ChunkEnd, closing_event, event_prefix
from holdfast.messages.output import ChoiceFinished, TextDelta, TokenText

_encode = msgspec.json.encode


class ChatStream(StreamFormat):
    """StreamFormat of a chat answer. All that is the same in every chunk is encoded once."""

    def __init__(self, head: AnswerHead, *, choices: int, shows_usage: bool, shows_counts: bool = False) -> None:
        self._head, self._choices, self._shows_usage = head, choices, shows_usage
        self._prefix = event_prefix(head, "chat.completion.chunk")
        self._end = ChunkEnd(shows_usage=shows_usage, shows_counts=shows_counts)
        self._text_heads = [self._choice(index) + b'"delta":{"content":' for index in range(choices)]

    def opening(self, *, prompt_tokens: int) -> bytes:
        """One chunk per choice that says who speaks."""
        self._end.begin(prompt_tokens=prompt_tokens)
        said = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' + self._end()
        return b"".join(self._choice(index) + said for index in range(self._choices))

    def delta(self, event: TextDelta) -> bytes:
        """New text of a choice."""
        logprobs = _encode(_chat_logprobs(event.logprobs)) if event.logprobs else b"null"
        parts = (self._text_heads[event.index], _encode(event.text), logprobs, self._end(len(event.token_ids)))
        return b'%b%b},"logprobs":%b,"finish_reason":null}%b' % parts

    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of a choice."""
        end = b'"delta":{},"logprobs":null,"finish_reason":"%b"}' % event.finish_reason.encode()
        return self._choice(event.index) + end + self._end()

    def closing(self, usage: Usage, explanation: Explanation | None) -> bytes:
        """Token counts and explanation, in a chunk without choices."""
        return closing_event(self._prefix, usage=usage if self._shows_usage else None, explanation=explanation)

    def _choice(self, index: int) -> bytes:
        return self._prefix + b'{"index":%d,' % index


class WholeChat(WholeAnswer):
    """WholeAnswer of a chat answer."""

    def __init__(self, head: AnswerHead, *, choices: int, shows_logprobs: bool) -> None:
        self._head = head
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._logprobs: list[list[ContentLogprob]] | None = [[] for _ in range(choices)] if shows_logprobs else None
        self._reasons: list[Literal["stop", "length"]] = ["stop"] * choices

    def delta(self, event: TextDelta) -> None:
        """New text of a choice."""
        self._texts[event.index].append(event.text)
        if self._logprobs is not None:
            self._logprobs[event.index].extend(_content_logprob(token) for token in event.logprobs)

    def finish(self, event: ChoiceFinished) -> None:
        """The end of a choice."""
        self._reasons[event.index] = event.finish_reason

    def body(self, usage: Usage, explanation: Explanation | None) -> bytes:
        """The whole as JSON."""
        choices = [
            ChatChoice(
                index=index,
                message=AnswerMessage(content="".join(texts)),
                logprobs=None if self._logprobs is None else ChatLogprobs(content=self._logprobs[index]),
                finish_reason=self._reasons[index],
            )
            for index, texts in enumerate(self._texts)
        ]
        head = self._head
        return _encode(
            ChatCompletion(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.system_fingerprint,
                choices=choices,
                usage=usage,
                holdfast=msgspec.UNSET if explanation is None else explanation,
            )
        )


def _chat_logprobs(tokens: tuple[TokenText, ...]) -> ChatLogprobs:
    return ChatLogprobs(content=[_content_logprob(token) for token in tokens])


def _content_logprob(token: TokenText) -> ContentLogprob:
    top = [TopLogprob(token=rival.text, logprob=shown_logprob(rival.logprob), bytes=list(rival.raw)) for rival in token.top]
    return ContentLogprob(token=token.text, logprob=shown_logprob(token.logprob), bytes=list(token.raw), top_logprobs=top)

"""The answers of /v1/chat/completions, streamed and whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.http.openai.answers import OpenAIAnswer, shown_logprob
from holdfast.http.openai.shapes import AnswerMessage, ChatChoice, ChatCompletion, ChatLogprobs, ContentLogprob
from holdfast.http.server.answers import TokenCounts, WholeChoice
from holdfast.http.server.explanation import Explanation
from holdfast.messages.output import ChoiceFinished, OutputDelta, TextDelta, TokenText

_encode = msgspec.json.encode


class ChatAnswer(OpenAIAnswer):
    """AnswerFormat of a chat answer."""

    id_prefix, chunk_object = "chatcmpl", "chat.completion.chunk"

    def __init__(self, *, choices: int, **given: Any) -> None:
        super().__init__(**given)
        self._choices = [self._chunk_begin + b'{"index":%d,' % index for index in range(choices)]
        self._texts = [choice + b'"delta":{"content":' for choice in self._choices]

    def opening(self, *, prompt_tokens: int) -> bytes:
        """One chunk per choice that says who speaks."""
        super().opening(prompt_tokens=prompt_tokens)
        said = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' + self._chunk_end()
        return b"".join(choice + said for choice in self._choices)

    def delta(self, event: OutputDelta) -> bytes:
        """New text of a choice."""
        if not isinstance(event, TextDelta):
            return b""
        logprobs = _encode(_chat_logprobs(event.logprobs)) if event.logprobs else b"null"
        parts = (self._texts[event.index], _encode(event.text), logprobs, self._chunk_end(len(event.token_ids)))
        return b'%b%b},"logprobs":%b,"finish_reason":null}%b' % parts

    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of a choice."""
        end = b'"delta":{},"logprobs":null,"finish_reason":"%b"}' % event.finish_reason.encode()
        return self._choices[event.index] + end + self._chunk_end()

    def whole(self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None) -> bytes:
        """The whole as JSON."""
        shown = [
            ChatChoice(
                index=index,
                message=AnswerMessage(role="assistant", content=choice.text(), refusal=None),
                logprobs=_chat_logprobs(choice.logprobs) if self._shows_logprobs else None,
                finish_reason=choice.finish_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return _encode(ChatCompletion(choices=shown, **self._around_choices(counts, explanation)))


def _chat_logprobs(tokens: Sequence[TokenText]) -> ChatLogprobs:
    return ChatLogprobs(content=[_content_logprob(token) for token in tokens])


def _content_logprob(token: TokenText) -> ContentLogprob:
    return msgspec.structs.replace(_bare_logprob(token), top_logprobs=[_bare_logprob(rival) for rival in token.top])


def _bare_logprob(token: TokenText) -> ContentLogprob:
    return ContentLogprob(token=token.text, logprob=shown_logprob(token.logprob), bytes=list(token.raw))

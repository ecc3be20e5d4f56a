"""The answers of /v1/chat/completions, streamed and whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.front.openai.answers import OpenAIAnswer, shown_logprob
from holdfast.front.openai.shapes import (
    AnswerMessage,
    AnswerToolCall,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatEndWord,
    ChatLogprobs,
    ContentLogprob,
)
from holdfast.front.server.answers import TokenCounts, WholeChoice
from holdfast.front.server.explanation import Explanation
from holdfast.wire.output import (
    ChoiceFinished,
    EndWord,
    OutputDelta,
    TextDelta,
    TokenText,
    ToolArgumentsDelta,
    ToolCallStarted,
)

_encode = msgspec.json.encode
_EMPTY = b"{}"


class ChatAnswer(OpenAIAnswer):
    """AnswerFormat of a chat answer.

    calls_functions: a call is shown in the form that belongs to the request's `functions`, of which
    an answer has one.
    """

    id_prefix, chunk_object = "chatcmpl", "chat.completion.chunk"
    no_news = b'"delta":{}'

    def __init__(self, *, choices: int, calls_functions: bool = False, **given: Any) -> None:
        super().__init__(**given)
        self._calls_functions = calls_functions
        self._choices = [
            self._chunk_begin + b'{"index":%d,"delta":' % index for index in range(choices)
        ]

    def keep_alive(self) -> bytes:
        """A chunk that says nothing: some clients give up on a stream whose events cease, and do
        not see comments.
        """
        return self._choices[0] + b'{},"logprobs":null,"finish_reason":null}' + self._chunk_end()

    def opening(self, *, prompt_tokens: int) -> bytes:
        """One chunk per choice that says who speaks."""
        super().opening(prompt_tokens=prompt_tokens)
        said = (
            b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            + self._chunk_end()
        )
        return b"".join(choice + said for choice in self._choices)

    def delta(self, event: OutputDelta) -> bytes:
        """News of a choice.

        The end of a call has no form of its own; its tokens have log-probabilities, though, and
        count.
        """
        said = self._said(event)
        logprobs = _encode(_chat_logprobs(event.logprobs)) if event.logprobs else b"null"
        end = self._chunk_end(len(event.token_ids))
        if said == _EMPTY and not event.logprobs:
            return b""
        return b'%b%b,"logprobs":%b,"finish_reason":null}%b' % (
            self._choices[event.index],
            said,
            logprobs,
            end,
        )

    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of a choice."""
        end = (
            b'{},"logprobs":null,"finish_reason":"%b"}'
            % self._end_word(event.finish_reason).encode()
        )
        return self._choices[event.index] + end + self._chunk_end()

    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The whole as JSON."""
        shown = [
            ChatChoice(
                index=index,
                message=self._message(choice),
                logprobs=_chat_logprobs(choice.logprobs) if self._shows_logprobs else None,
                finish_reason=self._end_word(choice.finish_reason),
            )
            for index, choice in enumerate(choices)
        ]
        return _encode(ChatCompletion(choices=shown, **self._around_choices(counts, explanation)))

    def _said(self, event: OutputDelta) -> bytes:
        """What an event says, as the `delta` of a chunk."""
        if isinstance(event, TextDelta):
            text = _encode(event.appended)
            return (
                b'{"content":%b}' % text
                if event.kind == "text"
                else b'{"reasoning_content":%b,"reasoning":%b}' % (text, text)
            )
        if isinstance(event, ToolCallStarted):
            function = CalledFunction(name=event.name, arguments="")
            call = AnswerToolCall(index=event.call, id=event.id, type="function", function=function)
        elif isinstance(event, ToolArgumentsDelta):
            function = CalledFunction(arguments=event.text)
            call = AnswerToolCall(index=event.call, function=function)
        else:
            return _EMPTY
        if self._calls_functions:
            return b'{"function_call":%b}' % _encode(function)
        return b'{"tool_calls":[%b]}' % _encode(call)

    def _message(self, choice: WholeChoice) -> AnswerMessage:
        content, reasoning, calls = choice.text(), choice.text("reasoning"), choice.tool_calls
        functions = [CalledFunction(name=call.name, arguments=call.arguments) for call in calls]
        in_use = [
            AnswerToolCall(id=call.id, type="function", function=function)
            for call, function in zip(calls, functions, strict=True)
        ]
        return AnswerMessage(
            role="assistant",
            content=content or (None if reasoning or calls else ""),
            refusal=None,
            reasoning_content=reasoning or msgspec.UNSET,
            reasoning=reasoning or msgspec.UNSET,
            tool_calls=in_use if calls and not self._calls_functions else msgspec.UNSET,
            function_call=functions[0] if calls and self._calls_functions else msgspec.UNSET,
        )

    def _end_word(self, word: EndWord) -> ChatEndWord:
        return "function_call" if self._calls_functions and word == "tool_calls" else word


def _chat_logprobs(tokens: Sequence[TokenText]) -> ChatLogprobs:
    return ChatLogprobs(content=content_logprobs(tokens))


def content_logprobs(tokens: Sequence[TokenText]) -> list[ContentLogprob]:
    """Drawn tokens as OpenAI shows them, each with the likeliest at its place."""
    return [
        msgspec.structs.replace(
            _bare_logprob(token), top_logprobs=[_bare_logprob(rival) for rival in token.top]
        )
        for token in tokens
    ]


def _bare_logprob(token: TokenText) -> ContentLogprob:
    return ContentLogprob(
        token=token.text, logprob=shown_logprob(token.logprob), bytes=list(token.raw)
    )

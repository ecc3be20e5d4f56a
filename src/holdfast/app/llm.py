"""Holdfast as a library: a model in this process, without a server and without asyncio."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypedDict, Unpack, cast, overload

from holdfast.app.answers import Completion, TextStream
from holdfast.app.at_exit import close_before_exit, closed
from holdfast.app.sessions import Sessions
from holdfast.config import Settings, load_settings
from holdfast.errors import ModelLoadError
from holdfast.intake.prepare import observer, prepare
from holdfast.intake.tenant import tenant_of
from holdfast.intake.tokenizer_bundle import load_tokenizer_bundle
from holdfast.link.in_process import InProcessClient
from holdfast.messages.events import ModelInfo, WorkerFailed
from holdfast.messages.figures import WorkerStatistics
from holdfast.messages.requests import ChatPrompt, GenerationRequest, Prompt, SamplingParams
from holdfast.models.download import resolve_model, served_id
from holdfast.store.settings import library_folder
from holdfast.user_folders import hash_cache_file
from holdfast.worker.assignment import WorkerSettings
from holdfast.worker.device import serve_model

TextOrTokens: TypeAlias = str | Sequence[int]
Prompts: TypeAlias = list[str] | tuple[str, ...] | Sequence[Sequence[int]]


class GenerationOptions(TypedDict, total=False):
    """How to generate. What is left out: the model's own recommendation, or no effect."""

    max_tokens: int  # left out: as many as fit the context window
    temperature: float  # 0: the most likely token every time
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    seed: int
    stop: str | Sequence[str]
    top_logprobs: int  # given (0 too): log-probabilities of the drawn tokens, and of so many rivals
    ignore_eos: bool
    session_id: str  # the session that it belongs to; one that is not there is opened
    tenant: str  # nothing that one tenant has read is there for another


class LLM:
    """A loaded model. Use as a context manager, or call `close`; any thread may call any method at any time.

    model: a folder, a Hub id, or nothing for the bundled demo model. settings: any setting by its key, such as
    `{"model.layout": "rows", "scheduler.max_running": 8}`; files and environment variables are not read.
    Raises ModelLoadError or ConfigError.
    """

    def __init__(self, model: str | Path | None = None, *, settings: Mapping[str, object] | None = None) -> None:
        flags = {**(settings or {}), **({} if model is None else {"model.path": str(model)})}
        self._settings = load_settings(file=None, environ={}, flags=flags).settings
        folder = resolve_model(self._settings.model, progress=lambda stage, fraction: None)
        self._client = _start(self._settings, folder)
        close_before_exit(self._client)
        self._finalizer = weakref.finalize(self, closed, self._client)
        try:
            self._bundle = load_tokenizer_bundle(folder)
            outcome = self._client.wait_started()
            if isinstance(outcome, WorkerFailed):
                raise ModelLoadError(outcome.message)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def info(self) -> ModelInfo:
        """Facts of the loaded model."""
        return self._client.info

    @overload
    def generate(self, prompt: TextOrTokens, **options: Unpack[GenerationOptions]) -> Completion: ...

    @overload
    def generate(self, prompt: Prompts, **options: Unpack[GenerationOptions]) -> list[Completion]: ...

    def generate(self, prompt: TextOrTokens | Prompts, **options: Unpack[GenerationOptions]) -> Completion | list[Completion]:
        """Continue a prompt (text, or token ids), or several at once, in one batch: a list of prompts gives a list of answers.

        Raises InvalidRequest for a bad option or prompt, GenerationFailed when the model fails on one.
        """
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return self._answers([_raw_prompt(cast(TextOrTokens, prompt))], options)[0]
        return self._answers([_raw_prompt(each) for each in cast(Prompts, prompt)], options)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion:
        """Answer a conversation of OpenAI-shaped messages; a text is one message of the user.

        template_options: for the chat template, e.g. enable_thinking.
        """
        return self._answers([_chat_prompt(messages, template_options)], options)[0]

    def stream(self, prompt: TextOrTokens, **options: Unpack[GenerationOptions]) -> TextStream:
        """Continue a prompt piece by piece. Closing the stream early stops the work; its `completion` is there at the end."""
        return self._start_answer(_raw_prompt(prompt), options)

    def stream_chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> TextStream:
        """Answer a conversation piece by piece; see `chat` and `stream`."""
        return self._start_answer(_chat_prompt(messages, template_options), options)

    def sessions(self, *, tenant: str = "") -> Sessions:
        """The sessions of this model: named branches of what is kept."""
        return Sessions(self._client, tenant=tenant_of(api_key="", name=tenant, cache_salt=""))

    def statistics(self) -> WorkerStatistics:
        """Counters of the engine since its start, and gauges of now."""
        return self._client.statistics()

    def close(self) -> None:
        """Cancel what runs, let go of the model and of the device. May be called twice."""
        self._finalizer()

    def _answers(self, prompts: Sequence[Prompt], options: GenerationOptions) -> list[Completion]:
        """Answers to all prompts, as many under way at once as the engine and its queue take."""
        scheduler = self._settings.scheduler
        at_once = scheduler.max_running + scheduler.max_queued
        streams: list[TextStream] = []
        completions: list[Completion] = []
        try:
            for index in range(len(prompts)):
                while len(streams) < min(len(prompts), index + at_once):
                    streams.append(self._start_answer(prompts[len(streams)], options))
                completions.append(streams[index].read_all())
        finally:
            for stream in streams:
                stream.close()
        return completions

    def _start_answer(self, prompt: Prompt, options: GenerationOptions) -> TextStream:
        request = _request(prompt, options)
        prepared = prepare(request, self._bundle, info=self._client.info, limits=self._settings.limits)
        (sequence,) = prepared.sequences
        return TextStream(
            self._client.submit(sequence),
            prepared.choice(0),
            prompt_tokens=prepared.prompt_tokens,
            observe=observer(request, self._bundle, prepared, info=self._client.info),
        )


def _start(settings: Settings, folder: Path) -> InProcessClient:
    store = replace(settings.store, folder=library_folder(settings.store, os.environ))
    worker = WorkerSettings(
        folder=str(folder),
        hash_cache=hash_cache_file(os.environ) if store.folder else "",  # nothing is written that was not asked for
        model=replace(settings.model, name=served_id(settings.model)),
        scheduler=settings.scheduler,
        store=store,
    )
    return InProcessClient(lambda inbox: serve_model(inbox, worker), on_progress=lambda event: None)


def _raw_prompt(prompt: TextOrTokens) -> Prompt:
    return prompt if isinstance(prompt, str) else tuple(prompt)


def _chat_prompt(messages: str | Sequence[Mapping[str, Any]], template_options: Mapping[str, Any] | None) -> ChatPrompt:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return ChatPrompt(messages=tuple(dict(message) for message in messages), template_options=dict(template_options or {}))


def _request(prompt: Prompt, options: GenerationOptions) -> GenerationRequest:
    given: dict[str, Any] = dict(options)
    stop = given.pop("stop", ())
    names = SamplingParams.__struct_fields__
    sampling = {name: given.pop(name) for name in names if name in given}
    request = {name: given.pop(name) for name in ("max_tokens", "top_logprobs", "ignore_eos", "session_id") if name in given}
    tenant = tenant_of(api_key="", name=given.pop("tenant", ""), cache_salt="")
    if given:
        raise TypeError(f"unknown options: {', '.join(given)}; there are {', '.join(GenerationOptions.__annotations__)}")
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        model="",
        prompt=prompt,
        tenant=tenant,
        sampling=SamplingParams(**sampling),
        unset_sampling=tuple(name for name in names if name not in sampling),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        want_logprobs="top_logprobs" in request,
        prompt_field="messages" if isinstance(prompt, ChatPrompt) else "prompt",
        **request,
    )

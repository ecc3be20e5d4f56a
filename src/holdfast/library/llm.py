"""Holdfast as a library: a model in this process, without a server and without asyncio."""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeAlias, Unpack, cast, overload

import msgspec

from holdfast.config import Settings, load_settings
from holdfast.errors import ModelLoadError
from holdfast.files import hash_cache_file
from holdfast.front.prompt.embed_and_rank import (
    PromptReader,
    ReadPrompt,
    embedding_of,
    embedding_sequences,
)
from holdfast.front.prompt.gateway import sessions_of
from holdfast.front.prompt.limits import tenant_of
from holdfast.front.prompt.next_turn import observer
from holdfast.front.prompt.prepare import prepare
from holdfast.front.prompt.tokenizer_bundle import load_tokenizer_bundle
from holdfast.library.answers import Completion, TextStream
from holdfast.library.in_process import (
    BlockingEventStream,
    InProcessClient,
    close_before_exit,
    closed,
)
from holdfast.library.options import (
    ChatOptions,
    EmbeddingOptions,
    GenerationOptions,
    Messages,
    TextOrTokens,
    chat_request,
    embedding_request,
    request_of,
)
from holdfast.models.download import resolve_model, served_id
from holdfast.store.answers import AnswerFile
from holdfast.store.folder import library_folder
from holdfast.wire.commands import SequenceRequest, WorkerSettings
from holdfast.wire.events import ModelInfo, WorkerFailed, WorkerStatistics
from holdfast.wire.requests import GenerationRequest, Prompt
from holdfast.wire.sessions import SessionCommand, SessionInfo
from holdfast.worker.loop.process import serve_model

Prompts: TypeAlias = list[str] | tuple[str, ...] | Sequence[Sequence[int]]
LEAVE = msgspec.UNSET  # says that a value stays as it is, or as the settings have it


class LLM:
    """A loaded model. Use as a context manager, or call `close`; any thread may call any method at
    any time.

    model: a folder, a Hub id, or nothing for the bundled demo model. settings: any setting by its
    key, such as `{"model.layout": "rows", "scheduler.max_running": 8}`; files and environment
    variables are not read. Raises ModelLoadError or ConfigError.
    """

    def __init__(
        self, model: str | Path | None = None, *, settings: Mapping[str, object] | None = None
    ) -> None:
        flags = {**(settings or {}), **({} if model is None else {"model.path": str(model)})}
        self._settings = load_settings(file=None, environ={}, flags=flags).settings
        folder = resolve_model(self._settings.model, progress=lambda stage, fraction: None)
        self._client = _start(self._settings, folder)
        close_before_exit(self._client)
        self._finalizer = weakref.finalize(self, closed, self._client)
        try:
            store = library_folder(self._settings.store, os.environ)
            answers = AnswerFile(Path(store)) if store else None
            self._bundle = load_tokenizer_bundle(
                folder, settings=self._settings.model, answers=answers
            )
            outcome = self._client.wait_started()
            if isinstance(outcome, WorkerFailed):
                raise ModelLoadError(outcome.message)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _at_once(self) -> int:
        return self._settings.scheduler.max_running + self._settings.scheduler.max_queued

    @property
    def info(self) -> ModelInfo:
        """Facts of the loaded model."""
        return self._client.info

    @overload
    def generate(
        self, prompt: TextOrTokens, **options: Unpack[GenerationOptions]
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: Prompts, **options: Unpack[GenerationOptions]
    ) -> list[Completion]: ...

    def generate(
        self, prompt: TextOrTokens | Prompts, **options: Unpack[GenerationOptions]
    ) -> Completion | list[Completion]:
        """Continue a prompt (text, or token ids), or several at once, in one batch: a list of
        prompts gives a list of answers.

        Raises InvalidRequest for a bad option or prompt, GenerationFailed when the model fails on
        one.
        """
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return self._answers([request_of(_raw_prompt(cast(TextOrTokens, prompt)), options)])[0]
        return self._answers(
            [request_of(_raw_prompt(each), options) for each in cast(Prompts, prompt)]
        )

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Completion:
        """Answer a conversation of OpenAI-shaped messages; a text is one message of the user.

        With `tools`, what the model calls is in the answer's `tool_calls`. Its `message` and the
        results are for the next turn.
        """
        return self._answers([chat_request(messages, options)])[0]

    def stream(self, prompt: TextOrTokens, **options: Unpack[GenerationOptions]) -> TextStream:
        """Continue a prompt piece by piece.

        Closing the stream early stops the work; its `completion` is there at the end.
        """
        return self._start_answer(request_of(_raw_prompt(prompt), options))

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> TextStream:
        """Answer a conversation piece by piece; see `chat` and `stream`.

        Thoughts and calls show in the stream's `events`.
        """
        return self._start_answer(chat_request(messages, options))

    @overload
    def embed(self, texts: TextOrTokens, **options: Unpack[EmbeddingOptions]) -> list[float]: ...

    @overload
    def embed(self, texts: Prompts, **options: Unpack[EmbeddingOptions]) -> list[list[float]]: ...

    def embed(
        self, texts: TextOrTokens | Prompts, **options: Unpack[EmbeddingOptions]
    ) -> list[float] | list[list[float]]:
        """The vector of length 1 that stands for a text (or token ids), or those of several, read
        in one batch.

        Raises InvalidRequest for a bad option or text and for a model that gives no embeddings,
        GenerationFailed when it fails.
        """
        is_one = isinstance(texts, str) or bool(texts and isinstance(texts[0], int))
        inputs = [texts] if is_one else texts
        request = embedding_request(
            cast(Sequence[TextOrTokens], inputs), options, is_list=not is_one
        )
        sequences = embedding_sequences(request, self._bundle, info=self._client.info)
        read = self._read(sequences)
        vectors = [
            array("f", embedding_of(each.finished, dimensions=request.dimensions).vector).tolist()
            for each in read
        ]
        return vectors[0] if is_one else vectors

    def sessions(self, *, tenant: str = "") -> Sessions:
        """The sessions of this model: named branches of what is kept."""
        return Sessions(self._client, tenant=tenant_of(api_key="", name=tenant, cache_salt=""))

    def statistics(self) -> WorkerStatistics:
        """Counters of the engine since its start, and gauges of now."""
        return self._client.statistics()

    def close(self) -> None:
        """Cancel what runs, let go of the model and of the device. May be called twice."""
        self._finalizer()
        if hasattr(self, "_bundle"):  # else loading it has failed
            self._bundle.known_answers.close()

    def _read(self, sequences: Sequence[SequenceRequest]) -> list[ReadPrompt]:
        """What came of prompts that are only read, as many under way at once as the engine and its
        queue take.
        """
        streams: list[BlockingEventStream] = []
        read: list[ReadPrompt] = []
        try:
            for index in range(len(sequences)):
                while len(streams) < min(len(sequences), index + self._at_once):
                    streams.append(self._client.submit(sequences[len(streams)]))
                reader = PromptReader()
                read.append(
                    next(
                        found
                        for event in streams[index]
                        if (found := reader.take(event)) is not None
                    )
                )
        finally:
            for stream in streams:
                stream.close()
        return read

    def _answers(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answers to all requests, as many under way at once as the engine and its queue take."""
        streams: list[TextStream] = []
        completions: list[Completion] = []
        try:
            for index in range(len(requests)):
                while len(streams) < min(len(requests), index + self._at_once):
                    streams.append(self._start_answer(requests[len(streams)]))
                completions.append(streams[index].read_all())
        finally:
            for stream in streams:
                stream.close()
        return completions

    def _start_answer(self, request: GenerationRequest) -> TextStream:
        prepared = prepare(
            request,
            self._bundle,
            info=self._client.info,
            limits=self._settings.limits,
            tools=self._settings.tools,
        )
        (sequence,) = prepared.sequences
        return TextStream(
            self._client.submit(sequence),
            prepared.choice(0),
            prompt_tokens=prepared.prompt_tokens,
            observe=observer(request, self._bundle, prepared),
        )


def _start(settings: Settings, folder: Path) -> InProcessClient:
    store = replace(settings.store, folder=library_folder(settings.store, os.environ))
    worker = WorkerSettings(
        folder=str(folder),
        # nothing is written that was not asked for
        hash_cache=hash_cache_file(os.environ) if store.folder else "",
        model=replace(settings.model, name=served_id(settings.model)),
        scheduler=settings.scheduler,
        store=store,
    )
    return InProcessClient(lambda inbox: serve_model(inbox, worker), on_progress=lambda event: None)


def _raw_prompt(prompt: TextOrTokens) -> Prompt:
    return prompt if isinstance(prompt, str) else tuple(prompt)


class Sessions:
    """The sessions of one tenant. Any thread may call any method; each blocks until it is done.

    All raise SessionRefused, whose `failure` tells why, and WorkerUnavailable when the model is
    closed.
    """

    def __init__(self, client: InProcessClient, *, tenant: str) -> None:
        self._client, self._command = client, partial(SessionCommand, tenant=tenant)

    def list(self) -> tuple[SessionInfo, ...]:
        """All sessions, the last used first."""
        return self._ask(self._command(operation="list"))

    def get(self, session_id: str) -> SessionInfo:
        """One session."""
        return self._one(self._command(operation="get", session_id=session_id))

    def open(
        self,
        session_id: str,
        *,
        ttl_seconds: float | msgspec.UnsetType | None = LEAVE,
        pinned: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> SessionInfo:
        """Begin a session. ttl_seconds: how long it lives after its last use; None: until it is
        closed.
        """
        kept = dict(metadata or {})
        return self._one(
            self._command(
                operation="open",
                session_id=session_id,
                ttl_seconds=ttl_seconds,
                pinned=pinned,
                metadata=kept,
            )
        )

    def update(
        self,
        session_id: str,
        *,
        ttl_seconds: float | msgspec.UnsetType | None = LEAVE,
        pinned: bool | msgspec.UnsetType = LEAVE,
        metadata: Mapping[str, str] | msgspec.UnsetType = LEAVE,
    ) -> SessionInfo:
        """Change a session; what is not given stays."""
        kept = metadata if metadata is msgspec.UNSET else dict(metadata)
        return self._one(
            self._command(
                operation="update",
                session_id=session_id,
                ttl_seconds=ttl_seconds,
                pinned=pinned,
                metadata=kept,
            )
        )

    def fork(
        self,
        session_id: str,
        new_session_id: str,
        *,
        ttl_seconds: float | msgspec.UnsetType | None = LEAVE,
        pinned: bool = False,
    ) -> SessionInfo:
        """Begin a session where another one is; both go on from there, and share what they have in
        common.
        """
        fork = self._command(operation="fork", session_id=session_id, new_session_id=new_session_id)
        return self._one(msgspec.structs.replace(fork, ttl_seconds=ttl_seconds, pinned=pinned))

    def close(self, session_id: str, *, forget: bool = False) -> SessionInfo:
        """End a session; forget: delete what it has read, as far as nobody else stands on it.

        Returns it as it was.
        """
        return self._one(self._command(operation="close", session_id=session_id, forget=forget))

    def export_to(self, path: str | Path, session_id: str) -> SessionInfo:
        """Write a session with everything that is kept of it into a file."""
        return self._one(
            self._command(
                operation="export", session_id=session_id, path=str(Path(path).absolute())
            )
        )

    def import_from(self, path: str | Path, session_id: str = "") -> SessionInfo:
        """Take in a session from a file, under its own name or another one.

        Same model, weights, tokenizer and codec only.
        """
        return self._one(
            self._command(
                operation="import", session_id=session_id, path=str(Path(path).absolute())
            )
        )

    def _one(self, command: SessionCommand) -> SessionInfo:
        (info,) = self._ask(command)
        return info

    def _ask(self, command: SessionCommand) -> tuple[SessionInfo, ...]:
        return sessions_of(self._client.ask_session(command))

"""The tokenizers and templates of the served models, each read when it is first needed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from holdfast.errors import ModelLoadError, WorkerUnavailable
from holdfast.front.prompt.dialects import DialectReport
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle

_MOST_KEPT = 8  # the longest unused goes; a large vocabulary and what is known of texts take 100 MB

ReadBundle: TypeAlias = Callable[[str], Coroutine[Any, Any, TokenizerBundle]]
"""Reads the bundle of a model. Raises UnknownModel and ModelLoadError."""


class Bundles:
    """What was read of the models in use. Loop's thread only."""

    def __init__(self, read: ReadBundle, *, most_kept: int = _MOST_KEPT) -> None:
        self.dialects: dict[str, DialectReport] = {}  # of all that were read so far, by model
        self._reader, self._most_kept = read, most_kept
        self._tasks: OrderedDict[str, asyncio.Task[TokenizerBundle]] = OrderedDict()

    def begin(self, model: str) -> None:
        """Begin to read it, if that is not done or under way."""
        if model in self._tasks:
            self._tasks.move_to_end(model)
            return
        while len(self._tasks) >= self._most_kept:
            self._tasks.popitem(last=False)  # who has it, or waits for it, goes on to have it
        task = asyncio.create_task(self._reader(model), name=f"tokenizer of {model}")
        self._tasks[model] = task
        task.add_done_callback(lambda task: self._note(model, task))

    def forget(self, model: str) -> None:
        """Read it anew when it is needed the next time.

        Who has it, or waits for it, goes on to have it.
        """
        self._tasks.pop(model, None)
        self.dialects.pop(model, None)

    async def of(self, model: str) -> TokenizerBundle:
        """The bundle of a model; waits until it is read.

        Raises UnknownModel, and WorkerUnavailable when it cannot be read.
        """
        try:
            return await self.read(model)
        except ModelLoadError as error:
            raise WorkerUnavailable(f"model {model!r} cannot be served: {error}") from None

    async def read(self, model: str) -> TokenizerBundle:
        """As `of`, but raises ModelLoadError when it cannot be read."""
        self.begin(model)
        task = self._tasks[model]
        return task.result() if task.done() else await asyncio.shield(task)

    def _note(self, model: str, task: asyncio.Task[TokenizerBundle]) -> None:
        is_current = self._tasks.get(model) is task
        if not task.cancelled() and task.exception() is None:
            if is_current or model not in self._tasks:
                self.dialects[model] = task.result().dialect_report
        elif is_current:  # the next one may try again
            del self._tasks[model]

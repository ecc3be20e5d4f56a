"""The table of all that Holdfast keeps on this machine for a user: where it is, how much of it
there may be, who deletes it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.cli.output import size_text
from holdfast.config import Settings
from holdfast.front.fleet.compiled_code import MOST_KINDS
from holdfast.front.fleet.crash_reports import MOST_REPORTS
from holdfast.front.run.running_servers import RunningServer
from holdfast.front.server.access import key_file_of
from holdfast.store.answers import MOST_BYTES, clear_answers
from holdfast.store.budget import store_limits
from holdfast.store.folder import chosen_folder
from holdfast.store.inspect import clear_store, summarize_store
from holdfast.store.response_database import clear_responses
from holdfast.user_folders import caches_folder, state_folder

UsedBy = Callable[[RunningServer], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKind:
    """One kind of what is kept.

    `bound`: in words. `clear` deletes all of it; None: that is done elsewhere, as `hint` says.
    """

    name: str
    what: str
    place: Path
    bound: str
    clear: Callable[[], object] | None
    is_used_by: UsedBy = lambda server: True
    without: tuple[str, ...] = ()  # folders in it that are a kind of their own
    hint: str = ""

    def size_bytes(self) -> int:
        """What it takes on disk."""
        return _size_of(self.place, without=self.without)


def state_kinds(settings: Settings, environ: Mapping[str, str]) -> tuple[StateKind, ...]:
    """All that is kept with these settings. Raises RuntimeError for a user without a home."""
    caches, state, log = caches_folder(environ), state_folder(environ), settings.log
    keys = key_file_of(settings.server.keys_file, environ)
    of_log = f"{size_text(log.file_bytes * (log.old_files + 1))} for each port"
    kinds = [
        _folder(
            state / "logs", "logs of servers that write files", of_log, _logs_into(state / "logs")
        ),
        _folder(
            state / "crashes",
            "reports of workers that died",
            f"the latest {MOST_REPORTS}",
            lambda server: False,
        ),
        _folder(
            caches / "compiled",
            "code that MLX has compiled",
            f"of {MOST_KINDS} kinds of machines and systems",
        ),
        _folder(caches / "hashes", "hashes of model files", "one for each file"),
    ]
    if keys is not None:
        kinds.append(
            StateKind(
                name="keys",
                what="hashes of API keys",
                place=keys,
                bound="one for each key",
                clear=None,
                hint="`holdfast keys rm NAME` removes one",
            )
        )
    if folder := chosen_folder(settings.store, environ):
        kinds = [*_of_the_store(Path(folder), settings), *kinds]
    return tuple(kinds)


def _folder(
    place: Path, what: str, bound: str, is_used_by: UsedBy = lambda server: True
) -> StateKind:
    """What has a folder of its own, and its name."""
    return StateKind(
        name=place.name,
        what=what,
        place=place,
        bound=bound,
        clear=lambda: _remove(place),
        is_used_by=is_used_by,
    )


def _logs_into(folder: Path) -> UsedBy:
    return lambda server: bool(server.log_file) and Path(server.log_file).parent == folder


def _of_the_store(folder: Path, settings: Settings) -> list[StateKind]:
    def uses(server: RunningServer) -> bool:
        return server.store_folder == str(folder)

    is_there = (folder / "blocks").is_dir()  # before the first server there is none
    allowed = (
        summarize_store(folder, limits=store_limits(settings.store)).allowed_bytes
        if is_there
        else settings.store.disk_bytes
    )
    return [
        StateKind(
            name="store",
            what="what models have read, and sessions; with it go responses and answers",
            place=folder,
            bound="a fifth of the volume" if allowed is None else size_text(allowed),
            clear=lambda: clear_store(folder) if is_there else None,
            is_used_by=uses,
            without=("responses", "answers"),
        ),
        StateKind(
            name="responses",
            what="responses and conversations",
            place=folder / "responses",
            bound=f"{size_text(settings.responses.max_bytes)}, {settings.responses.max_count:,} of them",
            clear=lambda: clear_responses(folder),
            is_used_by=uses,
        ),
        StateKind(
            name="answers",
            what="answers as they were generated",
            place=folder / "answers",
            bound=size_text(MOST_BYTES),
            clear=lambda: clear_answers(folder),
            is_used_by=uses,
        ),
    ]


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _size_of(path: Path, *, without: tuple[str, ...] = ()) -> int:
    """Bytes of a file, or of all files in a folder; 0 where there is nothing.

    Links are not followed.
    """
    if path.is_file():
        return path.stat().st_size
    total = 0
    for place, folders, files in os.walk(path):
        if place == str(path):
            folders[:] = [name for name in folders if name not in without]
        for name in files:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # it has just gone
                continue
    return total

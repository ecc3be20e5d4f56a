"""What the settings say about the store."""

from __future__ import annotations

import os
from collections.abc import Mapping

from holdfast.config import StoreSettings
from holdfast.store.budget import StoreLimits
from holdfast.user_folders import expanded, store_folder

AUTO, OFF = "auto", "off"
# A drive of 1 TB is usually good for 600 TB of writing: 16 years of this.
DAILY_WRITE_BYTES = 100 << 30


def store_limits(settings: StoreSettings) -> StoreLimits:
    """The limits that the settings ask for; what they leave open is the share of the volume that
    StoreLimits names.
    """
    daily = DAILY_WRITE_BYTES if settings.daily_write_bytes is None else settings.daily_write_bytes
    return StoreLimits(budget_bytes=settings.disk_bytes, daily_write_bytes=daily)


def chosen_folder(settings: StoreSettings, environ: Mapping[str, str]) -> str:
    """The folder that a server is to use, as an absolute path; empty when what was read is to be
    kept in RAM only.

    Raises ConfigError for a home that there is not.
    """
    if settings.folder in ("", OFF):
        return ""
    if settings.folder == AUTO:
        return str(store_folder(environ))
    return os.path.abspath(expanded(settings.folder))


def is_folder(settings: StoreSettings) -> bool:
    """Whether the settings name a folder, chosen by whoever started this."""
    return settings.folder not in ("", AUTO, OFF)


def library_folder(settings: StoreSettings, environ: Mapping[str, str]) -> str:
    """The same for a model in somebody else's process, which writes nothing that was not asked for."""
    return "" if settings.folder == AUTO else chosen_folder(settings, environ)

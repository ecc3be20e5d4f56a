"""What the settings say about the store."""

from __future__ import annotations

from holdfast.config import StoreSettings
from holdfast.store.budget import UNLIMITED, StoreLimits


def store_limits(settings: StoreSettings) -> StoreLimits:
    """The limits that the settings ask for; what they leave open is the share of the volume that StoreLimits names."""
    return StoreLimits(budget_bytes=settings.disk_bytes or UNLIMITED, daily_write_bytes=settings.daily_write_bytes or UNLIMITED)

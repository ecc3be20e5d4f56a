"""/admin/store: what is kept on disk of what models have read, as `holdfast store` tells it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.config import StoreSettings
from holdfast.front.server.body import json_response
from holdfast.front.server.dialect import operation
from holdfast.front.server.openapi import answers_of
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import Services
from holdfast.store.block import StoreRefused
from holdfast.store.inspect import ModelHoldings, list_store, summarize_store
from holdfast.store.settings import is_folder, store_limits


class StoreOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The folder as a whole; without a store, `folder` is null and all else is nothing."""

    folder: str | None = None
    blocks: int = 0
    file_bytes: int = 0
    allowed_bytes: int = 0
    unreachable_blocks: int = 0
    pinned_blocks: int = 0
    written_today_bytes: int = 0
    quarantined_files: int = 0
    quarantined_bytes: int = 0
    volume_bytes: int = 0
    volume_free_bytes: int = 0
    models: tuple[ModelHoldings, ...] = ()


@operation(
    "GET",
    "/admin/store",
    answers_of(StoreOverview),
    summary="what is kept on disk",
    needs_admin=True,
)
async def show_store(request: Request, services: Services) -> Response:
    """What is kept on disk, how much of it may be, and of which models."""
    settings = services.store
    if not is_folder(settings):
        return json_response(StoreOverview())
    try:
        return json_response(await asyncio.to_thread(_figures, settings))
    except (StoreRefused, OSError) as error:
        raise RequestRefused(
            f"the store cannot be read: {error}", status=503, code="store_unavailable"
        ) from None


def _figures(settings: StoreSettings) -> StoreOverview:
    folder = Path(settings.folder)
    summary, models = summarize_store(folder, limits=store_limits(settings)), list_store(folder)
    shown = {
        name: getattr(summary, name)
        for name in StoreOverview.__struct_fields__
        if name not in ("folder", "models")
    }
    return StoreOverview(folder=str(folder), models=models, **shown)

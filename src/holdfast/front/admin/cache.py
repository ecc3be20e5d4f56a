"""/admin/cache: what the prefix caches contain; /admin/misses: recent prompts that missed them."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.server.access import caller_of, check_admin
from holdfast.front.server.context import context_of
from holdfast.front.server.dialect import operation
from holdfast.front.server.explanation import Difference, in_words_without_texts
from holdfast.front.server.misses import Miss, TextChange
from holdfast.front.server.openapi import query_shape, returns
from holdfast.front.server.request import json_response
from holdfast.front.server.services import Services, model_of, served_models
from holdfast.wire.cache_map import CacheMapQuestion, CachePart, CacheTree

CACHE_PATH = "/admin/cache"
MISSES_PATH = "/admin/misses"
_MOST_SHOWN = 50
_QUERY = query_shape(
    {
        "model": (str, "Show only this model. Default: all."),
        "cache_salt": (str, "The salt of the requests whose texts to show."),
    }
)


class CachedModel(Struct, frozen=True, kw_only=True):
    """What the prefix cache of a model contains: its largest parts, each after its parent.

    hidden_trees: how many trees are not listed; a tree is the cache of one tenant in one form of
        KV, and of very many trees, only 240 are listed.
    is_complete: false if the cache has too many blocks to visit all; then `blocks` and the
        tokens of trees and parts count only those that were visited.
    """

    model: str
    blocks: int
    is_complete: bool
    trees: tuple[CacheTree, ...]
    hidden_trees: int
    parts: tuple[CachePart, ...]


class CacheContents(Struct, frozen=True, kw_only=True):
    """The prefix caches of all loaded models."""

    models: list[CachedModel]


@operation("GET", CACHE_PATH, returns(CacheContents), _QUERY)
async def show_cache(request: Request, services: Services) -> Response:
    """Show which prompts the prefix caches of the loaded models contain, where, and for whom.

    With an ordinary API key, only what requests of that key have cached. If no keys are set,
    requires a connection from this machine.
    """
    caller = caller_of(request)
    if not caller.has_key:
        check_admin(request)
    requested_model = _requested_model(request, services)
    question = CacheMapQuestion(tenant=_tenant(request, services), sees_all=caller.is_admin)
    maps = await services.models.control.cache_maps(question)
    models = [
        CachedModel(
            model=model,
            blocks=cache_map.blocks,
            is_complete=cache_map.is_complete,
            trees=cache_map.trees,
            hidden_trees=cache_map.hidden_trees,
            parts=cache_map.parts,
        )
        for model, cache_map in maps.items()
        if requested_model in (None, model)
    ]
    return json_response(CacheContents(models=models))


class RecentMiss(Struct, frozen=True, kw_only=True):
    """A request that missed the cache: at least 256 reusable prompt tokens were prefilled again.

    at: Unix seconds. reason, explanation, unused_tokens: as with `holdfast.explain`. change: the
    first difference from the most similar earlier prompt; null if there is none in memory.
    difference: the tokens that differ from the cached ones. shows_texts: false if the prompt
    belongs to another tenant; then `change` and `difference` are null. With an ordinary API key,
    `client`, `path` and `session_id` are then empty.
    """

    at: float
    model: str
    key: str
    client: str
    path: str
    session_id: str
    prompt_tokens: int
    cached_tokens: int
    unused_tokens: int
    reason: str
    explanation: str
    change: TextChange | None
    difference: Difference | None
    shows_texts: bool


class RecentMissList(Struct, frozen=True, kw_only=True):
    """Recent misses, the latest first."""

    misses: list[RecentMiss]


@operation("GET", MISSES_PATH, returns(RecentMissList), _QUERY)
async def list_misses(request: Request, services: Services) -> Response:
    """List the last answers whose prompts missed the prefix cache, and the changes in the prompts.

    With an ordinary API key, only answers to that key. If no keys are set, requires a connection
    from this machine. Texts of a prompt are shown only to the tenant that sent it, and to admins
    if prompts are logged (`log.content`); its session, path and address only to the tenant and to
    admins.
    """
    caller = caller_of(request)
    if not caller.has_key:
        check_admin(request)
    tenant = _tenant(request, services)
    requested_model = _requested_model(request, services)
    sees_logged = caller.is_admin and services.settings.log.content
    misses = [
        _recent_miss(
            miss,
            shows_texts=sees_logged or miss.tenant == tenant,
            shows_sender=caller.is_admin or miss.tenant == tenant,
        )
        for miss in services.telemetry.misses
        if (caller.is_admin or miss.key == caller.key_name)
        and requested_model in (None, miss.model)
    ]
    return json_response(RecentMissList(misses=misses[:_MOST_SHOWN]))


def _tenant(request: Request, services: Services) -> str:
    """The tenant whose texts the caller may see: that of its key, with the query's `cache_salt`."""
    salt = request.query_params.get("cache_salt")
    return context_of(request, services, cache_salt=salt).tenant


def _requested_model(request: Request, services: Services) -> str | None:
    """The id of the model that the query names; None for all models. Raises UnknownModel."""
    name = request.query_params.get("model")
    if name is None:
        return None
    model = model_of(services, name)
    if model not in {each.id for each in served_models(services)}:
        raise services.models.catalog().unknown(name)
    return model


def _recent_miss(miss: Miss, *, shows_texts: bool, shows_sender: bool) -> RecentMiss:
    """A miss as the caller may see it. shows_sender: also its address, path and session."""
    explanation = miss.explanation
    return RecentMiss(
        at=round(miss.at, 3),
        model=miss.model,
        key=miss.key,
        client=miss.client if shows_sender else "",
        path=miss.path if shows_sender else "",
        session_id=miss.session_id if shows_sender else "",
        prompt_tokens=explanation.prompt_tokens,
        cached_tokens=explanation.ram_tokens + explanation.disk_tokens,
        unused_tokens=explanation.unused_tokens,
        reason=explanation.reason,
        explanation=explanation.explanation if shows_texts else in_words_without_texts(explanation),
        change=miss.change if shows_texts else None,
        difference=explanation.difference if shows_texts else None,
        shows_texts=shows_texts,
    )


OPERATIONS = (show_cache, list_misses)

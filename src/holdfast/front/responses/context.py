"""What a request goes on from: an earlier response, a conversation, items that are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.front.responses.fields import ResponseRequest
from holdfast.front.responses.items import items_of
from holdfast.front.responses.kept_items import continued, kept_input, shown_item
from holdfast.front.responses.run import Keeping
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import Services
from holdfast.store.responses import Item, RecordMissing, ResponseFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A request with all that it refers to, and where its response belongs."""

    asked: ResponseRequest
    before: Sequence[Any]  # items
    keeping: Keeping


async def continuation_of(
    asked: ResponseRequest, services: Services, *, tenant: str
) -> Continuation:
    """The request and what it goes on from. Raises RequestRefused for what is not there."""
    asked.refuse_what_cannot_be_served(services.limits)
    items = await _referred(asked, services, tenant)
    if any(map(_is_reference, items_of(asked.input))):
        asked = asked.model_copy(update={"input": continued(items)})
    before: list[Item] = []
    if asked.previous_response_id is not None:
        before = await _chain(services, tenant, asked.previous_response_id)
    elif asked.conversation_id is not None:
        before = await _conversation(services, tenant, asked.conversation_id)
    keeping = Keeping(
        tenant=tenant,
        previous=asked.previous_response_id,
        conversation=asked.conversation_id,
        stores=asked.store is not False,
        in_background=bool(asked.background),
        streams=bool(asked.stream),
    )
    if keeping.keeps:
        keeping = replace(keeping, input=kept_input(items))
    return Continuation(asked=asked, before=continued(before), keeping=keeping)


async def _referred(
    asked: ResponseRequest, services: Services, tenant: str
) -> list[Mapping[str, Any]]:
    """The items of the input; in place of references what they refer to."""
    items: list[Mapping[str, Any]] = [shown_item(item) for item in items_of(asked.input)]
    wanted = {
        place: item.get("id") or "" for place, item in enumerate(items) if _is_reference(item)
    }
    if not wanted:
        return items
    found = await services.responses.call(ResponseFile.find_items, tenant, tuple(wanted.values()))
    for place, item_id in wanted.items():
        if item_id not in found:
            reason, field = (
                "there is no such item; it may not be kept any more",
                f"input.{place}.id",
            )
            raise RequestRefused(
                f"`{field}`: {reason}", status=404, code="item_not_found", field=field
            )
        items[place] = found[item_id]
    return items


def _is_reference(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "item_reference" or (
        item.get("type") is None and "id" in item and "role" not in item
    )


async def _chain(services: Services, tenant: str, response_id: str) -> list[Item]:
    field = "previous_response_id"
    try:
        record = await services.responses.call(
            ResponseFile.record, tenant, response_id, kind="response"
        )
        if record.is_running:
            reason = f"`{field}`: that response is still being made"
            raise RequestRefused(reason, code="previous_response_in_progress", field=field)
        if record.body.get("conversation"):
            reason = (
                f"`{field}`: that response belongs to a conversation; go on with `conversation`"
            )
            raise RequestRefused(reason, field=field)
        return await services.responses.call(ResponseFile.chain, tenant, response_id)
    except RecordMissing as missing:
        what = (
            "there is no such response"
            if missing.record_id == response_id
            else "a response that it continues is gone"
        )
        reason = f"`{field}`: {what}; it may have been deleted, or not be kept any more"
        raise RequestRefused(
            reason, status=404, code="previous_response_not_found", field=field
        ) from None


async def _conversation(services: Services, tenant: str, conversation_id: str) -> list[Item]:
    try:
        return await services.responses.call(
            ResponseFile.items, tenant, conversation_id, kind="conversation"
        )
    except RecordMissing:
        reason = (
            "`conversation`: there is no such conversation; it may have been deleted, or not be "
            "kept any more"
        )
        raise RequestRefused(
            reason, status=404, code="conversation_not_found", field="conversation"
        ) from None

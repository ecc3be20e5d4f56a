"""Images in every protocol, with every family's template, for every kind of tenant."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import ServerSettings
from holdfast.front.prompt import images
from holdfast.models.image_files import image_name
from tests.fakes.image_requests import CAT, REQUESTS
from tests.fakes.seeing import FAMILIES, SeeingFront, seeing_front

KEY = "a key"
# how a request gets a tenant: its headers, and additional fields of its body
TENANTS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "none": ({}, {}),
    "key": ({"authorization": f"Bearer {KEY}"}, {}),
    "salt": ({}, {"cache_salt": "a salt"}),
    "header": ({"x-holdfast-tenant": "somebody"}, {}),
    "all": (
        {"authorization": f"Bearer {KEY}", "x-holdfast-tenant": "somebody"},
        {"cache_salt": "a salt"},
    ),
}
COUNTS = {  # paths that show or count the prompt of a request to another path
    "/v1/chat/completions": ("/tokenize", "/apply-template"),
    "/v1/messages": ("/v1/messages/count_tokens",),
}


def front_of(folder: Path, family: str, tenant: str) -> SeeingFront:
    has_key = tenant in ("key", "all")
    server = ServerSettings(api_key=KEY if has_key else "", reconnect_seconds=0)
    front = seeing_front(folder / "images", family=family, server=server)
    front.http.headers.update(TENANTS[tenant][0])
    return front


# every family and every kind of tenant
PAIRS = list(zip(FAMILIES, cycle(TENANTS), strict=False))


@pytest.mark.parametrize(("family", "tenant"), PAIRS)
async def test_the_model_sees_every_image_and_nobody_sees_a_mark(
    family: str, tenant: str, tmp_path: Path
) -> None:
    front = front_of(tmp_path, family, tenant)
    for kind, (path, body, _) in REQUESTS.items():
        asked = {**body, **TENANTS[tenant][1]}
        answer = await front.http.post(path, json=asked)
        assert answer.status_code == 200, f"{kind}: {answer.text}"
        (span,) = front.sent.images
        assert (front.intake.folder.path / span.layout.image).read_bytes() == CAT, kind
        assert "{image 0}" in front.shown(), kind
        answers = [answer]
        for counting in COUNTS.get(path, ()):
            answers.append(await front.http.post(counting, json=asked))
            assert answers[-1].status_code == 200, f"{kind}: {answers[-1].text}"
        if path == "/v1/chat/completions":
            counted = answers[1].json()
            assert counted["count"] == len(front.sent.prompt_token_ids), kind
        elif path == "/v1/messages":
            assert answers[1].json()["input_tokens"] == len(front.sent.prompt_token_ids), kind
        for text in (front.shown(), *(each.text for each in answers)):
            assert images._OPENING not in text, kind
            assert images._CLOSING not in text, kind
            assert span.layout.image not in text, kind


async def test_tenants_share_no_image(tmp_path: Path) -> None:
    names = set()
    for tenant in TENANTS:
        front = front_of(tmp_path, "qwen3_vl", tenant)
        path, body, _ = REQUESTS["OpenAI"]
        await front.http.post(path, json={**body, **TENANTS[tenant][1]})
        names.add(front.sent.images[0].layout.image)
    assert len(names) == len(TENANTS)


@pytest.mark.parametrize("tenant", ["", "somebody"])
def test_written_marks_can_be_read(tenant: str) -> None:
    name = image_name(CAT, tenant=tenant)
    assert images.images_of(f"a{images.image_mark(name)}b") == [name]
    assert images.without_images(images.image_mark(name)) == ""


@pytest.mark.parametrize("tenant", TENANTS)
async def test_an_unreplaced_mark_fails_the_request(
    tenant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = front_of(tmp_path, "qwen3_vl", tenant)
    # as if the reader did not know the names that the writer uses
    monkeypatch.setattr(
        "holdfast.front.prompt.template.content_parts",
        lambda text: [{"type": "text", "text": text}],
    )
    for kind, (path, body, _) in REQUESTS.items():
        asked = {**body, **TENANTS[tenant][1]}
        for each in (path, *COUNTS.get(path, ())):
            answer = await front.http.post(each, json=asked)
            assert answer.status_code == 500, f"{kind}: {answer.text}"
            assert "image" in answer.text, kind
            assert images._OPENING not in answer.text, kind
    assert front.engine.submitted == []

"""Checking the images of requests: all kinds of files, many at a time, and leftovers."""

from __future__ import annotations

import asyncio
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import ImagesSettings
from holdfast.front.images import intake as intake_module
from holdfast.front.images.folder import ImageFolder
from holdfast.front.images.sources import ImageSource
from tests.fakes.images import broken_images, data_url, odd_images, png
from tests.fakes.seeing import SeeingFront, chat, seeing_front

CHAT = "/v1/chat/completions"
ODD = odd_images()
BROKEN = broken_images()
SMALL = ImagesSettings(max_pixels=1_000_000)


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data) if data else "data:,"}}


def files(front: SeeingFront) -> set[str]:
    folder = front.intake.folder.path
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


@pytest.mark.parametrize("kind", ODD)
async def test_unusual_images_are_accepted(kind: str, tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images", settings=SMALL)
    answer = await front.http.post(CHAT, json=chat("What?", image(ODD[kind])))
    assert answer.status_code == 200, answer.text
    assert len(files(front)) == 1


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_broken_image_is_a_400_with_its_field(kind: str, tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images", settings=SMALL)
    answer = await front.http.post(CHAT, json=chat("What?", image(BROKEN[kind][0])))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages.0.content.1.image_url")
    assert BROKEN[kind][1] in error["message"] or not BROKEN[kind][0]
    assert front.engine.submitted == []


async def test_a_known_image_is_not_processed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = seeing_front(tmp_path / "images")
    assert (await front.http.post(CHAT, json=chat(image(png())))).status_code == 200
    monkeypatch.setattr(ImageSource, "decoded", None)
    monkeypatch.setattr(ImageFolder, "hold_image", None)
    again = await front.http.post(CHAT, json=chat("And?", image(png())))
    assert again.status_code == 200, again.text
    assert len(front.engine.asked) == 1
    monkeypatch.undo()
    restarted = seeing_front(tmp_path / "images")
    assert (await restarted.http.post(CHAT, json=chat(image(png())))).status_code == 200


async def test_an_image_whose_file_is_gone_is_written_again(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images")
    await front.http.post(CHAT, json=chat(image(png())))
    (name,) = files(front)
    (tmp_path / "images" / name).unlink()
    assert (await front.http.post(CHAT, json=chat(image(png())))).status_code == 200
    assert files(front) == {name}


async def test_two_hundred_broken_images_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images", settings=SMALL)
    broken = [data for data, _ in BROKEN.values() if data]
    bodies = [chat(image(broken[place % len(broken)])) for place in range(200)]
    before = peak_bytes()
    answers = await asyncio.gather(*(front.http.post(CHAT, json=body) for body in bodies))
    assert {answer.status_code for answer in answers} == {400}
    assert peak_bytes() - before < 150 << 20
    usual = await front.http.post(CHAT, json=chat("What?", image(png())))
    assert usual.status_code == 200


def peak_bytes() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


async def test_a_slow_image_is_given_up_and_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = seeing_front(tmp_path / "images", settings=ImagesSettings(check_seconds=0.05))
    may_end = threading.Event()
    decoded = ImageSource.decoded

    def slow(source: ImageSource, *, max_bytes: int) -> bytes:
        may_end.wait(60)
        return decoded(source, max_bytes=max_bytes)

    monkeypatch.setattr(ImageSource, "decoded", slow)
    answer = await front.http.post(CHAT, json=chat(image(png())))
    assert answer.status_code == 503
    assert "could not be fetched and kept within 0.05 s" in answer.json()["error"]["message"]
    may_end.set()
    while not files(front):  # the thread continues and writes the image
        await asyncio.sleep(0.001)
    await asyncio.to_thread(front.intake._readers.shutdown)
    assert not front.intake.folder._holds


async def test_an_image_is_held_exactly_as_long_as_its_request(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images")
    front.engine.may_go_on.clear()
    asked = asyncio.create_task(front.http.post(CHAT, json=chat(image(png()), image(png(2)))))
    while not front.engine.submitted:
        await asyncio.sleep(0.001)
    names = {span.layout.image for span in front.engine.submitted[0].images}
    assert dict(front.intake.folder._holds) == dict.fromkeys(names, 1)
    front.engine.may_go_on.set()
    assert (await asked).status_code == 200
    assert not front.intake.folder._holds


async def test_a_stopping_server_starts_no_further_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = seeing_front(tmp_path / "images", settings=ImagesSettings(urls=True))
    begun: list[str] = []
    may_end = threading.Event()

    def fetch(url: str, **_: Any) -> bytes:
        begun.append(url)
        may_end.wait(60)
        return png()

    monkeypatch.setattr(intake_module, "fetch_image", fetch)
    urls = [f"https://slow.example/{number}.png" for number in range(9)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    async with front.app.router.lifespan_context(front.app):
        asked = asyncio.create_task(front.http.post(CHAT, json=chat(*parts)))
        while len(begun) < 4:
            await asyncio.sleep(0.001)
        asked.cancel()
    may_end.set()
    await asyncio.wait([asked])
    assert sorted(begun) == urls[:4]


async def test_a_url_is_fetched_if_enabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    front = seeing_front(tmp_path / "images", settings=ImagesSettings(urls=True))
    body = chat({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/cat.png"}})
    answer = await front.http.post(CHAT, json=body)
    assert answer.status_code == 400
    assert "private address" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages.0.content.0.image_url"
    monkeypatch.setattr(intake_module, "fetch_image", lambda url, **_: png())
    assert (await front.http.post(CHAT, json=body)).status_code == 200
    assert len(front.sent.images) == 1

"""Images in `holdfast chat` and `holdfast run`."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.chat_images import ImageUnreadable, image_part, take_images, typed_path
from tests.fakes.command_line import holdfast_here, only_line
from tests.fakes.conversing import converse
from tests.fakes.echo_server import EchoServer
from tests.fakes.images import data_url, png

CAT = {"type": "image_url", "image_url": {"url": data_url(png())}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("cat.png", "my cat.png", "dog.JPG", "it's.png"):
        (tmp_path / name).write_bytes(png())
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "rest", "names"),
    [
        ("{}/cat.png", "", ["cat.png"]),
        ("What is {}/cat.png", "What is", ["cat.png"]),
        ("{}/cat.png What is it?", "What is it?", ["cat.png"]),
        ("{}/my\\ cat.png what?", "what?", ["my cat.png"]),
        ("'{}/my cat.png' what?", "what?", ["my cat.png"]),
        ('"{}/it\'s.png" what?', "what?", ["it's.png"]),
        ("file://{}/my%20cat.png", "", ["my cat.png"]),
        ("{0}/cat.png and {0}/dog.JPG", "and", ["cat.png", "dog.JPG"]),
        ("{}/no.png is not there", "{}/no.png is not there", []),
        ("cat.png is only a word", "cat.png is only a word", []),
        ("https://example.com/cat.png", "https://example.com/cat.png", []),
        ("  kept as typed  ", "  kept as typed  ", []),
        ("{}", "{}", []),
    ],
)
def test_paths_of_existing_images_are_removed_from_a_message(
    typed: str, rest: str, names: list[str], folder: Path
) -> None:
    taken = take_images(typed.format(folder))
    assert taken.text == rest.format(folder)
    assert taken.images == tuple(folder / name for name in names)


def test_a_path_may_begin_with_the_home_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert typed_path("~/cat.png") == folder / "cat.png"


def test_an_image_becomes_a_data_url_of_its_type(folder: Path) -> None:
    assert image_part(folder / "cat.png") == CAT
    url = image_part(folder / "dog.JPG")["image_url"]["url"]
    assert url == f"data:image/jpeg;base64,{base64.b64encode(png()).decode()}"
    with pytest.raises(ImageUnreadable, match=r"no\.png cannot be read"):
        image_part(folder / "no.png")


def content(request: dict[str, Any]) -> Any:
    return request["messages"][-1]["content"]


def test_typed_paths_and_the_image_command_attach_images(echo: EchoServer, folder: Path) -> None:
    _, output = converse(
        echo,
        f"What is {folder}/cat.png",
        f"/image {folder}/my\\ cat.png",
        "And this?",
        f"/image {folder}/no.png",
        "/image",
        "No image.",
        interactive=True,
    )
    text = {"type": "text", "text": "What is"}
    assert content(echo.requests[0]) == [CAT, text]
    assert content(echo.requests[1]) == [CAT, {"type": "text", "text": "And this?"}]
    assert echo.requests[1]["messages"][0]["content"] == [CAT, text]
    assert content(echo.requests[2]) == "No image."
    assert "(attached my cat.png)" in output
    assert "no.png cannot be read" in output
    assert "/image PATH" in output


def test_a_pipe_does_not_turn_paths_into_images(echo: EchoServer, folder: Path) -> None:
    converse(echo, f"What is {folder}/cat.png")
    assert content(echo.requests[0]) == f"What is {folder}/cat.png"


@pytest.mark.parametrize("command", [["run", "echo", "What?"], ["chat", "-p", "What?"]])
def test_a_question_gets_images_by_option(
    echo: EchoServer, command: list[str], folder: Path
) -> None:
    options = ["--url", echo.url, "--image", "cat.png", "--image", "my cat.png"]
    done = holdfast_here(command[0], *options, *command[1:], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert content(echo.requests[0]) == [CAT, CAT, {"type": "text", "text": "What?"}]
    missing = holdfast_here(*command, "--url", echo.url, "--image", "no.png", cwd=folder)
    assert missing.returncode == 2
    assert "no.png cannot be read" in missing.stderr
    text = folder / "notes.txt"
    text.write_text("no image")
    wrong = holdfast_here(*command, "--url", echo.url, "--image", "notes.txt", cwd=folder)
    assert len(echo.requests) == 1
    assert wrong.returncode == 2
    assert "notes.txt is not an image (PNG, JPEG, WebP, GIF or BMP)" in only_line(wrong.stderr)


def test_an_image_alone_is_a_question(echo: EchoServer, folder: Path) -> None:
    command = ["run", "echo", "--url", echo.url]
    done = holdfast_here(*command, "--image", "cat.png", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert content(echo.requests[0]) == [CAT]
    refused = holdfast_here(*command, cwd=folder)
    assert refused.returncode == 2
    assert "there is no question" in refused.stderr

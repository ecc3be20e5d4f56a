"""Tokens cached with another version of a model are never reused, whatever has changed in the
model.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from holdfast import LLM
from holdfast.errors import SessionRefused
from tests.fakes.padded_model import spoil_weights, write_padded
from tests.fakes.server_process import ServerProcess
from tests.fakes.tiny_models import write_tiny

PROMPT = "The lighthouse keeper wrote every ship into his book. " * 6
TRUSTED = {"model.trust_remote_code": True}


@dataclass(frozen=True)
class Answer:
    text: str
    cached_tokens: int


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", "llama")


def ask(folder: Path, store: Path | None) -> Answer:
    """Load the model, chat, and unload it."""
    settings = {"store.folder": "off" if store is None else str(store), **TRUSTED}
    with LLM(folder, settings=settings) as llm:
        answer = llm.chat(
            [{"role": "user", "content": PROMPT}], max_tokens=12, temperature=0, ignore_eos=True
        )
    return Answer(answer.text, answer.cached_tokens)


def change_weights(folder: Path) -> None:
    spoil_weights(folder / "model.safetensors")


def change_code(folder: Path) -> None:
    code = folder / "modeling.py"
    code.write_text(re.sub(r"FACTOR = 1.0", "FACTOR = -1.5", code.read_text()))


def change_a_table_of_the_code(folder: Path) -> None:
    (folder / "factor.txt").write_text("-1.5")


def change_tokenizer(folder: Path) -> None:
    """Swap two letters."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]
    file.write_text(json.dumps(content))


def change_template(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text())
    content["chat_template"] = content["chat_template"].replace(
        "message['content']", "message['content'] + '!'"
    )
    file.write_text(json.dumps(content))


def change_adapter(folder: Path) -> None:
    spoil_weights(folder / "adapters.safetensors")


def give_code(folder: Path) -> None:
    """The same model, built by custom code that reads a file next to it."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "modeling.py"}))
    (folder / "factor.txt").write_text("1.0")
    (folder / "modeling.py").write_text(CODE)


CODE = """
from pathlib import Path

from mlx_lm.models import llama
from mlx_lm.models.llama import ModelArgs

FACTOR = 1.0
FURTHER_FACTOR = float(Path(__file__).with_name("factor.txt").read_text())


class Model(llama.Model):
    def __call__(self, inputs, cache=None, input_embeddings=None):
        embeddings = self.model.embed_tokens(inputs) * FACTOR * FURTHER_FACTOR
        return super().__call__(inputs, cache=cache, input_embeddings=embeddings)
"""


def give_adapter(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "adapters.safetensors")


def give_nothing(folder: Path) -> None:
    """The model is unchanged."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "change"),
    [
        (give_nothing, change_weights),
        (give_nothing, change_tokenizer),
        (give_nothing, change_template),
        (give_adapter, change_adapter),
        (give_code, change_code),
        (give_code, change_a_table_of_the_code),
    ],
)
def test_a_changed_model_starts_with_an_empty_cache(
    folder: Path, tmp_path: Path, prepare: Callable[[Path], None], change: Callable[[Path], None]
) -> None:
    prepare(folder)
    store = tmp_path / "store"
    ask(folder, store)
    assert ask(folder, store).cached_tokens > len(PROMPT)
    change(folder)
    after = ask(folder, store)
    assert after.cached_tokens == 0
    assert after.text == ask(folder, None).text


def test_a_session_of_other_weights_is_not_imported(folder: Path, tmp_path: Path) -> None:
    with LLM(folder) as llm:
        llm.chat([{"role": "user", "content": PROMPT}], max_tokens=2, session_id="a")
        llm.sessions().export_to(tmp_path / "a.session", "a")
    change_weights(folder)
    with LLM(folder) as llm, pytest.raises(SessionRefused, match="other weights"):
        llm.sessions().import_from(tmp_path / "a.session")


def complete(folder: Path, *more: str) -> tuple[str, int]:
    """The answer of a new server for it, and its cached prompt tokens."""
    server = ServerProcess(str(folder), "--name", "padded", *more)
    try:
        server.wait_ready()
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = (
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            .raise_for_status()
            .json()
        )
        assert server.stop() == 0, server.log()
    finally:
        server.process.kill()
        server.process.wait()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow  # four servers, and 600 MB hashed twice
def test_a_change_deep_inside_a_large_weight_file_is_detected(tmp_path: Path) -> None:
    """In a file of 600 MB, whose weights lie between the places that a sample every few megabytes
    reads.
    """
    file = write_padded(tmp_path / "model", before_bytes=3 << 20, behind_bytes=600_000_000)
    store = ("--store", str(tmp_path / "store"))
    first, _ = complete(file.parent, *store)
    assert complete(file.parent, *store) == (first, len(PROMPT) - 1)
    spoil_weights(file)
    clean, _ = complete(file.parent, "--store", "off")
    assert clean != first
    assert complete(file.parent, *store) == (clean, 0)

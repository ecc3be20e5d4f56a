"""A model folder's text bundle is read completely or refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from holdfast.errors import ModelLoadError, UnknownModel, WorkerUnavailable
from holdfast.front.prompt.tokenizer_bundle import Bundles, TokenizerBundle, load_tokenizer_bundle
from tests.fakes import toy_tokenizers
from tests.fakes.family_templates import FAMILY_TEMPLATES, tokenizer_for


def test_everything_the_front_needs_is_read(tmp_path: Path) -> None:
    toy_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": "{{ eos_token }}"})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.9}))
    bundle = load_tokenizer_bundle(tmp_path)
    assert bundle.generation_defaults == {"top_p": 0.9}
    assert bundle.template is not None
    assert bundle.tokenizer.eos_token_ids == (bundle.tokenizer.backend.token_to_id("<|im_end|>"),)


def test_the_catalogs_defaults_override_the_models(tmp_path: Path) -> None:
    toy_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.9, "top_k": 20}))
    bundle = load_tokenizer_bundle(
        tmp_path,
        sampling={"top_p": 0.5, "presence_penalty": 1.0},
        template_arguments={"enable_thinking": False},
    )
    assert bundle.generation_defaults == {"top_p": 0.5, "top_k": 20, "presence_penalty": 1.0}
    assert bundle.template_options == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("template", "token"),
    [
        (
            "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}",
            "<|im_end|>",
        ),
        ("{% for m in messages %}{{ m.content }} <|im_end|>{% endfor %}", "<|im_end|>"),
        (
            "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor "
            "%}<|im_start|>{% endfor %}",
            "<|im_start|>",
        ),
        # known as an end already
        ("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}", ""),
        ("{% for m in messages %}{{ m.content }}\nUser:{% endfor %}", ""),
        ("{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}", ""),
        ("{{ raise_exception('no') }}<|im_end|>", ""),
    ],
)
def test_the_token_after_an_answer_in_the_template_ends_answers(
    tmp_path: Path, template: str, token: str
) -> None:
    toy_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "chat_template": template})
    )
    bundle = load_tokenizer_bundle(tmp_path)
    assert bundle.turn_end_token_ids == (
        (bundle.tokenizer.backend.token_to_id(token),) if token else ()
    )


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    toy_tokenizers.word_pieces().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match="is decoded as"):
        load_tokenizer_bundle(tmp_path)


@pytest.mark.parametrize(
    ("name", "ends"),
    [("gpt_oss", {"<|call|>"}), ("gemma4", {"<turn|>", "<|tool_response>"})],
)
def test_undeclared_call_ends_end_the_answer_too(tmp_path: Path, name: str, ends: set[str]) -> None:
    family = FAMILY_TEMPLATES[name]
    backend = tokenizer_for(family.source).backend
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": family.source})
    )
    bundle = load_tokenizer_bundle(tmp_path)
    assert bundle.dialect.family == family.family
    assert {backend.id_to_token(end) for end in bundle.turn_end_token_ids} == ends


class Shelf:
    """Reads a bundle when told to, and counts."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self._bundle = bundle
        self.reads: list[str] = []
        self.failure: Exception | None = None
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def read(self, model: str) -> TokenizerBundle:
        self.reads.append(model)
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure
        return self._bundle


async def test_concurrent_requests_read_a_bundle_once(bundle: TokenizerBundle) -> None:
    shelf = Shelf(bundle)
    bundles = Bundles(shelf.read)
    found = await asyncio.gather(*(bundles.of("a") for _ in range(9)))
    assert all(each is bundle for each in found)
    assert shelf.reads == ["a"]
    assert bundles.dialects == {"a": bundle.dialect_report}


async def test_a_model_is_awaited_until_its_bundle_is_read(bundle: TokenizerBundle) -> None:
    shelf = Shelf(bundle)
    bundles = Bundles(shelf.read)
    bundles.awaited.add("a")
    shelf.failure = ModelLoadError("no tokenizer")
    with pytest.raises(WorkerUnavailable):
        await bundles.of("a")
    assert bundles.awaited == {"a"}
    shelf.failure = None
    await bundles.of("a")
    assert bundles.awaited == set()


async def test_a_cancelled_waiter_does_not_cancel_the_others(bundle: TokenizerBundle) -> None:
    shelf = Shelf(bundle)
    shelf.may_end.clear()
    bundles = Bundles(shelf.read)
    gone, stays = asyncio.create_task(bundles.of("a")), asyncio.create_task(bundles.of("a"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    shelf.may_end.set()
    assert await stays is bundle


@pytest.mark.parametrize(
    "failure", [ModelLoadError("no tokenizer"), UnknownModel(model="a", available=())]
)
async def test_a_failed_read_is_repeated_for_the_next_request(
    bundle: TokenizerBundle, failure: Exception
) -> None:
    shelf = Shelf(bundle)
    shelf.failure = failure
    bundles = Bundles(shelf.read)
    with pytest.raises(WorkerUnavailable if isinstance(failure, ModelLoadError) else UnknownModel):
        await bundles.of("a")
    shelf.failure = None
    await asyncio.sleep(0)
    assert await bundles.of("a") is bundle


async def test_the_least_recently_used_bundle_is_dropped(bundle: TokenizerBundle) -> None:
    shelf = Shelf(bundle)
    bundles = Bundles(shelf.read, max_kept=2)
    for model in ("a", "b", "a", "c", "a", "b"):
        await bundles.of(model)
    assert shelf.reads == ["a", "b", "c", "b"]
    assert bundles.dialects.keys() == {"a", "b", "c"}


async def test_a_forgotten_bundle_is_reread_and_waiters_keep_the_old(
    bundle: TokenizerBundle,
) -> None:
    shelf = Shelf(bundle)
    bundles = Bundles(shelf.read)
    shelf.may_end.clear()
    waiting = asyncio.create_task(bundles.of("a"))
    await asyncio.sleep(0)
    bundles.forget("a")
    shelf.may_end.set()
    assert await waiting is bundle
    assert await bundles.of("a") is bundle
    assert shelf.reads == ["a", "a"]

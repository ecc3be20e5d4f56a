"""A front with a vision model but without a worker, which records the requests to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette

from holdfast.config import ImagesSettings, LimitsSettings, ServerSettings
from holdfast.front.application import create_application
from holdfast.front.gateway import Gateway
from holdfast.front.images.fetch import AddressTest, is_public
from holdfast.front.images.intake import ImageIntake
from holdfast.front.link.event_stream import WorkerClient
from holdfast.front.prompt.dialects import find_dialect
from holdfast.front.prompt.known_answers import KnownAnswers
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.prompt.tokenizer_bundle import Bundles, TokenizerBundle, frame_of
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.images import VisionInfo, image_keys
from tests.fakes import toy_tokenizers, vision_templates
from tests.fakes.scripted_client import Script, ScriptedClient, answers, model_info
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway, scripted_services

QWEN = VisionInfo(
    template_placeholder="<|image_pad|>", written="<|image_pad|>", placeholder="<|image_pad|>"
)
GEMMA = VisionInfo(
    template_placeholder="<start_of_image>",
    written="\n\n<start_of_image>\n\n",
    placeholder="<start_of_image>",
)
LLAVA = VisionInfo(template_placeholder="<image>", written="<image>", placeholder="<image>")
PIXTRAL = VisionInfo(template_placeholder="[IMG]", written="[IMG]", placeholder="[IMG]")
# writes contents unchanged, so that only texts can be given
STRINGS_ONLY = (
    "{%- for m in messages %}{% if m.content is not string %}{{ raise_exception('text only') }}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES: dict[str, tuple[str, VisionInfo]] = {
    "qwen2_vl": (vision_templates.QWEN2_VL, QWEN),
    "qwen3_vl": (vision_templates.QWEN3_VL, QWEN),
    "gemma3": (vision_templates.GEMMA3, GEMMA),
    "pixtral": (vision_templates.PIXTRAL, PIXTRAL),
    "llava": (vision_templates.LLAVA, LLAVA),
    "strings only": (STRINGS_ONLY, QWEN),
}
_SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> "
    "<start_of_image> <start_of_turn> <end_of_turn> <image> [IMG] [INST] [/INST] </s> <s>"
).split()
CONTEXT_TOKENS = 4000


def seeing_bundle(family: str = "qwen3_vl") -> TokenizerBundle:
    """As loaded from a model's folder, for prompts with images. Without known answers."""
    return replace(_seeing_bundle(family), known_answers=KnownAnswers())


@cache
def _seeing_bundle(family: str) -> TokenizerBundle:
    """Takes a tenth of a second to make."""
    source, _ = FAMILIES[family]
    tokenizer = Tokenizer(
        toy_tokenizers.byte_level(special=_SPECIAL),
        config={"eos_token": "<|im_end|>", "bos_token": "<s>"},
    )
    template = ChatTemplate({"default": source}, special_tokens=tokenizer.special_tokens)
    found = find_dialect(template, tokenizer, config={})
    return TokenizerBundle(
        tokenizer=tokenizer,
        template=found.template,
        answer_frame=frame_of(found.template, tokenizer, found.dialect),
        generation_defaults={},
        dialect=found.dialect,
        dialect_report=found.report,
        thinking_switch=found.switch,
    )


@dataclass(frozen=True, kw_only=True)
class SeeingFront:
    """The application over HTTP, and its worker's requests."""

    app: Starlette
    http: httpx.AsyncClient
    engine: ScriptedClient
    intake: ImageIntake
    bundle: TokenizerBundle

    @property
    def sent(self) -> SequenceRequest:
        """The latest sequence."""
        return self.engine.submitted[-1]

    def shown(self, sequence: SequenceRequest | None = None) -> str:
        """The prompt of a sequence as text, with `{image 0}` where its keys are."""
        sequence = sequence or self.sent
        text = ""
        taken = 0
        names = list(dict.fromkeys(span.layout.image for span in sequence.images))
        for span in sequence.images:
            assert sequence.prompt_token_ids[span.start : span.end] == image_keys(span.layout), (
                "the keys of an image are not at its place"
            )
            before = sequence.prompt_token_ids[taken : span.start]
            text += self.bundle.tokenizer.decode(before, skip_special_tokens=False)
            text += f"{{image {names.index(span.layout.image)}}}"
            taken = span.end
        rest = sequence.prompt_token_ids[taken:]
        assert max(rest, default=0) < 2**31, "a key is outside all images"
        return text + self.bundle.tokenizer.decode(rest, skip_special_tokens=False)


def seeing_front(
    folder: Path,
    *,
    family: str = "qwen3_vl",
    script: Script | None = None,
    settings: ImagesSettings | None = None,
    is_allowed: AddressTest = is_public,
    vision: VisionInfo | None = None,
    server: ServerSettings | None = None,
    bundle: TokenizerBundle | None = None,
    **info: Any,
) -> SeeingFront:
    """A front of a model of this family. folder: of its images."""
    usual = model_info(context_tokens=CONTEXT_TOKENS, vocab_size=1000)
    facts = {"vision": vision or FAMILIES[family][1], "fingerprint": family, **info}
    engine = ScriptedClient(
        script or answers(104, 105), info=msgspec.structs.replace(usual, **facts)
    )
    intake = ImageIntake(folder, settings or ImagesSettings(), is_allowed=is_allowed)
    engine.images = intake.folder.path
    bundle = bundle or seeing_bundle(family)

    @asynccontextmanager
    async def lease_of(model: str, sequences: int) -> AsyncIterator[WorkerClient]:
        yield engine

    async def read(model: str) -> TokenizerBundle:
        return bundle

    gateway = Gateway(lease_of, Bundles(read), LimitsSettings(), images=intake)
    services = replace(scripted_services(ScriptedGateway(), server=server), gateway=gateway)
    app = create_application(services)
    http = httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://127.0.0.1:8321",
    )
    return SeeingFront(app=app, http=http, engine=engine, intake=intake, bundle=bundle)


def chat(*content: Any, **fields: Any) -> dict[str, Any]:
    """The body of a chat request with one message of these parts; texts become text parts."""
    return {"model": MODEL, "messages": [said(*content)], **fields}


def said(*content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    """A message of these parts; texts become text parts."""
    parts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return {"role": role, "content": parts, **fields}

"""A tokenizer bundle made for tests."""

from __future__ import annotations

import pytest

from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle, frame_of
from holdfast.front.toolcalls.dialect import PLAIN
from tests.fakes import toy_tokenizers


@pytest.fixture(scope="session")
def bundle() -> TokenizerBundle:
    """Byte-level, ChatML, no BOS."""
    tokenizer = Tokenizer(toy_tokenizers.byte_level(), config={"eos_token": "<|im_end|>"})
    template = ChatTemplate(
        {"default": toy_tokenizers.CHATML}, special_tokens=tokenizer.special_tokens
    )
    return TokenizerBundle(
        tokenizer=tokenizer,
        template=template,
        answer_frame=frame_of(template, tokenizer, PLAIN),
        generation_defaults={"temperature": 0.6, "top_k": 20},
    )


@pytest.fixture(scope="session")
def base_side() -> TokenizerBundle:
    """A base model: leading BOS, no chat template."""
    tokenizer = Tokenizer(
        toy_tokenizers.llama3(),
        config={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        eos_token_ids=(999,),
    )
    return TokenizerBundle(tokenizer=tokenizer, template=None, generation_defaults={})

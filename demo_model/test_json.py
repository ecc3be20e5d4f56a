"""Checks of the part of the training data whose answers are JSON; as `test_data.py`, which see."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import json_answers
import openings
from conversation import Conversation, render, weighted_parts


def json_talks(count: int) -> list[Conversation]:
    """Conversations whose answers are JSON, or calls that a grammar forces."""
    rng = Random("json")
    return [json_answers.json_talk(rng) for _ in range(count)]


def test_every_answer_of_a_json_talk_is_one_object_that_soon_ends() -> None:
    for conversation in json_talks(400):
        for message in conversation.messages:
            if message["role"] == "assistant" and not message.get("tool_calls"):
                assert isinstance(json.loads(message["content"]), dict)
                assert len(message["content"]) < 700


def test_an_object_fits_the_schema_that_is_told_and_has_its_order_of_keys() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    rng = Random("schemas")
    for _ in range(400):
        members = json_answers.members_of(rng, rng.randint(1, 5))
        schema, value = json_answers.schema_of(members), json_answers.values_of(members)
        jsonschema.validate(value, schema | {"additionalProperties": False})
        assert list(value) == list(schema["properties"])


def test_values_that_are_told_stand_in_the_request() -> None:
    rng = Random("told")
    for _ in range(200):
        request, answer = json_answers.told_exchange(rng)
        assert all(f"{key} {value}" in request for key, value in json.loads(answer).items())


def test_what_a_grammar_forces_is_part_of_the_text_and_not_the_models_own() -> None:
    rng = Random("forced")
    for _ in range(100):
        conversation = json_answers.forced_talk(rng)
        parts = weighted_parts(conversation)
        assert "".join(text for text, _ in parts) == render(conversation)
        given, (answer, own) = parts[-3], parts[-2]
        assert given == (conversation.given, False)
        assert own
        assert answer.endswith("<|im_end|>")
        alone = Conversation(
            conversation.messages, conversation.tools, conversation.enable_thinking
        )
        assert weighted_parts(alone)[-2] == (conversation.given + answer, True)


def test_no_object_of_the_training_is_a_form_kept_for_judging() -> None:
    """Single keys may come up by chance, all keys of a form together do not."""
    pytest.importorskip("mlx")
    ask_forms = pytest.importorskip("ask_forms")
    forms = [set(ask_forms.schema_of(form)["properties"]) for form in ask_forms.FORMS]
    said = {openings.plain(request) for request in ask_forms.REQUESTS[2:]}
    for conversation in json_talks(2000):
        for message in conversation.messages:
            if message["role"] == "user":
                assert openings.plain(message["content"]) not in said
            elif message["content"].startswith("{"):
                assert set(json.loads(message["content"])) not in forms

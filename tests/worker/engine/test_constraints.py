"""Constraints of single sequences: allowed tokens, forced tokens, and replaying both."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from holdfast.errors import InvalidRequest
from holdfast.wire.commands import SequenceRequest, ThinkingBudget
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.constraints import Constraints, SequenceConstraint
from tests.fakes.tiny_grammars import END, SCHEMA, json_grammar, tiny_constraints
from tests.fakes.tiny_models import VOCAB_SIZE

GREETING = 'start: "hi" | "ho"\n'
THOUGHT = 'start: /[a-z]*/ <[261]> "done"\n'


def a_request(grammar: str = "", **more: Any) -> SequenceRequest:
    return SequenceRequest(
        request_id="a",
        prompt_token_ids=TokenIds.of((1,)),
        max_tokens=99,
        sampling=SamplingParams(seed=0),
        grammar=grammar,
        **more,
    )


def constraint(
    grammar: str, *, generated: str = "", of: Constraints | None = None, **more: Any
) -> SequenceConstraint:
    made = (of or tiny_constraints()).for_request(
        a_request(grammar, **more), generated=tuple(generated.encode())
    )
    assert made is not None
    return made


def allowed(of: SequenceConstraint) -> set[int] | None:
    """None: all."""
    words = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    if not of.fill(words):
        return None
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_only_continuations_of_the_grammar_may_be_drawn() -> None:
    greeting = constraint(GREETING)
    assert allowed(greeting) == {ord("h")}
    greeting.add(ord("h"))
    assert allowed(greeting) == {ord("i"), ord("o")}
    greeting.add(ord("o"))
    assert allowed(greeting) == {END}
    for _ in range(3):  # of a request that continues beyond its end
        greeting.add(END)
        assert allowed(greeting) == {END}


def test_a_request_without_grammar_and_budget_is_unconstrained() -> None:
    assert tiny_constraints().for_request(a_request()) is None


def test_replaying_generated_tokens_restores_the_state() -> None:
    text = json.dumps(
        {"kind": "dog", "age": 12, "name": "rex", "tame": True}, separators=(",", ":")
    )
    undisturbed = constraint(json_grammar(SCHEMA))
    for at, character in enumerate(text):
        assert allowed(constraint(json_grammar(SCHEMA), generated=text[:at])) == allowed(
            undisturbed
        )
        undisturbed.add(ord(character))
    assert allowed(undisturbed) == {END}


def test_two_sequences_with_one_grammar_are_independent() -> None:
    constraints = tiny_constraints()
    first, second = constraint(GREETING, of=constraints), constraint(GREETING, of=constraints)
    first.add(ord("h"))
    assert allowed(second) == {ord("h")}
    assert allowed(constraint(GREETING, of=constraints)) == {ord("h")}


@pytest.mark.parametrize("grammar", ["nonsense (", '{"a": 3}', "start: missing\n"])
def test_an_invalid_grammar_is_refused_in_one_line(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="the grammar cannot be used") as caught:
        constraint(grammar)
    assert "\n" not in str(caught.value)
    assert caught.value.field == "grammar"


def test_generated_tokens_that_violate_the_grammar_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="does not allow token"):
        constraint(GREETING, generated="ha")


def test_a_model_without_grammars_refuses_them_but_accepts_budgets() -> None:
    constraints = Constraints(None, vocab_size=VOCAB_SIZE)
    with pytest.raises(InvalidRequest, match="does not support grammars"):
        constraint(GREETING, of=constraints)
    assert (
        constraint(
            "", of=constraints, thinking_budget=ThinkingBudget(tokens=0, end_token_ids=(5,))
        ).forced_token()
        == 5
    )


def test_a_forbidden_token_ends_the_constraint_with_a_reason() -> None:
    greeting = constraint(GREETING)
    greeting.add(ord("x"))
    assert allowed(greeting) is None
    assert "does not allow token 120" in greeting.failure


def test_the_grammar_accepts_a_forced_end_of_thought() -> None:
    thought = constraint(THOUGHT, thinking_budget=ThinkingBudget(tokens=2, end_token_ids=(261,)))
    for character in b"ab":
        assert thought.forced_token() is None
        thought.add(character)
    assert thought.forced_token() == 261
    thought.add(261)
    assert thought.forced_token() is None
    assert allowed(thought) == {ord("d")}


def test_the_grammar_overrides_a_forced_end_of_thought() -> None:
    greeting = constraint(GREETING, thinking_budget=ThinkingBudget(tokens=0, end_token_ids=(261,)))
    assert greeting.forced_token() is None
    assert allowed(greeting) == {ord("h")}


def test_masks_are_counted() -> None:
    constraints = tiny_constraints()
    greeting = constraint(GREETING, of=constraints)
    allowed(greeting), allowed(greeting)
    assert (constraints.figures.sequences, constraints.figures.masks) == (1, 2)
    assert constraints.figures.mask_seconds > 0

"""Answers of random weights at temperature 1, constrained by the schemas of agents and others: all
are valid and end on their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.library.llm import LLM
from tests.fakes.rambling_model import ask, fault_of, write_rambling
from tests.fakes.schemas import AGENTS, OWN

pytestmark = pytest.mark.slow

SCHEMAS = {**AGENTS, **OWN}
SEEDS = range(5)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_rambling(tmp_path_factory.mktemp("rambling"))) as llm:
        yield llm


@pytest.mark.parametrize("seed", SEEDS)
def test_every_answer_fits_its_schema_without_affecting_others(llm: LLM, seed: int) -> None:
    alone = llm.generate("Once upon", temperature=1, seed=seed, max_tokens=400, ignore_eos=True)
    streams = {name: ask(llm, schema, seed=seed) for name, schema in SCHEMAS.items()}
    beside = llm.generate("Once upon", temperature=1, seed=seed, max_tokens=400, ignore_eos=True)
    answers = {name: stream.read_all() for name, stream in streams.items()}
    assert beside.token_ids == alone.token_ids
    faults = {
        name: fault
        for name, answer in answers.items()
        if (fault := fault_of(answer, SCHEMAS[name]))
    }
    assert faults == {}
    assert len(answers) >= 60

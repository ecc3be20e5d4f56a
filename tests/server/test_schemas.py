"""Answers of random weights constrained by schemas, through the whole library: they are valid and
end on their own.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.library.llm import LLM
from tests.fakes.rambling_model import ask, fault_of, write_rambling
from tests.fakes.schemas import AGENTS, OWN


def test_constrained_answers_are_valid_and_do_not_affect_others(tmp_path: Path) -> None:
    schemas = [OWN["one of kinds"], OWN["tree"], AGENTS["vercel response"]]
    with LLM(write_rambling(tmp_path)) as llm:
        alone = llm.generate("Once upon", temperature=1, seed=1, max_tokens=30, ignore_eos=True)
        streams = [ask(llm, schema, seed=1) for schema in schemas]
        beside = llm.generate("Once upon", temperature=1, seed=1, max_tokens=30, ignore_eos=True)
        answers = [stream.read_all() for stream in streams]
    assert [fault_of(answer, schema) for answer, schema in zip(answers, schemas, strict=True)] == [
        "",
        "",
        "",
    ]
    assert beside.token_ids == alone.token_ids

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.models.sentence_modules import AnswerTokens, OwnPooling, answer_tokens, own_pooling


def module(path: str, kind: str) -> dict[str, Any]:
    """An entry of modules.json with the fields that Holdfast reads."""
    return {"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.{kind}"}


TRANSFORMER = module("", "models.Transformer")
POOLING = module("1_Pooling", "models.Pooling")
NORMALIZE = module("2_Normalize", "models.Normalize")
DENSE = module("2_Dense", "models.Dense")
LOGIT = module("1_LogitScore", "cross_encoder.modules.LogitScore")
VOCABULARY = {"yes": 11, "no": 12}


def written(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        path = folder / (name.replace("__", "/") + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"embedding_dimension": 4, "pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({}, None),
        ([1], None),
        ("{broken", None),
    ],
    ids=str,
)
def test_the_folder_determines_the_pooling(
    tmp_path: Path, config: Any, expected: str | None
) -> None:
    alone = written(tmp_path, **{"1_Pooling__config": config})
    assert own_pooling(alone) == OwnPooling(pooling=expected)  # type: ignore[arg-type]
    assert (
        own_pooling(written(tmp_path, modules=[TRANSFORMER, POOLING, NORMALIZE])).pooling
        == expected
    )


@pytest.mark.parametrize(
    ("modules", "config", "said"),
    [
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode_mean_tokens": True}, "Dense"),
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, "cls_token"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            "max_tokens",
        ),
    ],
    ids=str,
)
def test_unsupported_vectors_are_reported(
    tmp_path: Path, modules: Any, config: Any, said: str
) -> None:
    found = own_pooling(written(tmp_path, modules=modules, **{"1_Pooling__config": config}))
    assert found.pooling is None
    assert said in found.unserved


def test_a_folder_without_such_files_gives_nothing(tmp_path: Path) -> None:
    assert own_pooling(tmp_path) == OwnPooling()
    assert answer_tokens(tmp_path, token_id=VOCABULARY.get) is None


LOGIT_MODULES: dict[str, Any] = {"modules": [TRANSFORMER, LOGIT]}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {**LOGIT_MODULES, "1_LogitScore__config": {"true_token_id": 5, "false_token_id": 6}},
            AnswerTokens(yes=5, no=6),
        ),
        (
            {**LOGIT_MODULES, "1_LogitScore__config": {"true_token_id": 5}},
            AnswerTokens(yes=5, no=None),
        ),
        (LOGIT_MODULES, None),
        ({"config": {"classifier_from_token": ["no", "yes"]}}, AnswerTokens(yes=11, no=12)),
        ({"config": {"classifier_from_token": ["no", "maybe"]}}, None),
        ({"config": {"model_type": "qwen3"}}, None),
    ],
    ids=str,
)
def test_a_reranker_is_recognized_by_its_files(
    tmp_path: Path, files: dict[str, Any], expected: AnswerTokens | None
) -> None:
    assert answer_tokens(written(tmp_path, **files), token_id=VOCABULARY.get) == expected

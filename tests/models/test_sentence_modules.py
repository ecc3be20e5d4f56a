from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.models.sentence_modules import AnswerTokens, OwnPooling, answer_tokens, own_pooling

TRANSFORMER = {
    "idx": 0,
    "name": "0",
    "path": "",
    "type": "sentence_transformers.models.Transformer",
}
POOLING = {
    "idx": 1,
    "name": "1",
    "path": "1_Pooling",
    "type": "sentence_transformers.models.Pooling",
}
NORMALIZE = {
    "idx": 2,
    "name": "2",
    "path": "2_Normalize",
    "type": "sentence_transformers.models.Normalize",
}
DENSE = {"idx": 3, "name": "3", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
IDS = {"true_token_id": 5, "false_token_id": 6}
LOGIT = {
    "idx": 1,
    "name": "1",
    "path": "1_LogitScore",
    "type": "sentence_transformers.cross_encoder.modules.LogitScore",
}
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
        (
            {
                "pooling_mode_mean_tokens": True,
                "pooling_mode_cls_token": False,
                "word_embedding_dimension": 4,
            },
            "mean",
        ),
        (
            {
                "pooling_mode_mean_tokens": False,
                "pooling_mode_lasttoken": True,
                "include_prompt": True,
            },
            "last",
        ),
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


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "modules": [TRANSFORMER, LOGIT],
                "1_LogitScore__config": {"true_token_id": 5, "false_token_id": 6},
            },
            AnswerTokens(yes=5, no=6),
        ),
        (
            {"modules": [TRANSFORMER, LOGIT], "1_LogitScore__config": {"true_token_id": 5}},
            AnswerTokens(yes=5, no=None),
        ),
        ({"modules": [TRANSFORMER, LOGIT]}, None),
        (
            {"config": {"model_type": "qwen3", "classifier_from_token": ["no", "yes"]}},
            AnswerTokens(yes=11, no=12),
        ),
        ({"config": {"model_type": "qwen3", "classifier_from_token": ["no", "maybe"]}}, None),
        ({"config": {"model_type": "qwen3"}}, None),
    ],
    ids=str,
)
def test_a_reranker_is_recognized_by_its_files(
    tmp_path: Path, files: dict[str, Any], expected: AnswerTokens | None
) -> None:
    assert answer_tokens(written(tmp_path, **files), token_id=VOCABULARY.get) == expected

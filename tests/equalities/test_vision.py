"""The equalities for prompts with images: a worker answers like mlx-vlm in one pass over the same
conversation alone, and cached features of images are not computed again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from holdfast.wire.commands import Command, SequenceRequest
from holdfast.wire.events import Finished, FinishReason
from holdfast.wire.requests import TokenIds
from tests.fakes.caching_worker import make_blocks_small, one_after_the_other
from tests.fakes.inline_images import InlineImages
from tests.fakes.pictures import image_file
from tests.fakes.script_inbox import ScriptInbox, cancel
from tests.fakes.vision_models import FAMILIES
from tests.fakes.vision_oracle import Message, OracleAnswer, assistant, user
from tests.fakes.vision_worker import (
    FEATURES,
    TOLERANCE,
    VisionBeside,
    differences,
    prompt_error,
    tower_runs,
)

TOKENS = 4


def families(*daily: str) -> pytest.MarkDecorator:
    """Run a test with all families, in the daily tests only with these."""
    return pytest.mark.parametrize(
        "vision",
        [
            pytest.param(name, marks=[] if name in daily else pytest.mark.slow)
            for name in FAMILIES
            if name != "llava_next"
        ],
        indirect=True,
        scope="module",
    )


# Each has a special feature: positions in three dimensions with features of several layers; windows
# and text around images; recurrent states.
each_feature = families("qwen3_vl", "gemma3", "qwen3_5")

SQUARE = image_file(32, 32, seed=1)
SAME_SIZE = image_file(32, 32, seed=2)
WIDE = image_file(60, 24, seed=3)
TINY = image_file(1, 1, seed=4)

FIRST = [user("Look: ", SQUARE, " What is it?")]
SECOND = [*FIRST, assistant("A shape."), user("And here", WIDE, "?")]
THIRD = [*SECOND, assistant("Another one."), user("Which of them is larger?")]
CONVERSATIONS: dict[str, list[Message]] = {
    "text": [user("Good morning.")],
    "an image": FIRST,
    "an image of the same size": [user("Look: ", SAME_SIZE, " What is it?")],
    "an image first": [user(WIDE, "What is it?")],
    "two images": [user("The first ", SQUARE, " and the second ", WIDE, " differ.")],
    "an image twice": [user(WIDE, WIDE, "Are they the same?")],
    "a tiny image": [user("What is ", TINY, "?")],
    "an image in the second turn": SECOND,
    "three turns": THIRD,
    "text before images": [user("Hello."), assistant("Hello."), user("See", WIDE, SAME_SIZE)],
}


@dataclass(frozen=True)
class Vision:
    """A model of a family in workers, and mlx-vlm's answers to the conversations."""

    beside: VisionBeside
    expected: Callable[[str], OracleAnswer]

    def requests(self, *names: str) -> list[SequenceRequest]:
        return [self.beside.request(name, CONVERSATIONS[name], max_tokens=TOKENS) for name in names]

    def wrong(self, inbox: ScriptInbox, names: Sequence[str]) -> dict[str, str]:
        """What differs from the expected answers, by conversation."""
        found = {name: differences(inbox, name, self.expected(name)) for name in names}
        return {name: difference for name, difference in found.items() if difference}


@pytest.fixture(scope="module")
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vision:
    beside = VisionBeside.load(request.param, tmp_path_factory.mktemp("vision"))
    return Vision(
        beside, cache(lambda name: beside.oracle.answer(CONVERSATIONS[name], tokens=TOKENS))
    )


@pytest.mark.slow
@families()
def test_the_expected_answers_are_mlx_vlms_own(vision: Vision) -> None:
    for name, messages in CONVERSATIONS.items():
        if vision.beside.loaded.model_type == "llava" and name != "text":
            continue  # fails in mlx-vlm 0.7.10: its image processor refuses the tokenizer's arguments
        assert (
            vision.beside.oracle.generated(messages, tokens=TOKENS)
            == vision.expected(name).token_ids
        ), name


@each_feature
def test_images_and_texts_affect_the_expected_answers(vision: Vision) -> None:
    other_text = vision.beside.oracle.answer([user("Look: ", SQUARE, " What is in?")])
    for other in (vision.expected("an image of the same size"), other_text):
        assert np.abs(other.logits[0] - vision.expected("an image").logits[0]).max() > 0.02


@each_feature
def test_prompts_have_the_same_tokens_as_in_mlx_vlm(vision: Vision) -> None:
    for request in vision.requests(*CONVERSATIONS):
        ids = list(request.prompt_token_ids)
        for span in request.images:
            ids[span.start : span.end] = span.layout.token_ids
        assert tuple(ids) == vision.expected(request.request_id).prompt_token_ids, (
            request.request_id
        )


@each_feature
def test_each_conversation_alone_equals_mlx_vlm(vision: Vision) -> None:
    found = {}
    for request in vision.requests(*CONVERSATIONS):
        name = request.request_id
        found |= vision.wrong(vision.beside.worker().serve([[request]]), [name])
    assert not found


@each_feature
@pytest.mark.parametrize("step_tokens", [24, pytest.param(400, marks=pytest.mark.slow)])
def test_concurrent_answers_equal_each_alone(vision: Vision, step_tokens: int) -> None:
    inbox = vision.beside.worker(step_tokens=step_tokens, max_running=8).serve(
        [vision.requests(*CONVERSATIONS)]
    )
    assert not vision.wrong(inbox, [*CONVERSATIONS])


TURNS = ["an image", "an image in the second turn", "three turns"]


@families("gemma3", "qwen3_5")
def test_later_turns_prefill_no_image_again(vision: Vision) -> None:
    worker = vision.beside.worker()
    turns = vision.requests(*TURNS)
    inbox = worker.serve(one_after_the_other(*turns))
    assert not vision.wrong(inbox, TURNS)
    cached = [inbox.finished(name).cached_tokens for name in TURNS]
    assert cached[1] >= turns[0].images[0].end
    assert cached[2] >= turns[1].images[1].end
    assert tower_runs(worker) == 2


@families("qwen3_vl", "qwen3_5")
def test_after_a_restart_no_image_is_computed_again(vision: Vision, tmp_path: Path) -> None:
    first, second, third = vision.requests(*TURNS)
    before = vision.beside.worker(tmp_path)
    assert not vision.wrong(before.serve([[second]]), [second.request_id])
    assert tower_runs(before) == 2
    after = vision.beside.worker(tmp_path)
    inbox = after.serve(one_after_the_other(third, first))
    assert not vision.wrong(inbox, [third.request_id, first.request_id])
    assert inbox.finished(third.request_id).cached_tokens >= second.images[1].end
    assert tower_runs(after) == 0


@families("pixtral")
def test_features_survive_a_restart_for_prompts_with_other_beginnings(
    vision: Vision, tmp_path: Path
) -> None:
    names = ["an image first", "two images"]
    first, second = vision.requests(*names)
    assert not vision.wrong(vision.beside.worker(tmp_path).serve([[first]]), names[:1])
    after = vision.beside.worker(tmp_path)
    assert not vision.wrong(after.serve([[second]]), names[1:])
    assert tower_runs(after) == 1  # of the image that was not in the first prompt


@families("qwen3_vl")
def test_another_image_of_the_same_size_is_a_miss(vision: Vision) -> None:
    names = ["an image", "an image of the same size"]
    first, second = vision.requests(*names)
    inbox = vision.beside.worker().serve(one_after_the_other(first, second))
    assert not vision.wrong(inbox, names)
    assert inbox.finished(names[1]).cached_tokens <= second.images[0].start


@families("gemma3")
def test_two_agents_with_the_same_image_share_it(vision: Vision) -> None:
    worker = vision.beside.worker()
    messages = [user("Look: ", SQUARE, " How large?")]
    one = vision.beside.request("one", FIRST)
    other = vision.beside.request("other", messages, max_tokens=TOKENS)
    inbox = worker.serve(one_after_the_other(one, other))
    assert not differences(inbox, "other", vision.beside.oracle.answer(messages, tokens=TOKENS))
    assert inbox.finished("other").cached_tokens >= one.images[0].end
    assert tower_runs(worker) == 1


@families("qwen3_vl")
def test_preempted_prompts_with_images_are_answered_as_alone(vision: Vision) -> None:
    names = ["an image", "an image first", "two images"]
    together = vision.requests(*names)
    most = max(len(request.prompt_token_ids) for request in together)
    worker = vision.beside.worker(budget_tokens=most + 2 * TOKENS + 8)
    assert not vision.wrong(worker.serve([together]), names)


@families("qwen3_vl", "qwen3_5")
def test_predictions_change_no_answer(vision: Vision) -> None:
    names = ["an image", "two images", "three turns"]
    together = []
    for request in vision.requests(*names):
        right = vision.expected(request.request_id).token_ids
        predicted = (*right[:2], right[2] ^ 1, *right[3:])
        together.append(replace(request, predicted_token_ids=TokenIds.of(predicted)))
    inbox = vision.beside.worker(speculates=True).serve([together])
    assert not vision.wrong(inbox, names)


@families("qwen3_vl", "pixtral")
def test_prompts_with_images_are_scored_as_by_mlx_vlm(vision: Vision) -> None:
    names = ["text", "an image", "two images"]
    scored = [replace(each, want_prompt_logprobs=True) for each in vision.requests(*names)]
    inbox = vision.beside.worker(step_tokens=24).serve([scored])
    assert not vision.wrong(inbox, names)
    for name in names:
        assert prompt_error(inbox, name, vision.expected(name)) < TOLERANCE


@families("qwen3_vl", "gemma3")
def test_image_tokens_generated_by_a_model_are_text(vision: Vision) -> None:
    """As in a worker that continues the answer of an earlier one."""
    image_tokens = set(vision.beside.request("a", FIRST).images[0].layout.token_ids)
    said = (65, *image_tokens, 66)
    request = replace(
        vision.beside.request("a", FIRST, max_tokens=len(said) + TOKENS),
        generated_token_ids=TokenIds.of(said),
    )
    inbox = vision.beside.worker().serve([[request]])
    assert not differences(inbox, "a", vision.beside.oracle.answer(FIRST, tokens=TOKENS, said=said))


@families("qwen3_vl", "qwen3_5")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_arriving_and_leaving_conversations_are_answered_as_alone(
    vision: Vision,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In two lives of a worker with small blocks, with overlapping requests, some of which are
    cancelled.
    """
    make_blocks_small(monkeypatch)
    rng = random.Random(seed)
    for life in range(2):
        script: list[list[Command]] = []
        names = {}
        for number in range(8):
            name = rng.choice([*CONVERSATIONS])
            names[f"{life} {number}"] = name
            request = vision.beside.request(
                f"{life} {number}", CONVERSATIONS[name], max_tokens=TOKENS
            )
            script += [[request], *[[]] * rng.randint(0, 4)]
            if rng.random() < 0.2:
                script.append([cancel(request.request_id)])
        worker = vision.beside.worker(tmp_path, step_tokens=rng.choice([16, 40]), budget_tokens=900)
        inbox = worker.serve(script)
        for request_id, name in names.items():
            if inbox.finished(request_id).reason is not FinishReason.CANCELLED:
                assert not differences(inbox, request_id, vision.expected(name)), (request_id, name)


@families("qwen3_vl")
def test_damaged_features_are_computed_again(vision: Vision, tmp_path: Path) -> None:
    first, second = vision.requests("an image", "two images")
    vision.beside.worker(tmp_path).serve([[first]])
    for file in (tmp_path / FEATURES).iterdir():
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    after = vision.beside.worker(tmp_path)
    other_tenant = replace(second, tenant="other")  # so that no image is prefilled yet
    assert not vision.wrong(after.serve([[other_tenant]]), ["two images"])
    assert tower_runs(after) == 2


@families("pixtral")
def test_a_request_with_a_lost_image_ends_alone(vision: Vision) -> None:
    gone = vision.beside.request("gone", [user(image_file(20, 20, seed=99), "What was it?")])
    (vision.beside.images / gone.images[0].layout.image).unlink()
    inbox = vision.beside.worker().serve([[gone, *vision.requests("an image", "text")]])
    assert inbox.finished("gone").reason is FinishReason.FAILED
    assert "missing" in inbox.finished("gone").error
    assert not vision.wrong(inbox, ["an image", "text"])


@families("qwen3_vl")
def test_text_generation_continues_while_an_image_is_processed(vision: Vision) -> None:
    image, text = vision.requests("an image", "text")
    worker = vision.beside.worker()
    assert worker.engine.images is not None
    reader = worker.engine.images._reader
    assert isinstance(reader, InlineImages)
    reader.delays[0] = 3 * TOKENS
    inbox = worker.serve([[image, text]])
    assert not vision.wrong(inbox, ["an image", "text"])
    ended = [event.request_id for event in inbox.events if isinstance(event, Finished)]
    assert ended == ["text", "an image"]

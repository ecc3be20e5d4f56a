"""Later turns of a conversation that began with an image, beside one that began with as much text.

Each trial has a conversation of its own: the first turn is read before anything is measured, then
turn after turn adds a few words.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence

from holdfast_bench.load import Ask, Message
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial, errors_of

_PIXELS = 448
_IMAGE_TOKENS = 256
_WORDS = 8
_KINDS = {"an image": True, "text": False}


def _cases(scale: Scale) -> Sequence[Case]:
    turns = {"quick": 3, "normal": 8, "full": 12}[scale]
    return [
        Case(name=name, settings={"has_image": has_image, "turns": turns})
        for name, has_image in _KINDS.items()
    ]


def _picture(seed: str) -> str:
    """A data URL of a picture that no other seed gives."""
    from PIL import Image  # not at the top: other scenarios do not need it

    pixels = random.Random(seed).randbytes(_PIXELS * _PIXELS * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (_PIXELS, _PIXELS), pixels).save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _first_message(trial: Trial) -> Message:
    words: Message = {"type": "text", "text": trial.text(_WORDS, "question")}
    if not trial.settings["has_image"]:
        start: Message = {"type": "text", "text": trial.text(_IMAGE_TOKENS, "instead of an image")}
    else:
        start = {"type": "image_url", "image_url": {"url": _picture(trial.seed)}}
    return {"role": "user", "content": [start, words]}


async def _measure(trial: Trial) -> Sample:
    client = await trial.client()
    messages = [_first_message(trial)]
    answers = [await client.ask(Ask(messages=tuple(messages), max_tokens=1))]
    for number in range(trial.settings["turns"]):
        if not answers[-1].is_good:
            break
        messages += [
            {"role": "assistant", "content": answers[-1].text},
            {"role": "user", "content": trial.text(_WORDS, f"turn {number}")},
        ]
        answers.append(await client.ask(Ask(messages=tuple(messages), max_tokens=1)))
    sample = Sample(errors=errors_of(answers), answers=[answer.text for answer in answers])
    if sample.errors:
        return sample
    first, *later = answers
    sample.metrics = {
        "first_turn_seconds": [first.seconds],
        "request_seconds": [answer.seconds for answer in later],
        "prompt_tokens": [float(answer.prompt_tokens) for answer in later],
        "cached_share": [answer.cached_tokens / answer.prompt_tokens for answer in later],
    }
    return sample


SCENARIO = Scenario(
    name="images",
    summary="later turns about an image, beside those about as much text",
    model="qwen2_5_vl-30m",
    cases=_cases,
    measure=_measure,
    peers=("mlx_vlm",),
)

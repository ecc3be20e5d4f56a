"""Images in prompts: their positions among the tokens; no text becomes an image."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import LimitsSettings
from holdfast.errors import InvalidRequest, WorkerUnavailable
from holdfast.front.images.folder import ImageFolder
from holdfast.front.images.intake import PromptWithImages
from holdfast.front.images.sources import UNREADABLE_NOTE
from holdfast.front.output import TextDelta
from holdfast.front.prompt.images import (
    ImageLayouts,
    content_parts,
    image_mark,
    images_of,
    joined,
    pieces,
    with_marks,
    without_images,
)
from holdfast.front.prompt.known_answers import meaning
from holdfast.front.prompt.next_turn import read_ahead_request
from holdfast.front.prompt.prepare import Prepared, prepare
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.request import ChatPrompt, GenerationRequest
from holdfast.wire.images import FIRST_IMAGE_KEY, ImageAnswer, ImageLayout, VisionInfo, image_keys
from holdfast.wire.requests import TokenIds
from tests.fakes.scripted_client import model_info
from tests.fakes.seeing import FAMILIES, seeing_bundle

NAMES = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]
LAYOUTS = {
    name: ImageLayout(image=name, token_ids=TokenIds.of([900] * (5 + place)))
    for place, name in enumerate(NAMES)
}
CAT, DOG = NAMES[:2]


def image(name: str) -> dict[str, Any]:
    return {"type": "image", "image": name}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def seen(
    *messages: dict[str, Any], family: str = "qwen3_vl", bundle: TokenizerBundle | None = None
) -> Prepared:
    vision = FAMILIES[family][1]
    bundle = bundle or seeing_bundle(family).with_vision(vision)
    info = model_info(context_tokens=4000, vocab_size=1000)
    request = GenerationRequest(request_id="r", model="m", prompt=ChatPrompt(messages=messages))
    return prepare(request, bundle, info=info, limits=LimitsSettings(), layouts=LAYOUTS)


def spans(prepared: Prepared) -> list[str]:
    """The images' names, whose keys are at their positions and nowhere else."""
    (sequence,) = prepared.sequences
    inside = set()
    for span in sequence.images:
        assert sequence.prompt_token_ids[span.start : span.end] == image_keys(span.layout)
        inside |= {*range(span.start, span.end)}
    keys = {at for at, each in enumerate(sequence.prompt_token_ids) if each >= FIRST_IMAGE_KEY}
    assert keys == inside
    return [span.layout.image for span in sequence.images]


HOSTILE = [
    "<|image_pad|>",
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<start_of_image>",
    "\n\n<start_of_image>\n\n",
    "<image>",
    "[IMG]",
    "<<|image_pad|>|image_pad|>",
    "[I[IMG]MG]",
    "\ufdd6" + CAT + "\ufdd7",
    CAT,
    "{image 0}",
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_an_image(family: str, text: str) -> None:
    call = {"id": "c12345678", "type": "function"}
    for messages in (
        [user(f"a {text} b", image(CAT), text)],
        [
            {"role": "user", "content": text},
            {"role": "assistant", "content": text},
            user(image(CAT)),
        ],
        [
            {"role": "user", "content": text},
            {
                "role": "assistant",
                "content": text,
                "reasoning_content": text,
                "tool_calls": [
                    {**call, "function": {"name": "f", "arguments": {"key": text, text: 1}}}
                ],
            },
            {"role": "tool", "tool_call_id": call["id"], "content": [text, image(CAT), text]},
        ],
        [{"role": "system", "content": text}, user(text, image(CAT))],
    ):
        assert spans(seen(*messages, family=family)) == [CAT]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_looks_like_an_image_is_still_readable(family: str) -> None:
    bundle = seeing_bundle(family).with_vision(FAMILIES[family][1])
    placeholder = FAMILIES[family][1].placeholder
    (sequence,) = seen(user(f"Explain {placeholder} to me"), bundle=bundle).sequences
    text = bundle.tokenizer.decode(sequence.prompt_token_ids, skip_special_tokens=False)
    assert f"Explain {placeholder} to me" in text
    assert sequence.images == ()
    image_token = bundle.tokenizer.backend.token_to_id(placeholder)
    assert image_token not in sequence.prompt_token_ids


def test_escapes_in_call_arguments_become_no_image() -> None:
    arguments = '{"key": "\\u003c|image_pad|\\u003e"}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [user("x"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": [image(CAT)]})
    assert spans(seen(*messages)) == [CAT]


def test_ordinary_placeholder_texts_are_split_too() -> None:
    vision = VisionInfo(template_placeholder="<pic>", written="[IMG]", placeholder="[IMG]")
    parts = "{% for p in m.content %}{{ p.text or '<pic>' }}{% endfor %}"
    template = f"{{% for m in messages %}}{parts}{{% endfor %}}"
    bundle = seeing_bundle()
    bundle = TokenizerBundle(
        tokenizer=bundle.tokenizer,
        template=ChatTemplate({"default": template}, special_tokens={}),
        generation_defaults={},
    ).with_vision(vision)
    prepared = seen(user("a <pic> b", image(DOG), "<pic>[IMG]"), bundle=bundle)
    assert spans(prepared) == [DOG]


def test_a_template_that_omits_an_image_is_reported() -> None:
    parts = "{% for p in m.content %}{{ p.text or '[IMG]' }}{% endfor %}"
    template = f"{{% for m in messages %}}{{% if loop.last %}}{parts}{{% endif %}}{{% endfor %}}"
    bundle = TokenizerBundle(
        tokenizer=seeing_bundle().tokenizer,
        template=ChatTemplate({"default": template}, special_tokens={}),
        generation_defaults={},
    ).with_vision(FAMILIES["pixtral"][1])
    assert spans(seen(user("a", image(DOG)), bundle=bundle)) == [DOG]
    with pytest.raises(InvalidRequest, match="leaves out an image"):
        seen(user(image(CAT), "b"), user("a", image(DOG)), bundle=bundle)


def test_reordered_results_keep_their_images() -> None:
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("first", "second")
    ]
    prepared = seen(
        user("look"),
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "second", "content": ["2", image(DOG)]},
        {"role": "tool", "tool_call_id": "first", "content": ["1", image(CAT)]},
    )
    assert spans(prepared) == [CAT, DOG]


def test_images_do_not_change_the_tokens_around_them() -> None:
    """The tokens around an image are those of the text alone."""
    bundle = seeing_bundle().with_vision(FAMILIES["qwen3_vl"][1])
    (sequence,) = seen(user("hello world", image(CAT), "the end"), bundle=bundle).sequences
    (span,) = sequence.images
    around = TokenIds.joined(
        (sequence.prompt_token_ids[: span.start], sequence.prompt_token_ids[span.end :])
    )
    text = bundle.tokenizer.decode(around, skip_special_tokens=False)
    start, _, end = text.partition("<|vision_start|>")
    expected = bundle.tokenizer.encode(f"{start}<|vision_start|>", add_special_tokens=False)
    expected += bundle.tokenizer.encode(end, add_special_tokens=False)
    assert list(around) == expected


CONTENT = st.lists(
    st.one_of(
        st.text(alphabet="ab \n<|[]", max_size=12),
        st.sampled_from(HOSTILE[:8]),
        st.sampled_from([image(name) for name in NAMES]),
    ),
    min_size=1,
    max_size=5,
)


@given(st.lists(CONTENT, min_size=1, max_size=3), st.booleans())
def test_images_and_restored_answers_keep_their_positions(
    turns: list[list[Any]], is_known: bool
) -> None:
    bundle = seeing_bundle().with_vision(FAMILIES["qwen3_vl"][1])
    messages: list[dict[str, Any]] = []
    for place, content in enumerate(turns):
        messages.append(user(*content))
        messages.append({"role": "assistant", "content": f"answer {place}"})
        if is_known:  # generated with other tokens than the tokenizer's
            tokens = [*bundle.tokenizer.encode(f"answer {place}", add_special_tokens=False)]
            spelled = [
                each
                for character in f"answer {place}"
                for each in bundle.tokenizer.encode(character, add_special_tokens=False)
            ]
            bundle.known_answers.add(meaning("", f"answer {place}", ()), spelled or tokens)
    messages.append(user("last", image(DOG)))
    prepared = seen(*messages, bundle=bundle)
    wanted = [each["image"] for content in turns for each in content if isinstance(each, dict)]
    assert spans(prepared) == [*wanted, DOG]
    if is_known:
        assert prepared.put_back_tokens == sum(
            len(f"answer {place}") for place in range(len(turns))
        )


def test_the_next_turn_is_prefilled_with_its_images() -> None:
    bundle = seeing_bundle().with_vision(FAMILIES["qwen3_vl"][1])
    messages = (user("x" * 100, image(CAT), image(DOG)),)
    prompt = ChatPrompt(messages=messages)
    request = GenerationRequest(request_id="r", model="m", prompt=prompt)
    prepared = seen(*messages, bundle=bundle)
    # an answer rewritten by the template: the generated tokens are no longer known
    delta = TextDelta(index=0, text="y" * 200, token_ids=(1,))
    ahead = read_ahead_request(
        request, prompt, bundle, prepared=prepared, deltas=[delta], context_tokens=4000
    )
    assert ahead is not None
    assert ahead.images == prepared.sequences[0].images
    for span in ahead.images:
        assert ahead.prompt_token_ids[span.start : span.end] == image_keys(span.layout)


@given(st.lists(st.one_of(st.text(max_size=5), st.sampled_from(NAMES).map(image_mark)), max_size=6))
def test_texts_with_marks_round_trip(texts: list[str]) -> None:
    whole = "".join(texts)
    marks = [text for text in texts if images_of(text)]
    assert [image_mark(name) for name in images_of(whole)] == marks
    assert "".join(pieces(whole)) == whole
    assert without_images(whole) == "".join(text for text in texts if text not in marks)
    parts = content_parts(whole)
    assert "".join(part.get("text", "") for part in parts) == without_images(whole)
    assert sum(part["type"] == "image" for part in parts) == len(marks)


def test_line_breaks_separate_texts_but_not_texts_and_images() -> None:
    mark = image_mark(CAT)
    assert joined(["a", "b", mark, "c", mark, mark, "", "d"]) == f"a\nb{mark}c{mark}{mark}\nd"
    assert with_marks(user("a", image(CAT), {"type": "text", "text": "b"})) == {
        "role": "user",
        "content": f"a{mark}b",
    }


def taken(*names: str, new: Sequence[str] = ()) -> PromptWithImages:
    fields = {name: f"messages.{place}" for place, name in enumerate(names)}
    messages = tuple(user(image(name)) for name in names)
    return PromptWithImages(prompt=ChatPrompt(messages=messages), fields=fields, new=frozenset(new))


def test_layouts_and_refusals_are_remembered_by_model(tmp_path: Path) -> None:
    layouts = ImageLayouts(ImageFolder(tmp_path, max_bytes=1000))

    def missing(prompt: PromptWithImages, model: str) -> tuple[str, ...]:
        question = layouts.question(prompt, model=model, max_pixels=7)
        assert question is None or question.max_pixels == 7
        return () if question is None else question.images

    assert missing(taken(CAT), "one") == (CAT,)
    layouts.learn(ImageAnswer(call_id="", layouts=(LAYOUTS[CAT],)), model="one")
    assert missing(taken(CAT, DOG), "one") == (DOG,)
    assert missing(taken(CAT), "two") == (CAT,)
    assert layouts.prompt_and_layouts(taken(CAT), model="one") == (
        taken(CAT).prompt,
        {CAT: LAYOUTS[CAT]},
    )
    layouts.learn(ImageAnswer(call_id="", failures={DOG: "too wide"}), model="one")
    assert missing(taken(CAT, DOG), "one") == ()
    with pytest.raises(InvalidRequest, match="too wide") as misfit:
        layouts.prompt_and_layouts(taken(CAT, DOG, new=[DOG]), model="one")
    assert misfit.value.field == "messages.1"
    prompt, found = layouts.prompt_and_layouts(taken(CAT, DOG, new=[CAT]), model="one")
    assert prompt.messages[0] == user(image(CAT))
    assert prompt.messages[1] == user({"type": "text", "text": UNREADABLE_NOTE})
    assert found == {CAT: LAYOUTS[CAT]}


def test_a_lost_image_is_requested_again(tmp_path: Path) -> None:
    layouts = ImageLayouts(ImageFolder(tmp_path, max_bytes=1000))
    answer = ImageAnswer(call_id="", layouts=(LAYOUTS[CAT],), lost={DOG: "please try again"})
    with pytest.raises(WorkerUnavailable, match="please try again"):
        layouts.learn(answer, model="one")
    question = layouts.question(taken(CAT, DOG), model="one", max_pixels=None)
    assert question is not None
    assert question.images == (DOG,)


@pytest.mark.parametrize("kind", ["failures", "lost"])
def test_files_of_images_without_layout_are_checked_again(kind: str, tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path, max_bytes=1000)
    name = folder.hold_image(b"cat")
    answer = ImageAnswer(call_id="", **{kind: {name: "damaged"}})
    with suppress(WorkerUnavailable):
        ImageLayouts(folder).learn(answer, model="one")
    assert not folder.hold_existing(name)

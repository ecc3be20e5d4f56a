"""What keeping KV quantized costs: the bundled models answer from notes whose KV was packed and
unpacked in each codec.

Run: `python -m tools.measure_codecs [--model holdfast-demo] [--count 60]` from the root of the
repository. For each question the prompt is read once; all of it but the last token is kept, brought
into the codec's form and back, and the answer goes on from there. Prints a Markdown table: right
answers, greedy agreement with `native`, perplexity of native's answers, bytes per token.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

from holdfast.machine import platform
from holdfast.wire.requests import TokenIds

platform.prepare_blas()  # before mlx is imported

from holdfast.config import ModelSettings  # noqa: E402
from holdfast.front.prompt.tokenize import load_tokenizer  # noqa: E402
from holdfast.models.download import demo_folder  # noqa: E402
from holdfast.wire.commands import SequenceRequest  # noqa: E402
from holdfast.wire.requests import SamplingParams  # noqa: E402
from holdfast.worker.engine.engine import Engine  # noqa: E402
from holdfast.worker.engine.load import load_model  # noqa: E402
from holdfast.worker.engine.plan import KeepPolicy, Span, StepPlan  # noqa: E402
from holdfast.worker.engine.probe import choose_layout  # noqa: E402
from holdfast.worker.engine.sequence import Prefix  # noqa: E402
from holdfast.worker.kv.codec import pack, unpack  # noqa: E402
from holdfast.worker.kv.live import Codec  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "demo_model"))

from conversation import render  # noqa: E402
from questions import rows  # noqa: E402

CODECS: tuple[Codec, ...] = ("native", "q8", "q4")
MOST_TOKENS = 80
END = 2


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer from kept KV."""

    tokens: tuple[int, ...]
    kept_bytes: int


class Subject:
    """A bundled model behind the engine."""

    def __init__(self, model: str) -> None:
        folder = demo_folder(model)
        assert folder is not None, f"{model} is no bundled model"
        loaded = load_model(folder, ModelSettings(), progress=lambda stage, fraction: None)
        self.tokenizer = load_tokenizer(folder)
        self._engine = Engine(
            choose_layout(loaded.model, vocab_size=loaded.vocab_size), vocab_size=loaded.vocab_size
        )

    def answer(self, prompt: list[int], codec: Codec) -> Answered:
        """The greedy answer from a prompt whose KV went through the codec."""
        boundary = len(prompt) - 1
        prefix, kept_bytes = self._read(prompt, codec)
        self._engine.open(
            _request("write", prompt), capacity_tokens=len(prompt) + MOST_TOKENS, prefix=prefix
        )
        tokens = tuple(self._write(boundary))
        self._engine.close("write")
        return Answered(tokens, kept_bytes)

    def surprise(
        self, prompt: list[int], answer: tuple[int, ...], codec: Codec
    ) -> tuple[float, int]:
        """Negative log-likelihood of an answer and its end after a prompt kept in the codec, and
        how many tokens that is.
        """
        boundary = len(prompt) - 1
        prefix, _ = self._read(prompt, codec)
        whole = [*prompt, *answer, END]
        request = msgspec.structs.replace(_request("score", whole), want_prompt_logprobs=True)
        self._engine.open(request, capacity_tokens=len(whole), prefix=prefix)
        span = Span(request_id="score", start=boundary, tokens=len(whole) - boundary, draws=True)
        result = self._engine.collect(self._engine.dispatch(StepPlan(spans=(span,))))[0]
        self._engine.close("score")
        scores = [entry.logprob for entry in result.prompt_logprobs]
        return -sum(scores), len(scores)

    def _read(self, prompt: list[int], codec: Codec) -> tuple[Prefix, int]:
        """All but the last token of a prompt, through the codec, and the bytes that this takes."""
        boundary = len(prompt) - 1
        policy = KeepPolicy(boundaries=frozenset({boundary}))
        self._engine.open(_request("read", prompt), capacity_tokens=len(prompt), keep=policy)
        pending = self._engine.dispatch(
            StepPlan(spans=(Span(request_id="read", start=0, tokens=boundary, draws=False),))
        )
        self._engine.collect(pending)
        (kept,) = self._engine.take_kept(pending)
        self._engine.close("read")
        packed = [pack(run, codec) for run in kept.blocks]
        return Prefix(blocks=tuple(map(unpack, packed)), state=kept.state), sum(
            run.nbytes for run in packed
        )

    def _write(self, position: int) -> Iterator[int]:
        for at in range(position, position + MOST_TOKENS):
            pending = self._engine.dispatch(
                StepPlan(spans=(Span(request_id="write", start=at, tokens=1, draws=True),))
            )
            (token,) = self._engine.collect(pending)[0].token_ids
            if token == END:
                return
            yield token


def _request(name: str, prompt: list[int]) -> SequenceRequest:
    return SequenceRequest(
        request_id=name,
        prompt_token_ids=TokenIds.of(prompt),
        max_tokens=MOST_TOKENS,
        sampling=SamplingParams(temperature=0.0, seed=0),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="holdfast-demo")
    parser.add_argument("--count", type=int, default=60)
    options = parser.parse_args()
    subject = Subject(options.model)
    questions = [
        (row.make(rng), row.name)
        for row in rows()
        if "notes" in row.name
        for rng in [Random(f"codecs: {row.name}")]
        for _ in range(options.count // 6)
    ]
    print(
        f"| {options.model}, {len(questions)} questions | right | same as native | perplexity | "
        "bytes per token |"
    )
    print("|---|---|---|---|---|")
    native: list[tuple[int, ...]] = []
    for codec in CODECS:
        right = same = kept = tokens = scored = 0
        surprise = 0.0
        for index, (question, _) in enumerate(questions):
            prompt = subject.tokenizer.encode(
                render(question.conversation, add_generation_prompt=True), add_special_tokens=False
            )
            given = subject.answer(prompt, codec)
            if codec == "native":
                native.append(given.tokens)
            right += question.right(
                subject.tokenizer.decode(list(given.tokens), skip_special_tokens=True)
            )
            same += given.tokens == native[index]
            kept += given.kept_bytes
            tokens += len(prompt) - 1
            more, count = subject.surprise(prompt, native[index], codec)
            surprise, scored = surprise + more, scored + count
        perplexity = math.exp(surprise / scored)
        print(
            f"| {codec} | {right} | {same} | {perplexity:.4f} | {kept / tokens:.0f} |", flush=True
        )


if __name__ == "__main__":
    main()

"""A real model folder whose weights spell given answers, one per turn: for agents, which need a
reproducible model.

A Llama of one layer, greedy at any temperature. The chat template puts a cue token before every
answer, the first before the first answer and so on. Some of an answer's tokens are made only for it
("marks", including a cue); all marks have ranks, later ones higher. The one attention head looks at
the mark of the highest rank in the prompt, and the MLP has one unit for every pair of that mark and
the current token, which writes the next token. So the answer depends only on the turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from holdfast.models.download import demo_folder

CONTEXT = 131_072
END = "<|im_end|>"
OVER = "The script is over."
_SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
_MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_GENERATION = "<|im_start|>assistant\n"
# the width of a token's code; three codes and three numbers make the residual stream
_CODE, _HIDDEN = 64, 256
_TOKEN, _MARK, _NEXT = (slice(place, place + _CODE) for place in (0, _CODE, 2 * _CODE))
_ONE, _RANK, _REST = 3 * _CODE, 3 * _CODE + 1, 3 * _CODE + 2
_STILL = _CODE // 2 - 1  # the head's pair that rotates least: not at all, with this base
_ROPE_BASE = 1e12
_STEEPNESS = 14.0  # logits of attention between a mark and the next
_THRESHOLD = 1.78  # of 2, which only the right pair has
_SHARPNESS = 200.0
# what RMS norms multiply a token of length sqrt(3), later 2, with
_NORM = (_HIDDEN / 3) ** 0.5, _HIDDEN**0.5 / 2


def calls(*asked: tuple[str, Mapping[str, Any]], text: str = "") -> str:
    """An answer that calls tools, (name, arguments) each, in the syntax of Hermes and Qwen."""
    bodies = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in asked
    ]
    return "\n".join(
        [*([text] if text else []), *(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)]
    )


def write_scripted(
    folder: Path,
    answers: Sequence[str],
    *,
    without_tools: str | None = None,
    said_before: int = 0,
    drops_thoughts: bool = False,
) -> Path:
    """Write the model and return its folder.

    It gives `answers[n]` if the conversation has n assistant messages.

    `without_tools` answers every request that offers no tools (such as an agent's request for a
    title; None: such requests are turns too); `said_before` assistant messages are the agent's own
    examples. drops_thoughts: thoughts before the last user message are not in the prompt. After the
    last answer it says OVER. Raises ValueError if answers cannot be distinguished by their pieces.
    """
    script = _Script(_tokenizer())
    for turn, answer in enumerate((*answers, OVER)):
        script.spell(_cue(turn), answer)
    if without_tools is not None:
        script.spell(_cue("aside"), without_tools)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, ids = script.finished()
    weights = _weights(script, ids)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        {name: mx.array(value) for name, value in weights.items()},
        metadata={"format": "mlx"},
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    documents = {
        "config.json": _config(len(ids), len(script.steps), ids[END]),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": _SPECIAL[0],
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": _template(
                len(answers),
                said_before,
                asides=without_tools is not None,
                drops_thoughts=drops_thoughts,
            ),
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2))
    return folder


_LAST_QUESTION = (
    "{%- set last = namespace(question=-1) %}{%- for message in messages %}{%- if message.role == "
    "'user' %}"
    "{%- set last.question = loop.index0 %}{%- endif %}{%- endfor %}"
)


def _cue(turn: int | str) -> str:
    return f"<|turn_{turn}|>"


def _template(turns: int, said_before: int, *, asides: bool, drops_thoughts: bool) -> str:
    """The template of the bundled models, with a cue at the beginning of every answer."""
    text = (demo_folder() / "chat_template.jinja").read_text()
    cue = f"{{{{- '<|turn_' ~ [[turn.said - {said_before}, 0] | max, {turns}] | min ~ '|>' }}}}"
    if asides:
        cue = f"{{%- if tools %}}{cue}{{%- else %}}{{{{- '{_cue('aside')}' }}}}{{%- endif %}}"
    cue += "{%- set turn.said = turn.said + 1 %}"
    opening = "{{- '<|im_start|>assistant\\n' }}"
    assert text.count(opening) == 2, "the template of the bundled models is another now"
    if drops_thoughts:
        shown = "{%- if message.reasoning_content is string and message.reasoning_content"
        assert text.count(shown) == 1, "the template of the bundled models is another now"
        text = _LAST_QUESTION + text.replace(shown, f"{shown} and loop.index0 > last.question")
    return "{%- set turn = namespace(said=0) %}" + text.replace(opening, opening + cue)


@cache
def _tokenizer() -> Tokenizer:
    """Byte-level BPE of 4,096 tokens, learned from a quarter of Holdfast's own documents and
    sources, so that agents' long prompts stay short. (All of these take three times as long, for 2
    % fewer tokens.)
    """
    root = Path(__file__).parents[2]
    files = (*sorted((root / "docs").rglob("*.md")), *sorted((root / "src").rglob("*.py")))
    texts = [path.read_text() for path in files[::4]]
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    learned.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learned.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    )
    learned.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in _SPECIAL]
    )
    learned.add_tokens([AddedToken(text, special=False, normalized=False) for text in _MARKERS])
    return learned


@dataclass
class _Script:
    """Answers as chains of tokens of the vocabulary."""

    plain: Tokenizer
    cues: list[str] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    """Token -> rank, from 1 on; cues are marks."""
    made: list[str] = field(default_factory=list)
    """Non-cue tokens missing from the vocabulary."""
    steps: dict[tuple[str, str], str] = field(default_factory=dict)
    """(mark, current token) -> next token."""

    def spell(self, cue: str, answer: str) -> None:
        """Make the chain from a cue through an answer to its end."""
        self.cues.append(cue)
        self._mark(cue)
        chain = [cue, *self.plain.encode(answer, add_special_tokens=False).tokens]
        if len(set(chain)) < len(chain):
            chain = [cue, *(piece for span in self._spans(chain[1:]) for piece in self._cut(span))]
        mark = cue
        for token, following in pairwise((*chain, END)):
            mark = token if token in self.marks else mark
            if self.steps.setdefault((mark, token), following) != following:
                raise ValueError(f"no pieces of its own for the answer {answer!r}")

    def _mark(self, token: str) -> None:
        self.marks[token] = len(self.marks) + 1

    @staticmethod
    def _spans(tokens: list[str]) -> Iterator[list[str]]:
        """The tokens between markers; a marker is a separate span."""
        span: list[str] = []
        for token in tokens:
            if token in _MARKERS:
                yield from ([span] if span else [])
                yield [token]
                span = []
            else:
                span.append(token)
        yield from ([span] if span else [])

    def _cut(self, span: list[str]) -> list[str]:
        """The span in pieces of two or more tokens that are new; unchanged if there are none."""
        pieces: list[str] = []
        start = 0
        for end in range(1, len(span) + 1):
            piece = "".join(span[start:end])
            if end - start > 1 and self._is_new(piece) and piece not in pieces:
                pieces.append(piece)
                start = end
        if pieces and start < len(span):  # the rest goes to the last piece, if possible
            longer = pieces[-1] + "".join(span[start:])
            if self._is_new(longer):
                pieces[-1], start = longer, len(span)
        for piece in pieces:
            self._mark(piece)
        self.made += pieces
        return [*pieces, *span[start:]]

    def _is_new(self, piece: str) -> bool:
        return piece not in self.marks and self.plain.token_to_id(piece) is None

    def finished(self) -> tuple[Tokenizer, dict[str, int]]:
        """The tokenizer with the new tokens, and all ids.

        No merge makes a new piece, so no prompt contains one by chance.
        """
        content = json.loads(self.plain.to_str())
        learned = content["model"]["vocab"]
        added = [entry["content"] for entry in content["added_tokens"]]
        for piece in self.made:
            learned[piece] = len(learned)
        for number, entry in enumerate(content["added_tokens"]):
            entry["id"] = len(learned) + number
        tokenizer = Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))
        tokenizer.add_special_tokens(
            [AddedToken(text, special=True, normalized=False) for text in _SPECIAL]
        )
        tokenizer.add_tokens(
            [
                AddedToken(text, special=False, normalized=False)
                for text in added
                if text not in _SPECIAL
            ]
        )
        tokenizer.add_special_tokens(
            [AddedToken(cue, special=True, normalized=False) for cue in self.cues]
        )
        return tokenizer, tokenizer.get_vocab(with_added_tokens=True)


def _codes(count: int) -> np.ndarray:
    """Unit vectors, far enough from each other that a wrong pair stays below the threshold: [count,
    _CODE].
    """
    for seed in range(50):
        drawn = np.random.default_rng(seed).choice((-1.0, 1.0), (count, _CODE)) / _CODE**0.5
        alike = drawn @ drawn.T - np.eye(count)
        if alike.max() < _THRESHOLD - 1.1:
            return drawn
    raise ValueError(f"no codes for {count} tokens: the script is too long")


def _weights(script: _Script, ids: Mapping[str, int]) -> dict[str, np.ndarray]:
    used = sorted(
        {token for step, following in script.steps.items() for token in (*step, following)}
    )
    code = dict(zip(used, _codes(len(used)), strict=True))
    embedding = np.zeros((len(ids), _HIDDEN))
    embedding[:, _ONE] = embedding[:, _REST] = 1.0
    embedding[:, _TOKEN.start] = 1.0  # tokens of no answer: any code is fine
    head = np.zeros((len(ids), _HIDDEN))
    for token in used:
        rank = script.marks.get(token, 0) / len(script.marks)
        embedding[ids[token], _TOKEN] = code[token]
        embedding[ids[token], [_RANK, _REST]] = rank, (1 - rank**2) ** 0.5
        head[ids[token], _NEXT] = 6 * code[token]
    head[ids[END], _ONE] = 50.0  # used if no unit is active: small compared to an active one
    first, second = _NORM
    query, key, value, out = (
        np.zeros(shape)
        for shape in ((_CODE, _HIDDEN), (_CODE, _HIDDEN), (_CODE, _HIDDEN), (_HIDDEN, _CODE))
    )
    query[_STILL, _ONE] = _CODE**0.5 * _STEEPNESS * len(script.marks) / first
    key[_STILL, _RANK] = 1 / first
    value[:, _TOKEN] = np.eye(_CODE) / first
    out[_MARK] = np.eye(_CODE)
    gate, up = np.zeros((2, len(script.steps), _HIDDEN))
    down = np.zeros((_HIDDEN, len(script.steps)))
    for unit, ((mark, token), following) in enumerate(script.steps.items()):
        gate[unit, _TOKEN], gate[unit, _MARK] = code[token], code[mark]
        gate[unit, _ONE] = -_THRESHOLD
        up[unit, _ONE] = 1 / second
        down[_NEXT, unit] = code[following]
    layer = "model.layers.0"
    named = {
        "model.embed_tokens.weight": embedding,
        f"{layer}.self_attn.q_proj.weight": query,
        f"{layer}.self_attn.k_proj.weight": key,
        f"{layer}.self_attn.v_proj.weight": value,
        f"{layer}.self_attn.o_proj.weight": out,
        f"{layer}.mlp.gate_proj.weight": gate * _SHARPNESS / second,
        f"{layer}.mlp.up_proj.weight": up,
        f"{layer}.mlp.down_proj.weight": down,
        f"{layer}.input_layernorm.weight": np.ones(_HIDDEN),
        f"{layer}.post_attention_layernorm.weight": np.ones(_HIDDEN),
        "model.norm.weight": np.ones(_HIDDEN),
        "lm_head.weight": head,
    }
    return {name: weight.astype(np.float32) for name, weight in named.items()}


def _config(vocabulary: int, units: int, end: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "num_hidden_layers": 1,
        "intermediate_size": units,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": _CODE,
        "rms_norm_eps": 1e-9,
        "vocab_size": vocabulary,
        "max_position_embeddings": CONTEXT,
        "rope_theta": _ROPE_BASE,
        "tie_word_embeddings": False,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }

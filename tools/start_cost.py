"""What hashing a model costs a start: `PYTHONPATH=src python -m tools.start_cost FOLDER [--former
CHECKOUT] [--sizes 0.5 4]`.

FOLDER is made and removed; it takes as much disk as the models. CHECKOUT is a working tree of
another commit (`git worktree add`), whose server is started with the same Python; a71018b was the
last one to hash samples only. Each kind of start is made in turn, so that a machine that becomes
slower meets all of them. Needs an idle machine, and twice the model's size in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.models.download import demo_folder
from holdfast.models.file_hashing import FileHashing, HashCache
from holdfast.worker.engine.fingerprint import files_of_identity

READY = re.compile(r"ready in\s+([\d.]+) s")
PIECE_NUMBERS = 16 << 20
SETTLES_SECONDS = 4.0  # younger files are not remembered


@dataclass(frozen=True)
class Shape:
    """A plain llama in bfloat16."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int = 16384

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for number in range(self.layers):
            layer = f"model.layers.{number}"
            for name in ("q", "k", "v", "o"):
                yield f"{layer}.self_attn.{name}_proj.weight", (self.hidden, self.hidden)
            yield f"{layer}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{layer}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{layer}.mlp.down_proj.weight", (self.hidden, self.intermediate)
            yield f"{layer}.input_layernorm.weight", (self.hidden,)
            yield f"{layer}.post_attention_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)

    def config(self) -> dict[str, object]:
        heads = self.hidden // 64
        return {
            "model_type": "llama", "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers, "num_attention_heads": heads, "num_key_value_heads": heads,
            "vocab_size": self.vocabulary, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "tie_word_embeddings": True,
            "eos_token_id": 0,
        }  # fmt: skip


def shape_of(gigabytes: float) -> Shape:
    """The shape whose weights take about so much."""
    small = gigabytes < 2
    hidden, intermediate = (1024, 4096) if small else (2048, 8192)
    per_layer = 2 * (4 * hidden * hidden + 3 * hidden * intermediate)
    return Shape(
        hidden, intermediate, max(1, round((gigabytes * 1e9 - 2 * 16384 * hidden) / per_layer))
    )


def write_model(folder: Path, shape: Shape) -> Path:
    """A folder as one gets it from the Hub, with random weights in one file."""
    folder.mkdir(parents=True)
    for file in demo_folder().iterdir():
        if file.name.startswith(("tokenizer", "special", "chat_template")):
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    header: dict[str, object] = {}
    end = 0
    for name, size in shape.tensors():
        begin, end = end, end + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    dice = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, size in shape.tensors():
            left = int(np.prod(size))
            while left:
                count = min(left, PIECE_NUMBERS)
                plain = (
                    np.ones(count, np.float32)
                    if "norm" in name
                    else 0.02 * dice.standard_normal(count, np.float32)
                )
                file.write((plain.view(np.uint32) >> 16).astype(np.uint16).tobytes())
                left -= count
        file.flush()
        os.fsync(file.fileno())
    return folder


def forget_pages(folder: Path) -> None:
    """Have the next reader of the files wait for the disk. Linux only; elsewhere nothing happens."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def seconds_to_ready(source: Path, model: Path, caches: Path) -> float:
    """What a server says of its start; it is ended at once."""
    environ = {**os.environ, "PYTHONPATH": str(source), "XDG_CACHE_HOME": str(caches)}
    command = [
        sys.executable,
        "-m",
        "holdfast.cli.main",
        "serve",
        str(model),
        "--port",
        "0",
        "--store",
        str(caches / "store"),
    ]
    began = time.perf_counter()
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if READY.search(line):
                return time.perf_counter() - began
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate()
    raise SystemExit("the server did not start")


def hashing_seconds(model: Path, cache: Path) -> float:
    """Hashing alone, with nothing beside it."""
    began = time.perf_counter()
    with FileHashing(
        lambda: files_of_identity(model, runs_own_code=False), cache=HashCache(cache)
    ) as hashing:
        hashing.result()
    return time.perf_counter() - began


def measure(model: Path, folder: Path, *, former: Path | None, rounds: int) -> dict[str, float]:
    """Medians of the kinds of starts, in seconds from the command to the line that says ready."""
    ours, caches = Path(__file__).parents[1] / "src", folder / "caches"

    def first() -> float:
        shutil.rmtree(caches / "holdfast" / "hashes", ignore_errors=True)
        return seconds_to_ready(ours, model, caches)

    kinds: dict[str, Callable[[], float]] = {}
    if former is not None:
        kinds["former"] = lambda: seconds_to_ready(former / "src", model, folder / "former caches")
    kinds["first"] = first
    kinds["later"] = lambda: seconds_to_ready(ours, model, caches)
    for start in kinds.values():
        start()  # what is compiled once is compiled, and the files are read
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, start in kinds.items():
            found.setdefault(name, []).append(start())
        for name, start in kinds.items():
            forget_pages(model)
            found.setdefault(f"{name}, from disk", []).append(start())
    hashes = folder / "hashes" / "alone.json"
    found["hashing alone"] = [hashing_seconds(model, hashes)]
    found["hashing alone, remembered"] = [hashing_seconds(model, hashes)]
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--former", type=Path)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 4.0], help="GB")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.folder.exists():
        raise SystemExit(f"{given.folder} is there already")
    try:
        for gigabytes in given.sizes:
            model = write_model(given.folder / f"model-{gigabytes:g}", shape_of(gigabytes))
            time.sleep(SETTLES_SECONDS)
            size = (model / "model.safetensors").stat().st_size
            medians = measure(model, given.folder, former=given.former, rounds=given.rounds)
            print(f"{size / 1e9:.2f} GB")
            for name, seconds in medians.items():
                print(f"  {name:28} {seconds:7.2f} s")
            if "former" in medians:
                print(f"  later : former               {medians['later'] / medians['former']:7.2f}")
            shutil.rmtree(model)
    finally:
        shutil.rmtree(given.folder, ignore_errors=True)


if __name__ == "__main__":
    main()

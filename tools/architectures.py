"""Examines every model type of the installed mlx-lm and writes docs/reference/architectures.md: the
layout that the probe chooses, and whether the equalities hold.

Run `make architectures`, or `python -m tools.architectures > docs/reference/architectures.md` from
the root of the repository; with model types as arguments, it examines only these. `--results FILE`
keeps findings in a file and examines only missing types. The examination runs in another process,
which is restarted if a model crashes it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from holdfast.worker.cpu import host_attention, host_decoding
from holdfast.worker.engine import mlx_lm_hooks

mlx_lm_hooks.prepare()  # before a model module is imported

from tests.fakes.every_config import (  # noqa: E402
    NEED_METAL,
    ONE_AT_A_TIME,
    VARIANTS,
    NotGenerated,
    all_model_types,
    tiny_config,
    wide_config,
)
from tests.fakes.examination import KV_BITS, RIGHT, TOLERANCE, Finding, examine  # noqa: E402

HEADER = """# Architectures

Holdfast runs mlx-lm models in one of three layouts. When it loads a model, it tries the layouts in the order of the
next table and uses the first one that computes correct results. `holdfast doctor MODEL` shows the layout of a model and
why the others were not chosen; `model.layout` forces one.

| layout | meaning |
|---|---|
| `rows` | one forward pass for all sequences, prefill and decode together; the fastest |
| `split` | one forward pass for all decoding sequences, and one per prompt chunk; for recurrent or unusual layers |
| `solo` | one forward pass per sequence; the slowest |

`make architectures` generates the table below with mlx {mlx} and mlx-lm {mlx_lm} on Linux without a GPU: a tiny random
model of every model type (float32), loaded as any model is. The first two numbers are the largest deviation of a
log-probability from the same sequence computed alone by mlx-lm: in a batch of six sequences (`in a batch`), and after a
cached prefix (`cached`). The third one (`restored`) compares a prefix that was converted to bytes and restored with the
same prefix kept in memory. Deviations up to {tolerance:g} are rounding. The prompts are longer than the models' windows and
chunks, and have more tokens than sparse attention selects. A row with a comma is a variant of a model type.

The last two columns are about [quantized](../guides/memory.md#quantized-kv) keys and values, with heads of 64
dimensions: `right` if a sequence gives the same result in a batch, after a cached prefix and restored from bytes as
alone with the same bits; `-` if no layer keeps every token; empty if the bits were not examined.
Rounding can move a value across the border of two codes. So a deviation is wrong only if it is larger than 0.005 (8 bits)
or 0.05 (4 bits), and larger than the deviation that a change of the weights by the precision of float32 causes.

{summary}

| model type | layout | prefix cache | state per layer | in a batch | cached | restored | 8 bits | 4 bits |
|---|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Write the page to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; none: all")
    parser.add_argument("--results", type=Path, help="file that keeps the findings, one a line")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.types or [*all_model_types(), *VARIANTS]
    if options.in_this_process:
        # tiny models have too few scores for numpy and the C kernel otherwise
        host_attention.SCORES_WORTH_IT = 600
        host_decoding.SCORES_WORTH_IT = 100
        for name in names:
            _append(_examine(name), options.results)
        return
    with tempfile.TemporaryDirectory() as folder:
        findings = _examine_all(names, options.results or Path(folder, "results"))
    print(
        HEADER.format(
            mlx=metadata.version("mlx"),
            mlx_lm=metadata.version("mlx-lm"),
            tolerance=TOLERANCE,
            summary=_summary(findings),
        ),
        end="",
    )
    print("\n".join(_row(each) for each in findings if not each.failed_at))
    others = [each for each in findings if each.failed_at or each.layout == "solo"]
    print("\n## Not batched, or not run here\n\n| model type | why |\n|---|---|")
    print("\n".join(f"| {each.name} | {_why(each)} |" for each in others))
    refused = [
        f"| {each.name} | {kv_bits} | {_in_a_cell(text)} |"
        for each in findings
        for kv_bits, text in each.quantized.items()
        if text != RIGHT
    ]
    if refused:
        print("\n## Not quantized\n\n| model type | bits | why |\n|---|---|---|")
        print("\n".join(refused))


def _examine_all(names: list[str], results: Path) -> list[Finding]:
    while missing := [name for name in names if name not in _read(results)]:
        before = len(_read(results))
        command = [sys.executable, "-m", "tools.architectures", "--in-this-process"]
        done = subprocess.run([*command, "--results", str(results), *missing], check=False)
        found = len(_read(results)) - before
        if found < len(missing):
            error = f"the process ended with {done.returncode}"
            _append(Finding(name=missing[found], failed_at="crashed", error=error), results)
    known = _read(results)
    return [known[name] for name in names]


def _append(finding: Finding, results: Path) -> None:
    with results.open("a") as file:
        file.write(json.dumps(asdict(finding)) + "\n")


def _examine(name: str) -> Finding:
    started = time.process_time()
    try:
        config = tiny_config(name)
    except NotGenerated as reason:
        return Finding(name=name, failed_at="configuration", error=str(reason))
    with tempfile.TemporaryDirectory() as folder:
        finding = examine(name, config, Path(folder, "model"), wide=wide_config(name))
    finding.seconds = round(time.process_time() - started, 1)
    return finding


def _read(results: Path) -> dict[str, Finding]:
    if not results.exists():
        return {}
    lines = results.read_text().splitlines()
    return {finding.name: finding for finding in (Finding(**json.loads(line)) for line in lines)}


def _row(finding: Finding) -> str:
    figures = [
        "-" if figure is None else f"{figure:.0e}" if figure else "0"
        for figure in (finding.batched, finding.cached, finding.restored)
    ]
    memory = "yes" if finding.remembers else "no"
    cells = [finding.name, f"**{finding.layout}**", memory, ", ".join(finding.kinds), *figures]
    nothing = "" if finding.remembers and "full" in finding.kinds else "-"
    cells += [finding.quantized.get(kv_bits, nothing).split(":")[0] for kv_bits in KV_BITS]
    wrong = f" wrong: {', '.join(finding.wrong)}" if finding.wrong else ""
    return f"| {' | '.join(cells)} |{wrong}"


def _why(finding: Finding) -> str:
    """Why a model type failed, or why it is not batched."""
    if reason := NEED_METAL.get(finding.name) or ONE_AT_A_TIME.get(finding.name):
        return reason
    if finding.failed_at:
        return f"{finding.failed_at}: {_in_a_cell(finding.error)}"
    return _in_a_cell(finding.reason)


def _in_a_cell(text: str) -> str:
    return text.replace("|", "\\|")


def _summary(findings: Sequence[Finding]) -> str:
    layouts = Counter(each.layout for each in findings if not each.failed_at)
    failed = sum(1 for each in findings if each.failed_at)
    good = [
        each
        for each in findings
        if each.layout in ("rows", "split") and each.remembers and not each.failed_at
    ]
    wrong = [f"{each.name} ({', '.join(each.wrong)})" for each in findings if each.wrong]
    counts = ", ".join(f"{count} `{layout}`" for layout, count in layouts.most_common())
    return (
        f"Of {len(findings)} model types and variants: {counts}, {failed} not run. "
        f"{len(good)} are batched and have a prefix cache. {_quantized(findings)} "
        f"Wrong answers: {len(wrong)}{': ' if wrong else ''}{'; '.join(wrong)}."
    )


def _quantized(findings: Sequence[Finding]) -> str:
    examined = [each for each in findings if each.quantized]
    right = " and ".join(
        f"{sum(1 for each in examined if each.quantized[kv_bits] == RIGHT)} with {kv_bits} bits"
        for kv_bits in KV_BITS
    )
    return f"{len(examined)} were examined with quantized keys and values; right: {right}."


if __name__ == "__main__":
    main()

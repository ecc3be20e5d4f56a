"""Examine every model type of the installed mlx-lm, and print a table and a summary.

Run from the root of the repository: `python -m tools.architecture_sweep`, or with model types to
examine only these. `--results FILE` keeps the findings in a file, and examines only what is not
in it. The examination runs in a process of its own, which is started again if a model ends it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from holdfast.worker.engine import seams

seams.prepare()  # the seam has to be in place before a model module is imported

from tests.fakes.every_config import (  # noqa: E402
    VARIANTS,
    NotGenerated,
    all_model_types,
    tiny_config,
)
from tests.fakes.examination import Finding, examine  # noqa: E402


def main() -> None:
    """Print the table of findings and its summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; none: all")
    parser.add_argument("--results", type=Path, help="file that keeps the findings, one a line")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.types or [*all_model_types(), *VARIANTS]
    if options.in_this_process:
        for name in names:
            _append(_examine(name), options.results)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = options.results or Path(folder, "results")
        findings = _examine_all(names, results)
    print("\n".join([*map(_row, findings), *_summary(findings)]))


def _examine_all(names: list[str], results: Path) -> list[Finding]:
    while missing := [name for name in names if name not in _read(results)]:
        before = len(_read(results))
        command = [sys.executable, "-m", "tools.architecture_sweep", "--in-this-process"]
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
        finding = examine(name, config, Path(folder, "model"))
    finding.seconds = round(time.process_time() - started, 1)
    return finding


def _read(results: Path) -> dict[str, Finding]:
    if not results.exists():
        return {}
    lines = results.read_text().splitlines()
    return {finding.name: finding for finding in (Finding(**json.loads(line)) for line in lines)}


def _row(finding: Finding) -> str:
    memory = "remembers" if finding.remembers else "-"
    figures = [
        "-" if figure is None else f"{figure:.0e}"
        for figure in (finding.batched, finding.cached, finding.restored)
    ]
    cells = [finding.name, finding.layout or "-", memory, *figures, ",".join(finding.kinds)]
    note = f"{finding.failed_at}: {finding.error}" if finding.failed_at else ""
    if finding.layout == "solo":
        note = finding.reason
    return f"| {' | '.join([*cells, *finding.wrong, note])} | {finding.seconds}"


def _summary(findings: Iterable[Finding]) -> list[str]:
    findings = list(findings)
    layouts = Counter(each.layout or f"failed at {each.failed_at}" for each in findings)
    good = [
        each
        for each in findings
        if each.layout in ("rows", "split") and each.remembers and not each.failed_at
    ]
    wrong = [f"{each.name} ({', '.join(each.wrong)})" for each in findings if each.wrong]
    return [
        f"{len(findings)} model types: "
        + ", ".join(f"{count} {layout}" for layout, count in layouts.most_common()),
        f"batched with memory: {len(good)}",
        f"wrong answers: {len(wrong)} {'; '.join(wrong)}",
    ]


if __name__ == "__main__":
    main()

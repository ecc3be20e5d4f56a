"""Examine every model type of the installed mlx-lm, and print a table and a summary.

Run from the root of the repository: `python -m tools.architecture_sweep`, or with model types to
examine only these. `--results FILE` keeps the findings in a file, and examines only what is not
in it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from holdfast.worker.engine import seams

seams.prepare()  # the seam has to be in place before a model module is imported

from tests.fakes.every_config import NotGenerated, all_model_types, tiny_config  # noqa: E402
from tests.fakes.examination import Finding, examine  # noqa: E402


def main() -> None:
    """Print the table of findings and its summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; none: all")
    parser.add_argument("--results", type=Path, help="file that keeps the findings, one a line")
    options = parser.parse_args()
    known = _read(options.results)
    names = options.types or all_model_types()
    findings = []
    for name in names:
        if name not in known:
            known[name] = _examine(name)
            if options.results is not None:
                with options.results.open("a") as results:
                    results.write(json.dumps(asdict(known[name])) + "\n")
        findings.append(known[name])
        print(_row(known[name]), flush=True)
    print("\n".join(_summary(findings)))


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


def _read(results: Path | None) -> dict[str, Finding]:
    if results is None or not results.exists():
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

"""`holdfast bench`: compares servers, the engine with a bare forward pass, and commits."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import plain_errors
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast_bench.results import Results
    from holdfast_bench.run import Plan

_INTERRUPTED = 130
bench = typer.Typer(help="Compare this server with others and with itself.", no_args_is_help=True)

Quick = Annotated[
    bool, typer.Option("--quick", help="Small cases, to see whether everything works.")
]
Model = Annotated[str, typer.Option("--model", help="A model of `bench list`, or a model folder.")]
Folder = Annotated[
    Path | None, typer.Option("--out", help="Folder for results, report and charts.")
]
File = Annotated[
    Path | None, typer.Option("--out", help="File for the results (.json); a report is beside it.")
]
Threads = Annotated[int, typer.Option(help="Threads of servers and BLAS; 0: their defaults.")]
RequestSeconds = Annotated[float, typer.Option(help="Time limit for a request.")]


@bench.command("list")
def list_scenarios() -> None:
    """List scenarios and benchmark models."""
    from holdfast_bench.models import MODEL_NAMES
    from holdfast_bench.suite import SCENARIOS

    for scenario in SCENARIOS.values():
        models = ", ".join((scenario.model, *scenario.more_models))
        typer.echo(f"{scenario.name:10} {scenario.summary} (on {models})")
    typer.echo(
        f"\nmodels: {', '.join(MODEL_NAMES)}, or any model folder; with the suffix -endless, "
        "answers do not end early"
    )


@bench.command()
def run(
    names: Annotated[
        list[str], typer.Argument(help="Scenarios of `bench list`, or `all`.", metavar="NAME…")
    ],
    model: Model = "",
    case: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    peer: Annotated[
        list[str] | None,
        typer.Option(help="mlx_lm, mlx_lm-as-installed, llama.cpp or none; repeatable."),
    ] = None,
    peer_command: Annotated[
        list[str] | None,
        typer.Option(help="Command that starts a peer; contains {port} and {model}."),
    ] = None,
    out: Folder = None,
    quick: Quick = False,
    full: Annotated[
        bool, typer.Option("--full", help="All sizes, more rounds; may take an hour.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of each case; 0: the scenario's.")] = 0,
    noise_rounds: Annotated[
        int, typer.Option(help="Rounds of the first server compared with itself.")
    ] = 2,
    minutes: Annotated[float, typer.Option(help="Time limit for the run.")] = 60.0,
    case_seconds: Annotated[
        float, typer.Option(help="Time limit for a case; the first round always ends.")
    ] = 180.0,
    request_seconds: RequestSeconds = 300.0,
    threads: Threads = 0,
) -> None:
    """Run scenarios on this Holdfast and its peers in turn; report medians, spread and ratios."""
    from holdfast_bench.contenders import by_command
    from holdfast_bench.run import Plan
    from holdfast_bench.suite import items_of

    with plain_errors():
        others = [
            by_command(each, label=f"peer {number}")
            for number, each in enumerate(peer_command or (), 1)
        ]
        items = items_of(
            names,
            "quick" if quick else "full" if full else "normal",
            peers=[] if peer is None and others else peer,
            others=others,
            model=model,
            case=case,
        )
        plan = Plan(
            items=tuple(items),
            out=_folder(out),
            minutes=minutes,
            case_seconds=case_seconds,
            rounds=rounds,
            noise_rounds=noise_rounds,
            threads=threads,
            request_seconds=request_seconds,
            command=_command(),
            say=lambda line: typer.echo(line, err=True),
        )
        _run_and_report(plan)


@bench.command()
def engine(
    model: Model = "qwen3-120m",
    streams: Annotated[
        str, typer.Option(help="Numbers of streams, separated by commas.")
    ] = "1,4,8",
    context: Annotated[int, typer.Option(help="Context of every stream, in tokens.")] = 256,
    out: File = None,
    quick: Quick = False,
    threads: Threads = 0,
) -> None:
    """Compare an engine step with a bare forward pass, and break down the time of the step."""
    from holdfast_bench.engine import engine_results

    with plain_errors():
        results = engine_results(
            model,
            streams=_counts(streams, "--streams"),
            context_tokens=context,
            quick=quick,
            threads=threads,
            command=_command(),
        )
    _report(results, out or _folder(None) / "engine.json", "The engine and a bare forward pass")


@bench.command()
def restore(
    model: Model = "qwen3-120m",
    contexts: Annotated[
        str, typer.Option(help="Context lengths in tokens, separated by commas.")
    ] = "1000,4000,16000",
    rounds: Annotated[
        int, typer.Option(min=1, help="Restarts per context, besides two that measure the noise.")
    ] = 5,
    out: File = None,
    request_seconds: RequestSeconds = 600.0,
    threads: Threads = 0,
) -> None:
    """Compare restoring a context after a restart with the minimum: reading its bytes and one
    forward pass.
    """
    from holdfast_bench.restore import restore_results

    with plain_errors():
        results = asyncio.run(
            restore_results(
                model,
                contexts=_counts(contexts, "--contexts"),
                rounds=rounds,
                threads=threads,
                request_seconds=request_seconds,
                command=_command(),
                say=typer.echo,
            )
        )
    _report(results, out or _folder(None) / "restore.json", "Restored contexts and the minimum")


@bench.command()
def compare(
    before: Annotated[Path, typer.Argument(help="results.json or engine.json of a commit.")],
    after: Annotated[Path, typer.Argument(help="The same of another commit.")],
) -> None:
    """Compare two result files; exit code 1 if something got worse beyond the noise."""
    from holdfast_bench.comparison import changes_between, shown_change
    from holdfast_bench.results import read_results

    with plain_errors():
        changes = changes_between(read_results(before), read_results(after))
    for change in changes:
        typer.echo(shown_change(change))
    worse = [change for change in changes if change.verdict == "worse"]
    typer.echo(f"{len(changes)} figures compared, {len(worse)} worse")
    raise typer.Exit(1 if worse else 0)


@bench.command()
def report(
    file: Annotated[Path, typer.Argument(help="A results.json.", metavar="RESULTS")],
    out: Folder = None,
) -> None:
    """Write the report and the charts of a result file again."""
    from holdfast_bench.report import publish
    from holdfast_bench.results import read_results

    with plain_errors():
        typer.echo(str(publish(read_results(file), out or file.parent)))


def _counts(text: str, option: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise HoldfastError(
            f"{option} takes numbers separated by commas, such as 1,4,8; not {text!r}"
        )
    return tuple(int(part) for part in parts)


def _command() -> str:
    return shlex.join(["holdfast", *sys.argv[1:]])


def _report(results: Results, file: Path, title: str) -> None:
    """Write results and report, and show the report."""
    from holdfast_bench.report import markdown
    from holdfast_bench.results import write_results

    write_results(results, file)
    text = markdown(results, title=title)
    file.with_suffix(".md").write_text(text)
    typer.echo(f"{text}\nresults: {file}")


def _run_and_report(plan: Plan) -> None:
    from holdfast_bench.report import publish
    from holdfast_bench.run import run_benchmarks

    async def until_done() -> Results:
        running = asyncio.ensure_future(run_benchmarks(plan))
        # servers must not outlive the run
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        return await running

    try:
        results = asyncio.run(until_done())
    except (KeyboardInterrupt, asyncio.CancelledError):
        typer.echo(f"interrupted; completed cases are in {plan.out}", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    file = publish(results, plan.out)
    typer.echo(f"{file.read_text()}\nreport: {file}")


def _folder(out: Path | None) -> Path:
    from holdfast_bench.models import cache_folder

    new = cache_folder() / "results" / time.strftime("%Y%m%d-%H%M%S")
    return new if out is None else out.resolve()

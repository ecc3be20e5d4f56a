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
    from holdfast_bench.run import RunPlan

_INTERRUPTED = 130
bench = typer.Typer(help="Compare this server with others and with itself.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option("--out", help="Folder for results, report and charts.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Small cases, to see whether everything works.")
]
Model = Annotated[str, typer.Option("--model", help="A model of `bench list`, or a model folder.")]


@bench.command("list")
def list_scenarios() -> None:
    """List scenarios and benchmark models."""
    from holdfast_bench.models import MODEL_NAMES
    from holdfast_bench.registry import SCENARIOS

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
    peer_url: Annotated[
        list[str] | None, typer.Option(help="URL of a running peer with the same model.")
    ] = None,
    against: Annotated[
        str, typer.Option(help="Measure the server at this URL instead of one started here.")
    ] = "",
    served_model: Annotated[str, typer.Option(help="With --against: name of the model.")] = "",
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="With --against or --peer-url.")
    ] = "",
    out: Out = None,
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
    request_seconds: Annotated[float, typer.Option(help="Time limit for a request.")] = 300.0,
    threads: Annotated[int, typer.Option(help="Threads of every server; 0: its default.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip scenarios that --out already contains.")
    ] = False,
) -> None:
    """Run scenarios on this Holdfast and its peers in turn; report medians, spread and ratios."""
    from holdfast_bench.contenders import by_command, by_url, holdfast
    from holdfast_bench.registry import scenarios_of
    from holdfast_bench.run import RunPlan
    from holdfast_bench.suite import item_for, models_of

    with plain_errors():
        subject = by_url(against, model_id=served_model, api_key=api_key) if against else holdfast()
        others = [
            by_command(each, label=f"peer {number}")
            for number, each in enumerate(peer_command or (), 1)
        ]
        others += [by_url(each, api_key=api_key) for each in peer_url or ()]
        wanted = peer if peer is not None else (["none"] if against or others else None)
        items = [
            item_for(scenario, subject, others=others, peers=wanted, model=each, case=case)
            for scenario in scenarios_of(names)
            if not (against and scenario.needs_start)
            for each in models_of(scenario, model, is_served=bool(against))
        ]
        plan = RunPlan(
            items=tuple(items),
            out=_folder(out),
            scale="quick" if quick else "full" if full else "normal",
            minutes=minutes,
            case_seconds=case_seconds,
            rounds=rounds,
            noise_rounds=noise_rounds,
            threads=threads,
            request_seconds=request_seconds,
            resume=resume,
            command=shlex.join(["holdfast", *sys.argv[1:]]),
        )
        _run_and_report(plan)


@bench.command()
def engine(
    model: Model = "qwen3-120m",
    streams: Annotated[
        str, typer.Option(help="Numbers of streams, separated by commas.")
    ] = "1,4,8",
    context: Annotated[int, typer.Option(help="Context of every stream, in tokens.")] = 256,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="File for the results (.json); a report (.md) is written beside it."
        ),
    ] = None,
    quick: Quick = False,
    threads: Annotated[int, typer.Option(help="BLAS threads; 0: one per core.")] = 0,
) -> None:
    """Compare an engine step with a bare forward pass, and break down the time of the step."""
    from holdfast_bench.engine_run import engine_results
    from holdfast_bench.publish import summary
    from holdfast_bench.report import markdown
    from holdfast_bench.results import write_results

    with plain_errors():
        counts = _counts(streams, "--streams")
        command = shlex.join(["holdfast", *sys.argv[1:]])
        results = engine_results(
            model,
            streams=counts,
            context_tokens=context,
            quick=quick,
            threads=threads,
            command=command,
        )
        file = out or _folder(None) / "engine.json"
        write_results(results, file)
        file.with_suffix(".md").write_text(
            markdown(results, title="The engine compared with a bare forward pass")
        )
    for line in (*summary(results), "", f"results: {file}"):
        typer.echo(line)


@bench.command()
def restore(
    model: Model = "qwen3-120m",
    contexts: Annotated[
        str, typer.Option(help="Context lengths in tokens, separated by commas.")
    ] = "1000,4000,16000",
    rounds: Annotated[
        int, typer.Option(min=1, help="Restarts per context, besides two that measure the noise.")
    ] = 5,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="File for the results (.json); a report (.md) is written beside it."
        ),
    ] = None,
    request_seconds: Annotated[float, typer.Option(help="Time limit for a request.")] = 600.0,
    threads: Annotated[int, typer.Option(help="BLAS threads; 0: one per core.")] = 0,
) -> None:
    """Compare restoring a context after a restart with the minimum: reading its bytes and one
    forward pass.
    """
    from holdfast_bench.publish import summary
    from holdfast_bench.report import markdown
    from holdfast_bench.restore_run import restore_results
    from holdfast_bench.results import write_results

    with plain_errors():
        results = asyncio.run(
            restore_results(
                model,
                contexts=_counts(contexts, "--contexts"),
                rounds=rounds,
                threads=threads,
                request_seconds=request_seconds,
                command=shlex.join(["holdfast", *sys.argv[1:]]),
                say=typer.echo,
            )
        )
        file = out or _folder(None) / "restore.json"
        write_results(results, file)
        file.with_suffix(".md").write_text(
            markdown(results, title="Restored contexts compared with the minimum")
        )
    for line in (*summary(results), "", f"results: {file}"):
        typer.echo(line)


@bench.command()
def compare(
    before: Annotated[Path, typer.Argument(help="results.json or engine.json of a commit.")],
    after: Annotated[Path, typer.Argument(help="The same of another commit.")],
) -> None:
    """Compare two result files; exit code 1 if something got worse beyond the noise."""
    from holdfast_bench.compare import changes_between, shown_change
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
    out: Out = None,
) -> None:
    """Write the report and the charts of a result file again."""
    from holdfast_bench.publish import publish
    from holdfast_bench.results import read_results

    with plain_errors():
        results = read_results(file)
    folder = out or file.parent
    folder.mkdir(parents=True, exist_ok=True)
    typer.echo(str(publish(results, folder)))


def _counts(text: str, option: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise HoldfastError(
            f"{option} takes numbers separated by commas, such as 1,4,8; not {text!r}"
        )
    return tuple(int(part) for part in parts)


def _run_and_report(plan: RunPlan) -> None:
    from holdfast_bench.publish import publish, summary
    from holdfast_bench.run import run_benchmarks

    async def until_done() -> Results:
        running = asyncio.ensure_future(
            run_benchmarks(plan, say=lambda line: typer.echo(line, err=True))
        )
        # servers must not outlive the run
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        return await running

    try:
        results = asyncio.run(until_done())
    except (KeyboardInterrupt, asyncio.CancelledError):
        typer.echo(
            f"interrupted; completed scenarios are in {plan.out}, and --resume continues",
            err=True,
        )
        raise typer.Exit(_INTERRUPTED) from None
    for line in (*summary(results), "", f"report: {publish(results, plan.out)}"):
        typer.echo(line)


def _folder(out: Path | None) -> Path:
    from holdfast_bench.models import cache_folder

    return (
        out.resolve()
        if out is not None
        else cache_folder() / "results" / time.strftime("%Y%m%d-%H%M%S")
    )

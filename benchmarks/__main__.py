"""python -m benchmarks NAME"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.main import make_robust
from echelon.cli.main import run as run_command
from echelon.cli.options import Json, console, print_json
from echelon.errors import did_you_mean, raise_errors
from echelon.launching.torchrun import is_under_torchrun

NAMES = (
    "launch, collectives, step, data-parallel, pipeline, tensor, start, checkpoint, memory, "
    "selective-costs, charts, moe-dense, one-gpu, short-steps, kernels, recompute, optimizer-step, "
    "largest-model, gist, gist-accuracy, offload-optimizer, offload-activations, moe-layer; the last eleven "
    "need a GPU"
)
Name = Annotated[str | None, typer.Argument(help=f"One of {NAMES}. Without a name, all that can run here.")]
Out = Annotated[str | None, typer.Option("--out", help="A folder to keep the result in, as NAME.json.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few rounds: to see that it runs, not to measure.")]
Only = Annotated[
    str,
    typer.Option(
        "--only", help="Of recompute and what comes after optimizer-step: rows whose names have this text."
    ),
]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench(
    name: Name = None, out: Out = None, quick: Quick = False, only: Only = "", as_json: Json = False
) -> None:
    """Measure, side by side with the peers that are installed. Exits with 1 when a target is missed."""
    from benchmarks import benches, missed, place_errors, render, run, runnable, save

    names = runnable(quick) if name is None else [name]
    errors = [] if out is None else place_errors(Path(out), names)
    if out == "":
        errors = ["--out '': must be a folder; use . for this one"]
    if name is not None and name not in benches():
        errors.append(f"there is no bench '{name}'{did_you_mean(name, benches())}")
    elif name is not None and name not in runnable(quick):
        errors.append(f"bench {name} measures a GPU, and torch sees none here; --quick shows that it runs")
    if is_under_torchrun():
        errors.append("bench starts its own ranks: run it without torchrun")
    raise_errors("python -m benchmarks", errors)
    screen = console(as_json)
    results, sentences = [], []
    for bench_name in names:
        with screen.status(f"measuring {bench_name} …"):
            result = run(bench_name, quick=quick, only=only)
        screen.print(render(result))
        if out is not None:
            save(result, Path(out))
        results.append(result.to_dict())
        if not quick:  # its figures mean nothing
            sentences += [
                f"{bench_name}: {each}" for each in missed(bench_name, result.rows, partial=bool(only))
            ]
    if as_json:
        print_json({"results": results, "missed": sentences})
    for sentence in sentences:
        print(f"target missed: {sentence}", file=sys.stderr)
    if sentences:
        raise typer.Exit(1)


def run_words(words: list[str], *, process_ends: bool = False) -> int:
    """Run the command line; returns the exit code."""
    return run_command(words, process_ends=process_ends, app=app, name="python -m benchmarks")


if __name__ == "__main__":
    make_robust(sys.stdout, sys.stderr)
    sys.exit(run_words(sys.argv[1:], process_ends=True))

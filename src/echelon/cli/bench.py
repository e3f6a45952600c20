"""echelon bench"""

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.options import Json, console, print_json
from echelon.errors import UserError, did_you_mean

Name = Annotated[str | None, typer.Argument(help="Which bench; without a name, all of them.")]
Out = Annotated[Path | None, typer.Option("--out", help="A folder to keep the result in, as NAME.json.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few rounds: to see that it runs, not to measure.")]


def bench(name: Name = None, out: Out = None, quick: Quick = False, as_json: Json = False) -> None:
    """Measure, side by side with the peers that are installed."""
    from echelon.bench import benches, render, run, runnable, save

    names = runnable(quick) if name is None else [name]
    if not set(names) <= set(benches()):
        raise UserError(f"there is no bench '{name}'{did_you_mean(str(name), benches())}")
    screen = console(as_json)
    results = []
    for bench_name in names:
        with screen.status(f"measuring {bench_name} …"):
            result = run(bench_name, quick=quick)
        screen.print(render(result))
        if out is not None:
            save(result, out)
        results.append(result.to_dict())
    if as_json:
        print_json({"results": results})

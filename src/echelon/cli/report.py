"""echelon report, watch and generate: what there is to see of a run, and what its model writes."""

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.options import Json, console, print_json
from echelon.errors import UserError
from echelon.quantities import show_bytes

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; several are compared on one page.")
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Where the page goes; by default report.html of the first run.")
]
Open = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Predict nothing, which takes most of the time of a report.")
]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0: one that is free.")]


def report(
    runs: Runs, out: Out = None, open_page: Open = False, quick: Quick = False, as_json: Json = False
) -> None:
    """Write one page about a run: curves, a timeline, memory and bytes predicted and measured, better plans.

    Of several runs, the page is a comparison.
    """
    from echelon.report.page import gather, render

    path = runs[0] / "report.html" if out is None else out
    page = render(gather(runs, predict=not quick))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written: {error.strerror or error}") from error
    if as_json:
        print_json({"page": str(path), "bytes": len(page.encode())})
    console(as_json).print(f"the page is {path} ({show_bytes(len(page.encode()))})", markup=False)
    if open_page:
        webbrowser.open(path.absolute().as_uri())


def watch(
    runs: Runs, port: Port = 0, open_page: Open = False, quick: Quick = False, as_json: Json = False
) -> None:
    """Serve the page of a run on this machine alone, and update it while the run goes on. Ctrl-C ends it."""
    from echelon.report.page import PageServer

    with PageServer(runs, port, predict=not quick) as server:
        if as_json:
            print_json({"page": server.url})
            sys.stdout.flush()  # who reads it may wait for it
        console(as_json).print(f"the page is at {server.url}  (Ctrl-C ends)", markup=False)
        if open_page:
            webbrowser.open(server.url)
        server.serve()


RunOrFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a finished run, or a Hugging Face folder.")
]
Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="The text that the model goes on from.")]
Tokens = Annotated[int, typer.Option(help="How many tokens to write at most.")]
Temperature = Annotated[float, typer.Option(help="Below 1 sharper, above 1 wilder; 0: always the likeliest.")]
TopK = Annotated[int, typer.Option(help="Draw from so many of the likeliest tokens.")]
Seed = Annotated[int, typer.Option(help="The same seed writes the same text.")]


def generate(
    run: RunOrFolder,
    prompt: Prompt,
    tokens: Tokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write text with the model of a run. It has no cache of keys and values: to look, not to serve."""
    from echelon.train.write_text import write_text

    screen = console(as_json)
    with screen.status("writing …"):
        written = write_text(run, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    if as_json:
        print_json(
            {
                "model": str(written.folder),
                "prompt": written.prompt,
                "text": written.text,
                "tokens": written.tokens,
                "ended": written.ended,
            }
        )
    screen.print(written.text, markup=False, highlight=False, soft_wrap=True)

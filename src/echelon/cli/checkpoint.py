"""echelon checkpoint show"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from echelon.cli.options import Json, console, print_json
from echelon.quantities import show_bytes

if TYPE_CHECKING:
    from echelon.state.checkpoint import SavedState

app = typer.Typer(help="Look at checkpoints.", no_args_is_help=True)

Place = Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint, a folder of them, or a run.")]


@app.command("show")
def show(path: Place, as_json: Json = False) -> None:
    """What is in a checkpoint, and whether it is whole: every hash is compared."""
    from echelon.state.checkpoint.folder import find_checkpoint, one_before_is_named
    from echelon.state.checkpoint.saved import SavedState, summarize

    screen = console(as_json)
    checkpoint = find_checkpoint(path)
    with one_before_is_named(checkpoint):
        saved = SavedState.open(checkpoint)
        _verify(saved, as_json)
    summary = {**summarize(saved), "whole": True}
    if as_json:
        print_json(summary)
    else:
        screen.print(_table(summary))


def _verify(saved: "SavedState", as_json: bool) -> None:
    with console(as_json).status(f"comparing the hashes of {saved.path} …"):
        saved.verify()


def _table(summary: dict[str, Any]) -> Table:
    """Rows of plain text: a name in a checkpoint of a stranger is no markup."""
    table = Table.grid(padding=(0, 2))
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    rows = {
        "checkpoint": summary["path"],
        "step": f"{summary['step']:,}",
        "plan": f"{summary['plan']}   ({summary['ranks']} ranks; any plan can load it)",
        "saved": f"{summary['saved']} by {versions}",
        **{kind: _size(size) for kind, size in summary["sizes"].items()},
        "optimizer state": ", ".join(summary["optimizer_parts"]) or "none",
        "files": f"{len(summary['files'])}, {show_bytes(sum(summary['files'].values()))}, all hashes right",
    }
    for name, text in rows.items():
        table.add_row(Text(name, style="bold"), Text(_printable(text)))
    return table


def _size(size: dict[str, Any]) -> str:
    return f"{show_bytes(size['bytes'])} in {size['tensors']:,} tensors of {', '.join(size['types'])}"


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)

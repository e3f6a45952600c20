"""echelon checkpoint show, export and import: checkpoints for people, and for and of other programs."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from echelon.cli.options import Json, console, print_json
from echelon.quantities import show_bytes

app = typer.Typer(help="Look at checkpoints.", no_args_is_help=True)

CheckpointPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint, a folder of them, or a run.")
]
RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a run, of its checkpoints, or of one of them.")
]
Format = Annotated[
    str,
    typer.Option(
        metavar="hf|safetensors|dcp", help="A Hugging Face folder, plain tensors, or torch's format."
    ),
]
Out = Annotated[Path | None, typer.Option(help="The folder to write; default: RUN/export/FORMAT.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="The type of weights, like float32: from masters where these have more bits."),
]


@app.command("show")
def show(path: CheckpointPath, as_json: Json = False) -> None:
    """Show what is in a checkpoint, and whether it is whole: every hash is compared."""
    from echelon.state.checkpoint.folder import find_checkpoint, one_before_is_named
    from echelon.state.checkpoint.saved import SavedState, summarize

    screen = console(as_json)
    checkpoint = find_checkpoint(path)
    with one_before_is_named(checkpoint):
        saved = SavedState.open(checkpoint)
        with screen.status(f"comparing the hashes of {saved.path} …"):
            saved.verify()
    summary = {**summarize(saved), "whole": True}
    if as_json:
        print_json(summary)
    screen.print(_table(summary))


def _table(summary: dict[str, Any]) -> Table:
    """Make rows of plain text: a name in a stranger's checkpoint is no markup."""
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
        table.add_row(Text(name, style="bold"), Text(text if text.isprintable() else ascii(text)))
    return table


def _size(size: dict[str, Any]) -> str:
    return f"{show_bytes(size['bytes'])} in {size['tensors']:,} tensors of {', '.join(size['types'])}"


def export(run: RunPath, to: Format, out: Out = None, dtype: Dtype = None, as_json: Json = False) -> None:
    """Write the weights of a checkpoint for other programs, without any rank."""
    from echelon.train.export_run import export_run

    screen = console(as_json)
    with screen.status(f"exporting {run} …"):
        done = export_run(run, to, out, dtype)
    if as_json:
        print_json(
            {
                "folder": str(done.folder),
                "checkpoint": str(done.checkpoint),
                "step": done.step,
                "format": to,
                "tensors": done.tensors,
                "bytes": done.num_bytes,
            }
        )
    size = show_bytes(done.num_bytes)
    screen.print(
        f"{done.folder}: {done.tensors:,} tensors, {size}, of step {done.step:,} ({done.checkpoint})",
        markup=False,
    )


Source = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A folder of torch DCP (FSDP2, torchtitan) or DeepSpeed (universal, ZeRO), or a file.",
    ),
]
Folder = Annotated[Path, typer.Option(help="The folder to write.")]
To = Annotated[
    str,
    typer.Option(
        help="weights: safetensors. checkpoint: what engine.load takes, with the optimizer's state."
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="The Hugging Face folder of the same model: names are checked; config and tokenizer are copied."
    ),
]
Prefix = Annotated[
    str | None, typer.Option(help="What stands before the names of weights, like model.; found if left out.")
]
WrittenDtype = Annotated[str | None, typer.Option("--dtype", help="The type of weights, like bfloat16.")]
UnsafePickle = Annotated[
    bool,
    typer.Option("--unsafe-pickle", help="Read pickle files, for tensors and plain values alone."),
]


def import_weights(
    source: Source,
    out: Folder,
    to: To = "weights",
    config: Config = None,
    prefix: Prefix = None,
    dtype: WrittenDtype = None,
    unsafe_pickle: UnsafePickle = False,
    as_json: Json = False,
) -> None:
    """Write another system's checkpoint as safetensors or as a checkpoint of echelon's, without any rank."""
    from echelon.train.import_weights import import_weights

    screen = console(as_json)
    with screen.status(f"importing {source} …"):
        done = import_weights(
            source, out, unsafe_pickle=unsafe_pickle, to=to, config=config, prefix=prefix, dtype=dtype
        )
    if as_json:
        print_json(
            {
                "folder": str(done.folder),
                "format": done.kind,
                "prefix": done.prefix,
                "tensors": done.tensors,
                "bytes": done.num_bytes,
                "skipped": list(done.skipped),
            }
        )
    left = (
        f"; {len(done.skipped)} other entries (optimizer and the like) were left out" if done.skipped else ""
    )
    screen.print(
        f"{done.folder}: {done.tensors:,} tensors, {show_bytes(done.num_bytes)}, from {done.kind}{left}",
        markup=False,
    )

"""echelon export"""

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.options import Json, console, print_json
from echelon.quantities import show_bytes

Place = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a run, of its checkpoints, or of one of them.")
]
Format = Annotated[
    str,
    typer.Option(
        "--to", metavar="hf|safetensors|dcp", help="A Hugging Face folder, plain tensors, or torch's format."
    ),
]
Out = Annotated[Path | None, typer.Option("--out", help="The folder to write; default: RUN/export/FORMAT.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="The type of weights, like float32: from masters where these have more bits."
    ),
]


def export(run: Place, to: Format, out: Out = None, dtype: Dtype = None, as_json: Json = False) -> None:
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
        return
    size = show_bytes(done.num_bytes)
    screen.print(
        f"{done.folder}: {done.tensors:,} tensors, {size}, of step {done.step:,} ({done.checkpoint})",
        markup=False,
    )

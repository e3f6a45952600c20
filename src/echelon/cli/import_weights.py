"""echelon import"""

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.options import Json, console, print_json
from echelon.quantities import show_bytes

Source = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A folder of torch DCP (FSDP2, torchtitan) or DeepSpeed (universal, ZeRO), or a file.",
    ),
]
Out = Annotated[Path, typer.Option(help="The folder to write.")]
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
Dtype = Annotated[str | None, typer.Option(help="The type of weights, like bfloat16.")]
UnsafePickle = Annotated[
    bool,
    typer.Option("--unsafe-pickle", help="Read pickle files, for tensors and plain values alone."),
]


def import_weights(
    source: Source,
    out: Out,
    to: To = "weights",
    config: Config = None,
    prefix: Prefix = None,
    dtype: Dtype = None,
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
        return
    left = (
        f"; {len(done.skipped)} other entries (optimizer and the like) were left out" if done.skipped else ""
    )
    screen.print(
        f"{done.folder}: {done.tensors:,} tensors, {show_bytes(done.num_bytes)}, from {done.kind}{left}",
        markup=False,
    )

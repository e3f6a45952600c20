"""Another system's checkpoint as safetensors, or as a checkpoint of echelon's (import_checkpoint.py): one
process, one tensor in memory at a time.

torch DCP     .metadata and *.distcp: FSDP2, torchtitan, Accelerate with FSDP
DeepSpeed     universal checkpoints, and those of ZeRO 1 to 3
torch.save    one file with a state dict

All of these hold pickle, which can run code when it is read as usual. So the caller says that it may be read,
and then an unpickler reads it that makes tensors and plain values, and calls nothing else.
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.data.tokenizer import copy_tokenizer
from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.models import build
from echelon.models.hf.config import config_from_hf
from echelon.state.weight_files.foreign.dcp import METADATA, open_dcp
from echelon.state.weight_files.foreign.deepspeed import find_deepspeed, open_deepspeed
from echelon.state.weight_files.foreign.restricted_pickle import load_torch
from echelon.state.weight_files.foreign.tensors import MODEL_PREFIXES, OTHERS, ForeignTensors
from echelon.state.weight_files.tensor_file import report_os_errors
from echelon.state.weight_files.weight_folder import CONFIG, SHARD_BYTES, read_json, write_weights
from echelon.train.export_run import DTYPES
from echelon.train.import_checkpoint import write_checkpoint

TARGETS = ("weights", "checkpoint")


class Imported(NamedTuple):
    """The files that were written. `prefix` was taken off all names."""

    folder: Path
    kind: str
    prefix: str
    tensors: int
    num_bytes: int
    skipped: tuple[str, ...]  # what is in the checkpoint and no weight


def import_weights(
    source: Path,
    out: Path,
    *,
    unsafe_pickle: bool,
    to: str = "weights",
    config: Path | None = None,
    prefix: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Imported:
    """Write the weights of a checkpoint to `out`. With `config`, the Hugging Face folder of the same model,
    `out` becomes one too, and the names and shapes are checked. to="checkpoint" writes what engine.load
    takes, with the optimizer's state."""
    errors = [*_target_errors(to, dtype), *_argument_errors(source, out, config, dtype, unsafe_pickle)]
    raise_errors(f"import of {source}", errors)
    foreign = _open(source)
    prefix, names = _choose(foreign, config, prefix)
    if to == "checkpoint":
        written = write_checkpoint(out, foreign, prefix, names)
        left = {*foreign.skipped, *foreign.shapes} - written.names - foreign.aliases
        skipped = tuple(sorted(name for name in left if not name.startswith(OTHERS)))
        return Imported(out, foreign.kind, prefix, written.tensors, written.num_bytes, skipped)
    entries = foreign.entries(names, None if dtype is None else getattr(torch, dtype), prefix)
    tensors = (
        foreign.read(name).to(entry.dtype).contiguous() for name, entry in zip(names, entries, strict=True)
    )
    write_weights(out, entries, tensors, shard_bytes)
    if config is not None:
        with report_os_errors(out):
            copy_tokenizer(config, out)
            shutil.copyfile(config / CONFIG, out / CONFIG)  # last: a folder that has one is complete
    skipped = tuple(sorted({*foreign.skipped, *foreign.shapes} - set(names)))
    return Imported(out, foreign.kind, prefix, len(entries), sum(each.nbytes for each in entries), skipped)


def _target_errors(to: str, dtype: str | None) -> list[str]:
    if to not in TARGETS:
        return [f"--to {to}: is no form that is written{did_you_mean(to, TARGETS)}"]
    if to == "checkpoint" and dtype is not None:
        return [
            "--dtype: a checkpoint has the values as they were; engine.load converts them as its plan says"
        ]
    return []


def _argument_errors(
    source: Path, out: Path, config: Path | None, dtype: str | None, unsafe_pickle: bool
) -> list[str]:
    errors = []
    if not source.exists():
        errors.append(f"{source}: there is no such file or folder")
    elif not unsafe_pickle:
        errors.append(
            f"{source}: is read with pickle, which can run code of whoever wrote it; --unsafe-pickle reads "
            "it with an unpickler that makes tensors and plain values, and calls nothing else: say so for "
            "files that you trust"
        )
    if config is not None and not (config / CONFIG).is_file():
        errors.append(f"--config {config}: has no {CONFIG}; name the Hugging Face folder of this model")
    if dtype is not None and dtype not in DTYPES:
        errors.append(f"--dtype {dtype}: is not a type of weights{did_you_mean(dtype, DTYPES)}")
    if out.exists() and source.exists() and (out.resolve() in (source.resolve(), *source.resolve().parents)):
        errors.append(f"--out {out}: has the checkpoint in it; name another folder")
    return errors


def _open(source: Path) -> ForeignTensors:
    if source.is_file():
        return _open_file(source)
    if (source / METADATA).is_file():
        return open_dcp(source)
    deepspeed = find_deepspeed(source)
    if deepspeed is not None:
        return open_deepspeed(deepspeed)
    raise UserError(
        f"{source}: is no checkpoint that can be imported: torch DCP has {METADATA}, DeepSpeed zero/ or "
        "*_optim_states.pt, torch.save is one file"
    )


def _open_file(path: Path) -> ForeignTensors:
    loaded = load_torch(path)
    tensors = dict(_flatten(loaded)) if isinstance(loaded, Mapping) else {}
    if not tensors:
        raise UserError(f"{path}: holds no state dict with tensors")
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return ForeignTensors("torch.save", shapes, lambda name: tensors[name].detach())


def _flatten(values: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    for name, value in values.items():
        if isinstance(value, Tensor):
            found.append((f"{prefix}{name}", value))
        elif isinstance(value, Mapping):
            found += _flatten(value, f"{prefix}{name}.")
    return found


def _choose(foreign: ForeignTensors, config: Path | None, prefix: str | None) -> tuple[str, list[str]]:
    """The prefix and the names of the weights; of a model that is known, those that it needs."""
    model = None
    if config is not None:
        # A model of transformers that is none of ours is left as it is: its names are not checked.
        with suppress(UserError), torch.device("meta"):
            model = build(config_from_hf(read_json(config / CONFIG)))
    if model is None:
        return foreign.weights(prefix)
    problems: dict[str, list[str]] = {}
    for each in (prefix,) if prefix is not None else MODEL_PREFIXES:
        with suppress(UserError):  # no name begins so
            names = foreign.weights(each)[1]
            found = {name.removeprefix(each): _described(*foreign.shapes[name]) for name in names}
            problems[each] = model.weight_layout(found.keys()).errors(found)
            if not problems[each]:
                return each, names
    if not problems:
        return foreign.weights(prefix)  # which raises
    best = min(problems, key=lambda each: len(problems[each]))
    raise UserError(f"the weights are not those of {config} (their names after '{best}'):", problems[best])


def _described(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

"""Another system's checkpoint as safetensors, or as a checkpoint of echelon's: one process, and one tensor in
memory at a time.

torch DCP     .metadata and *.distcp: FSDP2, torchtitan, Accelerate with FSDP
DeepSpeed     universal checkpoints, and those of ZeRO 1 to 3
torch.save    one file with a state dict

All of these hold pickle, which can run code when it is read as usual. So the caller says that it may be read,
and then an unpickler reads it that makes tensors and plain values, and calls nothing else.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.data.tokenizer import copy_tokenizer
from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.models import build
from echelon.models.hf.config import config_from_hf
from echelon.state.checkpoint.manifest import Manifest
from echelon.state.checkpoint.part_writer import lay_out
from echelon.state.checkpoint.rank_save import SaveOptions, save_alone
from echelon.state.ownership import VALUE, Slice
from echelon.state.weight_files.foreign.dcp import METADATA, open_dcp
from echelon.state.weight_files.foreign.deepspeed import find_deepspeed, open_deepspeed
from echelon.state.weight_files.foreign.restricted_pickle import load_torch
from echelon.state.weight_files.foreign.tensors import (
    MODEL_PREFIXES,
    OTHERS,
    PARAMETERS,
    Described,
    ForeignOptimizer,
    ForeignTensors,
    describe,
)
from echelon.state.weight_files.layout import whole
from echelon.state.weight_files.tensor_file import report_os_errors
from echelon.state.weight_files.weight_folder import CONFIG, read_json, write_weights
from echelon.train.export_run import DTYPES
from echelon.version import VERSION

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
) -> Imported:
    """Write the weights of a checkpoint to `out`. With `config`, the Hugging Face folder of the same model,
    `out` becomes one too, and the names and shapes are checked. to="checkpoint" writes what engine.load
    takes, with the optimizer's state."""
    raise_errors(f"import of {source}", _argument_errors(source, out, to, config, dtype, unsafe_pickle))
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
    write_weights(out, entries, tensors)
    if config is not None:
        with report_os_errors(out):
            copy_tokenizer(config, out)
            shutil.copyfile(config / CONFIG, out / CONFIG)  # last: a folder that has one is complete
    skipped = tuple(sorted({*foreign.skipped, *foreign.shapes} - set(names)))
    return Imported(out, foreign.kind, prefix, len(entries), sum(each.nbytes for each in entries), skipped)


def _argument_errors(
    source: Path, out: Path, to: str, config: Path | None, dtype: str | None, unsafe_pickle: bool
) -> list[str]:
    errors = []
    if to not in TARGETS:
        errors.append(f"--to {to}: is no form that is written{did_you_mean(to, TARGETS)}")
    elif to == "checkpoint" and dtype is not None:
        errors.append(
            "--dtype: a checkpoint has the values as they were; engine.load converts them as its plan says"
        )
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
    shapes = {name: describe(tensor) for name, tensor in tensors.items()}
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
            found = {name.removeprefix(each): foreign.like(name) for name in names}
            problems[each] = model.weight_layout(found.keys()).errors(found)
            if not problems[each]:
                return each, names
    if not problems:
        return foreign.weights(prefix)  # which raises
    best = min(problems, key=lambda each: len(problems[each]))
    raise UserError(f"the weights are not those of {config} (their names after '{best}'):", problems[best])


class Written(NamedTuple):
    tensors: int
    num_bytes: int
    names: frozenset[str]  # of the other system, that were read


def write_checkpoint(out: Path, foreign: ForeignTensors, prefix: str, names: Sequence[str]) -> Written:
    """Write the weights `names`, without `prefix`, and all that the optimizer keeps of them."""
    optimizer = _optimizer(foreign, prefix, names)
    stored = {name.removeprefix(prefix): name for name in names}
    for alias in [*foreign.aliases, *_tied(foreign, stored, optimizer)]:
        stored.pop(alias.removeprefix(prefix), None)
    described: dict[Slice, torch.dtype] = {}
    for name, origin in stored.items():
        described |= _place(name, VALUE, foreign.shapes[origin])
    for (name, part), each in optimizer.shapes.items():
        described |= _place(name, part, each)

    def read(box: Slice) -> Tensor:
        is_weight = box.part == VALUE
        tensor = foreign.read(stored[box.name]) if is_weight else optimizer.read(box.name, box.part)
        return tensor.to(described[box]).contiguous()

    layouts = lay_out(0, list(described.items()))
    steps = optimizer.steps if foreign.steps is None else foreign.steps
    about = Manifest(
        step=steps,
        plan="data=1",
        ranks=1,
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"echelon": VERSION, "torch": torch.__version__},
        groups=optimizer.groups,
        extra={"imported from": foreign.kind},
    )
    numbers = {"steps": steps, "begun steps": steps, "skipped steps": 0}
    save_alone(out, about, numbers, [(layout, read) for layout in layouts], SaveOptions())
    num_bytes = sum(box.numel * dtype.itemsize for box, dtype in described.items())
    return Written(len(described), num_bytes, frozenset(stored.values()))


def _place(name: str, part: str, described: Described) -> dict[Slice, torch.dtype]:
    shape, dtype = described
    return {Slice(name, part, shape, *whole(shape)): dtype}


def _optimizer(foreign: ForeignTensors, prefix: str, names: Sequence[str]) -> ForeignOptimizer:
    """The optimizer's state by the names of weights without their prefix, with which some systems list it."""
    found = None if foreign.optimizer is None else foreign.optimizer()
    if found is None or not found.shapes:
        raise UserError(
            f"{foreign.kind}: has no state of an optimizer by names of parameters; import the weights alone: "
            "leave out --to checkpoint"
        )
    short = {name.removeprefix(prefix) for name in names}
    owners = {name for name, _ in found.shapes}
    origins = {name: name if owners <= short else f"{prefix}{name}" for name in short}
    unknown = sorted(owners - set(origins.values()))
    if unknown:
        raise UserError(f"the optimizer has state of what is no weight here: {', '.join(unknown[:5])}")
    renamed = {origin: name for name, origin in origins.items()}
    groups = [
        {**group, PARAMETERS: sorted(renamed[name] for name in group[PARAMETERS] if name in renamed)}
        for group in found.groups
    ]
    return ForeignOptimizer(
        {(renamed[name], part): each for (name, part), each in found.shapes.items()},
        lambda name, part: found.read(origins[name], part),
        groups,
    )


def _tied(foreign: ForeignTensors, stored: dict[str, str], optimizer: ForeignOptimizer) -> list[str]:
    """Further names of tied weights: equal to a weight that the optimizer has, and not in the optimizer."""
    trained = {name for name, _ in optimizer.shapes}
    by_shape: dict[Described, list[str]] = {}
    for name in trained:
        by_shape.setdefault(foreign.shapes[stored[name]], []).append(name)
    return [
        name
        for name, origin in stored.items()
        if name not in trained
        and any(
            torch.equal(foreign.read(origin), foreign.read(stored[each]))
            for each in by_shape.get(foreign.shapes[origin], ())
        )
    ]

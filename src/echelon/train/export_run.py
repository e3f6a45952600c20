"""The weights of a checkpoint for other programs: one process, no ranks, one tensor in memory at a time.

hf            a Hugging Face folder, as `engine.export` writes it; of a run, whose job says the model
safetensors   the tensors under their own names
dcp           a folder of torch.distributed.checkpoint, under the names of the model's state dict
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.data.tokenizer import copy_tokenizer
from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.models import ModelConfig, build_without_memory
from echelon.nn.huggingface import config_json, weight_layout
from echelon.state.checkpoint.folder import RUN_FILE, find_checkpoint, find_run, one_before_is_named
from echelon.state.checkpoint.saved import SavedState
from echelon.state.ownership import MASTER, VALUE, Slice, StateNames
from echelon.state.weight_files.foreign.dcp import write_dcp
from echelon.state.weight_files.layout import tensor_errors, whole
from echelon.state.weight_files.tensor_file import TensorEntry
from echelon.state.weight_files.weight_folder import SHARD_BYTES, read_json, write_folder, write_weights
from echelon.train.jobs.job_file import read_values
from echelon.train.runs.run_folder import link_errors
from echelon.train.task import TOKENIZER_FOLDER, config_of

EXPORTS = "export"
FORMATS = ("hf", "safetensors", "dcp")
DTYPES = ("float64", "float32", "bfloat16", "float16")


class Exported(NamedTuple):
    folder: Path
    checkpoint: Path
    step: int
    tensors: int
    num_bytes: int


def export_run(
    path: Path, to: str, out: Path | None = None, dtype: str | None = None, shard_bytes: int = SHARD_BYTES
) -> Exported:
    """Write the weights of the newest checkpoint of a run, or of the one at `path`, after all of its hashes
    were compared. Without `out`, into the run's folder: export/FORMAT."""
    run = find_run(path)
    raise_errors(f"export of {path}", _argument_errors(path, to, out, dtype, run))
    checkpoint = find_checkpoint(path)
    with one_before_is_named(checkpoint):
        saved = SavedState.open(checkpoint)
        saved.verify()
    folder = (run or Path()) / EXPORTS / to if out is None else out
    weights = _Weights(saved, dtype)
    model = None if run is None else _model(run, weights)
    if to == "hf":
        assert model is not None
        layout = weight_layout(model)
        raise_errors(f"{type(model).__name__} cannot be written", list(layout.problems))
        names = StateNames.of(model).state
        entries = layout.entries({name: weights.dtype(names[name]) for name in layout.needed_names()})
        config = config_json(model, entries[0].dtype)
        write_folder(folder, entries, layout.joined(weights.named(model)), config, shard_bytes)
        if run is not None:
            copy_tokenizer(run / TOKENIZER_FOLDER, folder)
    elif to == "dcp":
        entries = weights.entries(model)
        write_dcp(folder, entries, weights.named(model))
    else:
        entries = weights.entries(None)
        write_weights(folder, entries, (weights.read(entry.name) for entry in entries), shard_bytes)
    num_bytes = sum(entry.nbytes for entry in entries)
    return Exported(folder, saved.path, saved.manifest.step, len(entries), num_bytes)


def _argument_errors(path: Path, to: str, out: Path | None, dtype: str | None, run: Path | None) -> list[str]:
    errors = [] if path.exists() else [f"{path}: there is no such file or folder; name a run or a checkpoint"]
    if to not in FORMATS:
        errors.append(f"--to {to}: is not a format{did_you_mean(to, FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        errors.append(f"--dtype {dtype}: is not a type of weights{did_you_mean(dtype, DTYPES)}")
    if errors and not path.exists():
        return errors  # what it lacks is no news
    if run is None and to == "hf":
        errors.append(f"{path}: has no {RUN_FILE} that says which model it is; use --to safetensors or dcp")
    if run is not None and out is None:
        errors += link_errors(run / EXPORTS) if not (run / EXPORTS).is_symlink() else link_errors(run)
    if run is None and out is None:
        errors.append(f"{path}: is not in the folder of a run; say where to write: --out FOLDER")
    return errors


def _model(run: Path, weights: "_Weights") -> nn.Module:
    """The model of a run's job without memory, whose tensors must be those of the checkpoint."""
    values = read_json(run / RUN_FILE).get("job")
    if not isinstance(values, dict):
        raise UserError(f"{run / RUN_FILE}: must hold the run's job")
    config = config_of(read_values(values, (), None, str(run / RUN_FILE)))
    subject = f"{weights.path}, which is no checkpoint of the job in {run / RUN_FILE}"
    layers = config.layers if isinstance(config, ModelConfig) else 0
    if layers > len(weights.names):  # before they are built
        raise_errors(subject, [f"model.layers={layers}: there are only {len(weights.names)} tensors"])
    model = build_without_memory(config)
    raise_errors(subject, weights.errors(model))
    return model


class _Weights:
    """The values of a checkpoint's tensors in the wanted type: from masters where these have more bits."""

    def __init__(self, saved: SavedState, dtype: str | None) -> None:
        self._saved, self.path = saved, saved.path
        self._wanted: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        described = {name: saved.parts(name) for name in saved.manifest.tensors}
        self._shapes = {name: parts[VALUE].shape for name, parts in described.items() if VALUE in parts}

    @property
    def names(self) -> list[str]:
        return sorted(self._shapes)

    def errors(self, model: nn.Module) -> list[str]:
        state = model.state_dict(keep_vars=True)
        firsts = set(StateNames.of(model).state.values())
        found = {name: self._saved.parts(name)[VALUE] for name in self._shapes}
        return tensor_errors(found, {name: state[name] for name in firsts})

    def dtype(self, name: str) -> torch.dtype:
        stored = self._saved.parts(name)[VALUE].dtype
        return stored if self._wanted is None or not stored.is_floating_point else self._wanted

    def read(self, name: str) -> Tensor:
        parts, dtype = self._saved.parts(name), self.dtype(name)
        is_finer = MASTER in parts and dtype.itemsize > parts[VALUE].dtype.itemsize
        origin, shape = whole(self._shapes[name])
        out = torch.empty(shape, dtype=dtype)
        self._saved.read(Slice(name, MASTER if is_finer else VALUE, shape, origin, shape), out)
        return out

    def entries(self, model: nn.Module | None) -> list[TensorEntry]:
        """All of them, by name; of a model also under the further names of tied tensors."""
        firsts = {name: name for name in self.names} if model is None else StateNames.of(model).state
        return [TensorEntry(name, self._shapes[first], self.dtype(first)) for name, first in firsts.items()]

    def named(self, model: nn.Module | None) -> Callable[[str], Tensor]:
        """Reads by any name that a model has for a tensor."""
        firsts: dict[str, Any] = {} if model is None else StateNames.of(model).state
        return lambda name: self.read(firsts.get(name, name))

"""Models in and out of Hugging Face folders, with safetensors alone: transformers is not needed.

    model = load_hf("Llama-3.1-8B")
    save_hf(model, "runs/a/hf")

A folder has config.json and the weights; a folder that has one is complete. Tokenizer files are not touched.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from echelon.errors import UserError, raise_errors
from echelon.models.build import build
from echelon.models.config import ModelConfig
from echelon.models.hf.config import config_from_hf, config_to_hf
from echelon.models.hf.dialects import OWN_TYPE, dialect_of
from echelon.models.image.model import load_weights
from echelon.models.transformer import Transformer
from echelon.state.weight_files.layout import WeightLayout, Window, is_same, read_pieces, tensor_errors, whole
from echelon.state.weight_files.weight_folder import (
    CONFIG,
    SHARD_BYTES,
    WeightFolder,
    read_headers,
    read_json,
    write_folder,
)


def load_hf(folder: str | Path) -> Transformer:
    """Build the model in a folder, with its weights in the type they are stored in, on the CPU."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"Hugging Face folder '{folder}': there is no such folder")
    with torch.device("meta"):  # no memory and no random values for weights that are loaded
        model = build(_read_config(folder))
    load_weights(model, WeightFolder(folder, model.weight_layout))
    model.tie()
    return model


def read_hf_config(folder: str | Path) -> ModelConfig:
    """Read the sizes of the model in a folder, without its weights."""
    config = config_from_hf(read_json(Path(folder) / CONFIG))
    _check_counts(Path(folder), config)
    return config


def save_hf(model: nn.Module, folder: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a GPT or Llama as a folder that transformers loads; weights above `shard_bytes` in shards."""
    if not isinstance(model, Transformer):
        raise UserError(f"save_hf takes a GPT or Llama of echelon.models, not a {type(model).__name__}")
    save_hf_state(model.config, model.state_dict(), folder, shard_bytes)


def save_hf_state(
    config: ModelConfig, state: Mapping[str, Tensor], folder: str | Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """`save_hf` for a whole state dict without its module, as `engine.full_state_dict()` gives."""
    layout = layout_to_write(config, state)
    if any(tensor.is_meta for tensor in state.values()):
        raise UserError("this model is on the meta device and has no weights to save; fill it first")
    entries = layout.entries({name: tensor.dtype for name, tensor in state.items()})
    dtype = str(entries[0].dtype).removeprefix("torch.")
    write_folder(folder, entries, layout.joined(state.__getitem__), config_to_hf(config, dtype), shard_bytes)


def _check_counts(folder: Path, config: ModelConfig) -> None:
    """Refuse a config that lies about layers or experts before they are built: each has its own tensors."""
    headers = read_headers(folder)
    counts = {"layers": config.layers}
    if config.experts is not None and dialect_of(config) != OWN_TYPE:
        sparse = max(0, config.layers - config.experts.first_dense)
        counts["experts in all layers"] = sparse * config.experts.num_experts
    errors = [
        f"{CONFIG} says {count} {name}, but the files hold {len(headers.names)} tensors"
        for name, count in counts.items()
        if headers.is_listed and count > len(headers.names)
    ]
    raise_errors(f"Hugging Face folder '{folder}'", errors)


def _read_config(folder: Path) -> ModelConfig:
    """Read the config of a folder; its errors are listed with those of the files."""
    try:
        return read_hf_config(folder)
    except UserError as error:
        errors = [*(error.errors or [error.title]), *read_headers(folder).errors]
        raise_errors(f"Hugging Face folder '{folder}'", errors)
        raise


# State dicts <-> Hugging Face tensor names and layouts: two pure functions, no files.

State = Mapping[str, Tensor]


def to_hf_state(config: ModelConfig, state: State) -> dict[str, Tensor]:
    """Our state dict under Hugging Face names and layouts. A tied head is left out, as transformers does."""
    layout = layout_to_write(config, state)
    return dict(zip(layout.tensors, layout.joined(state.__getitem__), strict=True))


def from_hf_state(config: ModelConfig, state: State) -> dict[str, Tensor]:
    """Convert a Hugging Face state dict to our names and layouts, for `load_state_dict(strict=True)`."""
    with torch.device("meta"):
        model = build(config)
    layout = model.weight_layout(state)
    raise_errors("Hugging Face weights", _copy_errors(state, layout.copies) + layout.errors(state))
    return {name: _split(layout, name, tensor.shape, state) for name, tensor in model.state_dict().items()}


def layout_to_write(config: ModelConfig, state: State) -> WeightLayout:
    """Return the layout of the files of our state dict, in which nothing may be missing or wrong."""
    with torch.device("meta"):
        model = build(config)
    layout = model.weight_layout()
    expected = {name: tensor for name, tensor in model.state_dict().items() if name not in layout.ties}
    untied = {name: tensor for name, tensor in state.items() if name not in layout.ties}
    raise_errors("model state", _copy_errors(state, layout.ties) + tensor_errors(untied, expected))
    return layout


def _split(layout: WeightLayout, name: str, shape: torch.Size, state: State) -> Tensor:
    """Copy one of our tensors: contiguous, and not a view of another's memory."""
    pieces = layout.pieces_of(name)
    first = state[pieces[0].stored]
    if is_same(pieces, first.shape, shape):
        return first

    def copy(stored: str, window: Window, out: Tensor) -> None:
        out.copy_(state[stored][window])

    tensor = torch.empty(shape, dtype=first.dtype, device=first.device)
    read_pieces(pieces, whole(shape), tensor, copy)
    return tensor


def _copy_errors(state: State, copies: Mapping[str, str]) -> list[str]:
    """List tensors that are there a second time, and are not the same."""
    return [
        f"{name}: differs from {original}, but the config says that they are tied"
        for name, original in copies.items()
        if name in state and original in state and not _same(state[name], state[original])
    ]


def _same(left: Tensor, right: Tensor) -> bool:
    # A tensor on the meta device has no values that could differ.
    return left.dtype == right.dtype and (left.is_meta or torch.equal(left, right))

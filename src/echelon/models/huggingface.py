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
from echelon.models.config import ModelConfig
from echelon.models.families import build
from echelon.models.hf.config import config_from_hf, config_to_hf
from echelon.models.hf.dialects import OWN_TYPE, dialect_of
from echelon.models.hf.state import layout_to_write
from echelon.models.transformer import Transformer
from echelon.state.weight_files import (
    CONFIG,
    SHARD_BYTES,
    WeightFolder,
    read_headers,
    read_json,
    whole,
    write_folder,
)


def load_hf(folder: str | Path) -> Transformer:
    """Build the model in a folder, with its weights in the type they are stored in, on the CPU."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"Hugging Face folder '{folder}': there is no such folder")
    with torch.device("meta"):  # no memory and no random values for weights that are loaded
        model = build(_read_config(folder))
    weights = WeightFolder(folder, model.weight_layout)
    weights.check()
    state = model.state_dict()
    for name in weights.names():
        (state[name],) = weights.read(name, [whole(state[name].shape)])
    model.load_state_dict(state, assign=True)
    model.tie()
    return model


def read_hf_config(folder: str | Path) -> ModelConfig:
    """The sizes of the model in a folder, without its weights."""
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
    """The config of a folder; its errors are listed with those of the files."""
    try:
        return read_hf_config(folder)
    except UserError as error:
        errors = [*(error.errors or [error.title]), *read_headers(folder).errors]
        raise_errors(f"Hugging Face folder '{folder}'", errors)
        raise

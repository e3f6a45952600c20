"""Models in and out of Hugging Face folders, with safetensors alone: transformers is not needed.

    model = load_hf("Llama-3.1-8B")
    save_hf(model, "runs/a/hf")

A folder has config.json and the weights. config.json is removed first and written last: a folder that has one
is complete. Tokenizer files are not touched.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from echelon.errors import UserError, raise_errors
from echelon.models.config import ModelConfig
from echelon.models.families import build
from echelon.models.hf_config import config_from_hf, config_to_hf
from echelon.models.hf_files import CONFIG, read_json, read_tensors, write_json, write_tensors
from echelon.models.hf_state import from_hf_state, to_hf_state
from echelon.models.transformer import Transformer

SHARD_BYTES = 5 * 10**9

T = TypeVar("T")


def load_hf(folder: str | Path) -> Transformer:
    """Build the model in a folder, with its weights in the type they are stored in, on the CPU."""
    folder = Path(folder)
    subject = f"Hugging Face folder '{folder}'"
    if not folder.is_dir():
        raise UserError(f"{subject}: there is no such folder")
    errors: list[str] = []
    config = _attempt(errors, lambda: read_hf_config(folder))
    tensors = _attempt(errors, lambda: read_tensors(folder))
    raise_errors(subject, errors)
    assert config is not None
    assert tensors is not None
    state = _attempt(errors, lambda: from_hf_state(config, tensors))
    raise_errors(subject, errors)
    assert state is not None
    return _assemble(config, state)


def read_hf_config(folder: str | Path) -> ModelConfig:
    """The sizes of the model in a folder, without its weights."""
    return config_from_hf(read_json(Path(folder) / CONFIG))


def save_hf(model: nn.Module, folder: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a GPT or Llama as a folder that transformers loads; weights above `shard_bytes` in shards."""
    if not isinstance(model, Transformer):
        raise UserError(f"save_hf takes a GPT or Llama of echelon.models, not a {type(model).__name__}")
    save_hf_state(model.config, model.state_dict(), folder, shard_bytes)


def save_hf_state(
    config: ModelConfig, state: Mapping[str, Tensor], folder: str | Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """`save_hf` for a whole state dict without its module, as `engine.full_state_dict()` gives."""
    folder = Path(folder)
    tensors = to_hf_state(config, state)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise UserError("this model is on the meta device and has no weights to save; fill it first")
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)
        write_tensors(folder, tensors, shard_bytes)
        write_json(folder / CONFIG, config_to_hf(config, dtype))
    except (OSError, SafetensorError) as error:
        raise UserError(f"Hugging Face folder '{folder}': cannot be written: {error}") from error


def _assemble(config: ModelConfig, state: Mapping[str, Tensor]) -> Transformer:
    with torch.device("meta"):  # no memory and no random values for weights that are loaded
        model = build(config)
    model.load_state_dict(state, assign=True)
    model.tie()
    return model


def _attempt(errors: list[str], read: Callable[[], T]) -> T | None:
    """What `read` returns, or None with its errors added to the list."""
    try:
        return read()
    except UserError as error:
        errors.extend(error.errors or [error.title])
        return None

"""State dicts <-> Hugging Face tensor names and layouts: two pure functions, no files."""

from collections.abc import Mapping

import torch
from torch import Tensor

from echelon.errors import raise_errors
from echelon.models.config import ModelConfig
from echelon.models.families import build
from echelon.state.weight_files import WeightLayout, Window, is_same, read_pieces, tensor_errors, whole

State = Mapping[str, Tensor]


def to_hf_state(config: ModelConfig, state: State) -> dict[str, Tensor]:
    """Our state dict under Hugging Face names and layouts. A tied head is left out, as transformers does."""
    layout = layout_to_write(config, state)
    return dict(zip(layout.tensors, layout.joined(state.__getitem__), strict=True))


def from_hf_state(config: ModelConfig, state: State) -> dict[str, Tensor]:
    """A Hugging Face state dict under our names and layouts, ready for `load_state_dict(strict=True)`."""
    with torch.device("meta"):
        model = build(config)
    layout = model.weight_layout(state)
    raise_errors("Hugging Face weights", _copy_errors(state, layout.copies) + layout.errors(state))
    return {name: _split(layout, name, tensor.shape, state) for name, tensor in model.state_dict().items()}


def layout_to_write(config: ModelConfig, state: State) -> WeightLayout:
    """The layout of the files of our state dict, in which nothing may be missing or wrong."""
    with torch.device("meta"):
        model = build(config)
    layout = model.weight_layout()
    expected = {name: tensor for name, tensor in model.state_dict().items() if name not in layout.ties}
    untied = {name: tensor for name, tensor in state.items() if name not in layout.ties}
    raise_errors("model state", _copy_errors(state, layout.ties) + tensor_errors(untied, expected))
    return layout


def _split(layout: WeightLayout, name: str, shape: torch.Size, state: State) -> Tensor:
    """One of our tensors: contiguous, and not a view of another's memory."""
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
    """A tensor that is there a second time must be the same."""
    return [
        f"{name}: differs from {original}, but the config says that they are tied"
        for name, original in copies.items()
        if name in state and original in state and not _same(state[name], state[original])
    ]


def _same(left: Tensor, right: Tensor) -> bool:
    # A tensor on the meta device has no values that could differ.
    return left.dtype == right.dtype and (left.is_meta or torch.equal(left, right))

"""The tensors of mixtures of experts in Hugging Face files: one tensor for each matrix of each expert.

ours                                        Mixtral                            Qwen3-MoE, DeepSeek-MoE
mlp.gate.weight                             block_sparse_moe.gate.weight       mlp.gate.weight
mlp.experts.gate_up_proj [3, : hidden]      block_sparse_moe.experts.3.w1      mlp.experts.3.gate_proj
mlp.experts.gate_up_proj [3, hidden :]      block_sparse_moe.experts.3.w3      mlp.experts.3.up_proj
mlp.experts.down_proj [3]                   block_sparse_moe.experts.3.w2      mlp.experts.3.down_proj
mlp.shared.up.weight                        –                                  mlp.shared_experts.up_proj
"""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from echelon.models.config import ModelConfig
from echelon.models.hf.dialects import dialect_of
from echelon.state.weight_files import FileTensor, Piece, whole_tensor


class MixtureNames(NamedTuple):
    """Of the mixture of a block, and of the matrices of its experts."""

    mixture: str
    gate: str
    up: str
    down: str


_MIXTRAL = MixtureNames("block_sparse_moe.", "w1", "w3", "w2")
_QWEN = MixtureNames("mlp.", "gate_proj", "up_proj", "down_proj")
_SHARED = {
    "shared.gate.weight": "shared_experts.gate_proj.weight",
    "shared.up.weight": "shared_experts.up_proj.weight",
    "shared.down.weight": "shared_experts.down_proj.weight",
}


def mixture_names(config: ModelConfig, stored: Collection[str]) -> MixtureNames:
    """Those that files with these tensors have; without any, those that we write."""
    if stored:
        return _MIXTRAL if any(f".{_MIXTRAL.mixture}" in name for name in stored) else _QWEN
    return _MIXTRAL if dialect_of(config) == "mixtral" else _QWEN


def expert_tensors(
    names: MixtureNames, hf_block: str, mlp: str, state: Mapping[str, Tensor]
) -> Iterator[FileTensor]:
    """The tensors of a mixture; `mlp` begins the names of ours."""
    hf_mixture = f"{hf_block}{names.mixture}"
    yield whole_tensor(f"{mlp}gate.weight", state[f"{mlp}gate.weight"], f"{hf_mixture}gate.weight")
    first, down = f"{mlp}experts.gate_up_proj", f"{mlp}experts.down_proj"
    num_experts, width, hidden = state[down].shape
    for expert in range(num_experts):
        prefix = f"{hf_mixture}experts.{expert}."
        for name, row in ((names.gate, 0), (names.up, hidden)):
            yield _matrix(f"{prefix}{name}.weight", first, state[first], expert, row, (hidden, width))
        yield _matrix(f"{prefix}{names.down}.weight", down, state[down], expert, 0, (width, hidden))
    for name, hf_name in _SHARED.items():
        if f"{mlp}{name}" in state:
            yield whole_tensor(f"{mlp}{name}", state[f"{mlp}{name}"], f"{hf_mixture}{hf_name}")


def _matrix(
    stored: str, name: str, tensor: Tensor, expert: int, row: int, shape: tuple[int, int]
) -> FileTensor:
    """A matrix of one expert, which begins at a row of the stacked tensor."""
    piece = Piece(name, (expert, row, 0), (1, *shape), stored, stored_offsets=(0, 0))
    return FileTensor(stored, shape, tensor.dtype, (piece,))

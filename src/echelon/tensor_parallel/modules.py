"""What split modules compute. Only the `forward` of an instance is replaced: its class, its names and its
hooks stay what they are. Classes and not closures, so that a model can be copied.
"""

from collections.abc import Sequence
from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.tensor_parallel.columns import Matrix, can_share
from echelon.tensor_parallel.moves import gathered
from echelon.tensor_parallel.regions import Region


def is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a matrix is stored as [inputs, outputs]: GPT-2's in transformers."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def apply_matrix(module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return F.linear(x, weight.T if is_transposed(module) else weight, bias)


@final
class Column:
    """Outputs split; `joined`: they are put together again at once."""

    def __init__(self, module: nn.Module, region: Region, *, joined: bool = False) -> None:
        self.module, self.region, self.joined = module, region, joined
        self.matrix, self.layer = Matrix(module, is_transposed(module)), 0

    def __call__(self, x: Tensor) -> Tensor:
        output = self._with_others(x)
        if output is None:
            bias: Any = self.module.bias
            output = apply_matrix(self.module, self.region.enter(x, to_matrices=True), bias)
        return self.region.join_logits(output) if self.joined else output

    def _with_others(self, x: Tensor) -> Tensor | None:
        """With all who are given `x`; None where one's own way is the only one."""
        region = self.region
        if not region.overlaps or region.has_entered(x) or not can_share(x):
            return None
        return region.companions.multiply(self, x, region.group, sequence=region.sequence)


def number_layers(layers: Sequence[nn.Module]) -> None:
    """Columns of different layers are not computed together: their weights may not be there at once."""
    for number, layer in enumerate(layers):
        for module in layer.modules():
            forward = vars(module).get("forward")
            if isinstance(forward, Column):
                forward.layer = number


@final
class Row:
    """Inputs split; the bias is added once, to the sum."""

    def __init__(self, module: nn.Module, region: Region) -> None:
        self.module, self.region = module, region

    def __call__(self, x: Tensor) -> Tensor:
        bias: Any = self.module.bias
        output = self.region.leave(apply_matrix(self.module, x, None))
        return output if bias is None else output.add_(bias)  # nobody else has this sum


@final
class VocabularyEmbedding:
    """Each rank looks up the tokens whose rows it has; the sum has them all. Hidden states leave whole."""

    def __init__(self, module: nn.Embedding, region: Region) -> None:
        """`module` has all rows as yet."""
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise UserError(
                "tensor: an embedding split by vocabulary cannot have max_norm, scale_grad_by_freq or "
                "sparse; leave them out, or make it 'replicated'"
            )
        self.module, self.region = module, region
        group, self.whole = region.group, module.weight.shape[0]
        self.rows = self.whole // group.size
        self.begin = self.rows * group.rank
        padding = -1 if module.padding_idx is None else module.padding_idx - self.begin
        self.padding = padding if 0 <= padding < self.rows else None

    def __call__(self, tokens: Tensor) -> Tensor:
        if (
            tokens.device.type == "cpu"
            and tokens.numel()
            and not 0 <= tokens.min() <= tokens.max() < self.whole
        ):
            raise IndexError(
                f"tokens {int(tokens.min())} … {int(tokens.max())} of a vocabulary of {self.whole}"
            )
        places = tokens - self.begin
        elsewhere = (places < 0) | (places >= self.rows)
        found = F.embedding(places.masked_fill(elsewhere, 0), self.module.weight, self.padding)
        return self.region.leave(found.masked_fill(elsewhere[..., None], 0), dim=None)


@final
class Experts:
    """Every rank has a part of each expert: tokens and the weights of their experts enter, a sum leaves."""

    def __init__(self, module: nn.Module, region: Region) -> None:
        self.module, self.region = module, region

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        region = self.region
        compute: Any = type(self.module).forward
        # The tokens of all ranks, in the same order on the way in and out.
        places = gathered(top_k_index, region.group, 0) if region.sequence else top_k_index
        made = compute(
            self.module, region.enter(hidden_states, dim=0), places, region.enter(top_k_weights, dim=0)
        )
        return region.leave(made, dim=0)


@final
class EnterFirst:
    """A forward pre-hook: the hidden states that a module is given enter before it looks at them."""

    def __init__(self, region: Region) -> None:
        self.region = region

    def __call__(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.region.overlaps and not self.region.sequence:
            return args, named  # they look the same: its columns enter together
        if args:
            return (self.region.enter(args[0], to_matrices=True), *args[1:]), named
        first, *_others = named
        return args, {**named, first: self.region.enter(named[first], to_matrices=True)}

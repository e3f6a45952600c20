"""torch's dropout modules, wrapped so that they draw from the open scope instead of torch's generator."""

import hashlib
import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from echelon.dropout.mask import keep_mask
from echelon.dropout.training_position import next_use
from echelon.errors import UserError
from echelon.huggingface import draws_by_function
from echelon.tracing import untraced
from echelon.wrapping import Wrapper, Wrapping, find_wrapper, replaced_forward, unwrap

_ALPHA = 1.7580993408473766  # minus SELU's limit for large negative inputs: the value of a dropped element

GlobalIndices = Callable[[int], Tensor]  # from the size of dim 1 on this rank to its indices in the whole dim


def key_dropout(model: nn.Module, wrapping: Wrapping) -> int:
    """Make every dropout module of `model` draw from the open scope; returns how many do.

    The key of a layer is its name, so pass the whole model, before it is split into stages. A module that
    was keyed before, by another wrapping or as a part of a copied model, keeps its name. In eval mode, and
    outside every scope, all modules behave as torch's own.
    """
    for name, module in model.named_modules():
        if _can_be_keyed(module):
            previous = find_wrapper(module, KeyedDropout)
            if previous is not None:
                unwrap(previous)
            wrapping.wrap(KeyedDropout(module, name if previous is None else previous.name))
    return len(keyed_modules(model))


def set_global_indices(module: nn.Module, indices: GlobalIndices) -> None:
    """Tell a keyed dropout that its input is a part of the whole along dim 1."""
    keyed = find_wrapper(module, KeyedDropout)
    if keyed is not None:
        keyed.indices = indices


def split_features(module: nn.Module, rank: int, ranks: int) -> None:
    """Tell a keyed dropout that the last dim of its input is part `rank` of `ranks` equal parts."""
    keyed = find_wrapper(module, KeyedDropout)
    if keyed is not None:
        keyed.feature_part = rank, ranks


def drops_each_element(module: _DropoutNd) -> bool:
    """Whether it drops single elements, not whole channels."""
    kind = _KINDS.get(type(module).forward)
    return kind is not None and kind[0] is _elements


def is_keyed(module: nn.Module) -> bool:
    return find_wrapper(module, KeyedDropout) is not None


def keyed_modules(model: nn.Module) -> list[_DropoutNd]:
    return [module for module in model.modules() if isinstance(module, _DropoutNd) and is_keyed(module)]


def unkeyed_dropout(model: nn.Module) -> list[str]:
    """The names of modules in `model` that drop in a way that cannot be keyed.

    torch's recurrent modules and attention drop inside their own code, and so does attention of
    transformers. A subclass, or a replaced `forward`, may do anything. Calls of F.dropout in other models
    are not seen here.
    """
    return [name or "the model" for name, module in model.named_modules() if _drops_inside(module)]


def _drops_inside(module: nn.Module) -> bool:
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout > 0)
    if draws_by_function(module):
        return True
    return isinstance(module, _DropoutNd) and module.p > 0 and not _can_be_keyed(module)


def _can_be_keyed(module: nn.Module) -> bool:
    return type(module).forward in _KINDS and replaced_forward(module) is None


class KeyedDropout(Wrapper):
    """Drops by a mask that is a function of seed, step, layer name, sample and position."""

    entry: ClassVar[str] = "dropout"

    def __init__(self, module: nn.Module, name: str) -> None:
        assert isinstance(module, _DropoutNd)
        super().__init__(module)
        self.dropout, self.name = module, name
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self.layer = int.from_bytes(digest, "little")
        self.indices: GlobalIndices | None = None
        self.feature_part: tuple[int, int] | None = None  # of the last dim: (rank, ranks)

    def __call__(self, input: Tensor) -> Tensor:
        dropout = self.dropout
        drops = dropout.training and dropout.p > 0 and input.ndim > 0
        keep = self._mask(input) if drops else None
        if keep is None:
            plain: Tensor = self.inner(input)
            return plain
        return _KINDS[type(dropout).forward][1](input, keep, dropout.p, dropout.inplace)

    @untraced  # the position in the training changes with every call
    def _mask(self, input: Tensor) -> Tensor | None:
        """True where `input` is kept; None outside every scope."""
        use_of_scope = next_use(self.layer)
        if use_of_scope is None:
            self._refuse_recomputation()
            return None
        position, use = use_of_scope
        shape = _KINDS[type(self.dropout).forward][0](input)
        keep = keep_mask(
            position.seed,
            position.step,
            self.layer,
            position.first_sample,
            shape,
            self.dropout.p,
            input.device,
            use,
            self._indices(shape),
            self.feature_part,
        )
        # An input without a dim for samples has the mask of one sample.
        return keep[0] if len(shape) > input.ndim else keep

    def _indices(self, shape: "Shape") -> Tensor | None:
        """The indices along dim 1; None where all of it is here, or where dim 1 is the features."""
        features_only = self.feature_part is not None and len(shape) == 2
        return None if self.indices is None or features_only else self.indices(shape[1])

    def _refuse_recomputation(self) -> None:
        """In a backward pass a second mask would differ from the first: gradients would be wrong."""
        if torch._C._current_graph_task_id() != -1:
            raise UserError(
                f"dropout in {self.name or 'the model'} runs again in the backward pass, where its position "
                "in the training is not known (torch.utils.checkpoint?): set its p to 0, do not checkpoint "
                "it, or leave masks to torch with parallelize(seed=None)"
            )


# The shape of the mask.

Shape = tuple[int, ...]


def _elements(x: Tensor) -> Shape:
    return tuple(x.shape)


def _channels(x: Tensor) -> Shape:
    """One element for each channel of each sample: [samples, channels, 1 …]."""
    return (*x.shape[:2], *[1] * (x.ndim - 2))


def _channels_1d(x: Tensor) -> Shape:
    return _channels(x[None]) if x.ndim == 2 else _channels(x)


def _channels_3d(x: Tensor) -> Shape:
    return _channels(x[None]) if x.ndim == 4 else _channels(x)


# How the mask is applied.


def _zero(x: Tensor, keep: Tensor, p: float, inplace: bool) -> Tensor:
    """x · keep / (1 - p): autograd saves only the mask, one byte per element."""
    kept = x.mul_(keep) if inplace else x * keep
    return kept if p == 1 else kept.div_(1 - p)


def _saturate(x: Tensor, keep: Tensor, p: float, inplace: bool) -> Tensor:
    """Dropped elements take SELU's lowest value; then scaled and shifted to keep mean and variance."""
    kept = x.mul_(keep) if inplace else x * keep
    if p == 1:
        return kept
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    shift = (keep.to(x.dtype) - 1).mul_(_ALPHA * scale).add_(_ALPHA * scale * p)
    return kept.mul_(scale).add_(shift)


_KINDS: dict[
    Callable[..., Tensor], tuple[Callable[[Tensor], Shape], Callable[[Tensor, Tensor, float, bool], Tensor]]
] = {
    nn.Dropout.forward: (_elements, _zero),
    nn.Dropout1d.forward: (_channels_1d, _zero),
    nn.Dropout2d.forward: (_channels, _zero),
    nn.Dropout3d.forward: (_channels_3d, _zero),
    nn.AlphaDropout.forward: (_elements, _saturate),
    nn.FeatureAlphaDropout.forward: (_channels, _saturate),
}

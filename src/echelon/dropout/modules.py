"""torch's dropout modules, made to draw from the open place instead of torch's generator.

Only the `forward` of the instance is replaced. Its class, name and state stay what they are.
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from echelon.dropout.huggingface import drops_by_function
from echelon.dropout.mask import keep_mask
from echelon.dropout.place import next_use
from echelon.errors import UserError
from echelon.tracing import untraced

_ALPHA = 1.7580993408473766  # minus what SELU comes to far below 0: what a dropped element becomes


def key_dropout(model: nn.Module) -> int:
    """Make every dropout module of `model` draw from the open scope; returns how many now do.

    The key of a layer is its name, so give the whole model, before it is cut into stages. A module that
    is keyed already keeps its key. In eval mode, and outside every scope, all behave as torch's own.
    """
    for name, module in model.named_modules():
        if _is_torchs(module) and not is_keyed(module):
            module.forward = _Keyed(module, name)
    return len(keyed_modules(model))


Places = Callable[[int], Tensor]  # from a size along dim 1 to the places in the whole


def place_dropout(module: nn.Module, places: Places) -> None:
    """Let a keyed dropout know that what it is given is a part of the whole along dim 1."""
    keyed = _keyed(module)
    if keyed is not None:
        keyed.places = places


def split_features(module: nn.Module, rank: int, ranks: int) -> None:
    """Let a keyed dropout know that the last dim of what it is given is part `rank` of `ranks` equal ones."""
    keyed = _keyed(module)
    if keyed is not None:
        keyed.part = rank, ranks


def drops_each_element(module: _DropoutNd) -> bool:
    """And no whole channels."""
    kind = _KINDS.get(type(module).forward)
    return kind is not None and kind[0] is _elements


def keyed_modules(model: nn.Module) -> list[_DropoutNd]:
    return [module for module in model.modules() if isinstance(module, _DropoutNd) and is_keyed(module)]


def unkeyed_dropout(model: nn.Module) -> list[str]:
    """The names of modules in `model` that drop otherwise than by a module that can be keyed.

    Torch's recurrent ones and attention have it inside, and so has attention of transformers; a subclass may
    have a `forward` of its own. What other models do by calling functions (F.dropout) is not seen here.
    """
    return [name or "the model" for name, module in model.named_modules() if _drops_inside(module)]


def _drops_inside(module: nn.Module) -> bool:
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout > 0)
    if drops_by_function(module):
        return True
    return isinstance(module, _DropoutNd) and module.p > 0 and not _is_torchs(module)


def _is_torchs(module: nn.Module) -> bool:
    return type(module).forward in _KINDS


def is_keyed(module: nn.Module) -> bool:
    return _keyed(module) is not None


def _keyed(module: nn.Module) -> "_Keyed | None":
    forward = module.__dict__.get("forward")
    forward = getattr(forward, "__self__", forward)  # its method, in a compiled layer
    return forward if isinstance(forward, _Keyed) else None


class _Keyed:
    """The forward of one dropout module. No closure, so that the model can be copied and pickled."""

    def __init__(self, module: nn.Module, name: str) -> None:
        assert isinstance(module, _DropoutNd)
        self.module, self.name = module, name
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self.layer = int.from_bytes(digest, "little")
        self.places: Places | None = None
        self.part: tuple[int, int] | None = None  # of the last dim

    def __call__(self, input: Tensor) -> Tensor:
        module = self.module
        plain: Callable[..., Tensor] = type(module).forward
        drops = module.training and module.p > 0 and input.ndim > 0
        keep = self._mask(input) if drops else None
        if keep is None:
            return plain(module, input)
        return _KINDS[plain][1](input, keep, module.p, module.inplace)

    @untraced  # its place in the training is another one each time
    def _mask(self, input: Tensor) -> Tensor | None:
        """What is kept of `input`; None outside every scope."""
        found = next_use(self.layer)
        if found is None:
            self._refuse_recomputation()
            return None
        place, use = found
        seed, step, first = place.seed, place.step, place.first_sample
        module, shape = self.module, _KINDS[type(self.module).forward][0](input)
        split = self.part is not None and len(shape) == 2  # dim 1 itself: features, and no positions
        places = None if self.places is None or split else self.places(shape[1])
        keep = keep_mask(seed, step, self.layer, first, shape, module.p, input.device, use, places, self.part)
        # A mask of one sample stands for an input that has no dim for samples.
        return keep[0] if len(shape) > input.ndim else keep

    def _refuse_recomputation(self) -> None:
        """Made again in a backward pass, the mask would be another than before: gradients would be wrong."""
        if torch._C._current_graph_task_id() != -1:
            raise UserError(
                f"dropout in {self.name or 'the model'} runs again in the backward pass, where its place in "
                "the training is not known (torch.utils.checkpoint?): set its p to 0, do not checkpoint it, "
                "or leave masks to torch with parallelize(seed=None)"
            )


# What the mask covers.

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


# What becomes of elements.


def _zero(x: Tensor, keep: Tensor, p: float, inplace: bool) -> Tensor:
    """x · keep / (1 - p): autograd saves the mask alone, one byte an element."""
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

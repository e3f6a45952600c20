"""torch's dropout modules, wrapped so that they draw from the open scope instead of torch's generator."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from echelon.errors import UserError
from echelon.nn.dropout.mask import Draw, drop, dropped, has_kernel, key_noise, mask_of
from echelon.nn.dropout.training_position import TrainingPosition, count_uses, current, next_use
from echelon.nn.hashing import hash_of, hash_text, signed
from echelon.nn.huggingface.modules import draws_by_function
from echelon.nn.tracing import untraced
from echelon.nn.wrapping import Wrapper, Wrapping, find_wrapper, replaced_forward, unwrap

_ALPHA = 1.7580993408473766  # minus SELU's limit for large negative inputs: the value of a dropped element

Shape = tuple[int, ...]
GlobalIndices = Callable[[int], Tensor]  # from the size of dim 1 on this rank to its indices in the whole dim


def key_dropout(model: nn.Module, wrapping: Wrapping) -> int:
    """Make every dropout module of `model` draw from the open scope; returns how many do. So does the noise
    of modules that draw by themselves.

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
    key_noise(model, wrapping)
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


def draw_masks_again(model: nn.Module) -> None:
    """Let keyed dropouts keep no masks of single elements for the backward pass."""
    for module in keyed_modules(model):
        keyed = find_wrapper(module, KeyedDropout)
        assert keyed is not None
        keyed.draws_again = True


@contextmanager
def draw_ahead(dropouts: Iterable["KeyedDropout"]) -> Iterator[None]:
    """Draw for a call of compiled code with these dropouts inside. Outside every scope it does nothing."""
    position = current()
    dropping = [] if position is None else [each for each in dropouts if each.drops]
    for each in dropping:
        assert position is not None
        each.ahead = DrawsAhead(position, each.layer, id(each))
        DROPOUTS[id(each)] = each
    try:
        yield
    finally:
        for each in dropping:
            assert each.ahead is not None
            count_uses(each.layer, each.ahead.num_drawn)
            each.ahead = None


def drops_each_element(module: _DropoutNd) -> bool:
    """Return True if a module drops single elements, not whole channels."""
    kind = _KINDS.get(type(module).forward)
    return kind is not None and kind.mask_shape is _elements


def is_keyed(module: nn.Module) -> bool:
    return find_wrapper(module, KeyedDropout) is not None


def keyed_modules(model: nn.Module) -> list[_DropoutNd]:
    return [module for module in model.modules() if isinstance(module, _DropoutNd) and is_keyed(module)]


def unkeyed_dropout(model: nn.Module) -> list[str]:
    """List the names of modules in `model` whose dropout is not keyed by position in the sample.

    torch's recurrent modules and attention drop inside their own code, and so does attention of
    transformers. A subclass, or a replaced `forward`, may do anything. Calls of F.dropout in other models
    are not seen here. Most of these are drawn by sample all the same (echelon.nn.draws).
    """
    return [name or "the model" for name, module in model.named_modules() if _drops_inside(module)]


def recurrent_dropout(model: nn.Module) -> list[str]:
    """List the names of recurrent modules with dropout between their layers, which only torch can draw."""
    return [name or "the model" for name, module in model.named_modules() if _drops_between_layers(module)]


def _drops_between_layers(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1


def _drops_inside(module: nn.Module) -> bool:
    if isinstance(module, nn.RNNBase):
        return _drops_between_layers(module)
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout > 0)
    if draws_by_function(module):
        return True
    return isinstance(module, _DropoutNd) and module.p > 0 and not _can_be_keyed(module)


def _can_be_keyed(module: nn.Module) -> bool:
    return type(module).forward in _KINDS and replaced_forward(module) is None


# Keyed dropout inside of compiled code: operators that torch.compile records without looking into them.
#
# torch.compile records a layer once and replays it: the open scope would be recorded as a constant. So the
# scope is read before the layer is called, and the recorded code finds it in tensors: the key of a call,
# which changes with every step, is a tensor in host memory, which is read when the operator runs.


@torch.library.custom_op("echelon::keyed_dropout", mutates_args=())
def keyed_dropout(
    x: Tensor,
    key: Tensor,
    first_sample: Tensor,
    use: int,
    p: float,
    indices: Tensor | None,
    rank: int,
    ranks: int,
) -> Tensor:
    """Compute x · mask / (1 - p). `key`: [hash of seed, step and layer; uses before]; `use` counts on from
    there. The last dim of `x` is part `rank` of `ranks`; `indices` are those of its dim 1."""
    return dropped(x, _draw(key, first_sample, use, p, indices, rank, ranks))


@torch.library.custom_op("echelon::keep_mask", mutates_args=())
def keep_mask(
    key: Tensor,
    first_sample: Tensor,
    use: int,
    p: float,
    indices: Tensor | None,
    rank: int,
    ranks: int,
    shape: Sequence[int],
    device: torch.device,
) -> Tensor:
    """Draw a mask; see `keyed_dropout`. Compiled code relies on contiguous memory."""
    return mask_of(_draw(key, first_sample, use, p, indices, rank, ranks), shape, device).contiguous()


# Dropouts that compiled code has drawn for, by number. A backward pass may ask again, long after the call.
DROPOUTS: WeakValueDictionary[int, "KeyedDropout"] = WeakValueDictionary()


@torch.library.custom_op("echelon::global_indices", mutates_args=())
def global_indices(dropout: Tensor, size: int, device: torch.device) -> Tensor:
    """Return the indices in the whole dim of the `size` ones that are here, by the dropout of this number."""
    indices = DROPOUTS[int(dropout)].indices
    assert indices is not None
    return indices(size).to(device, torch.int64)


def _draw(
    key: Tensor, first_sample: Tensor, use: int, p: float, indices: Tensor | None, rank: int, ranks: int
) -> Draw:
    start, uses = key.tolist()
    first = first_sample if first_sample.is_cuda else int(first_sample)
    part = (rank, ranks) if ranks > 1 else None
    return Draw(hash_of(uses + use, start=start), first, p, indices, part)


@keyed_dropout.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@keep_mask.register_fake
def _(*arguments: Any) -> Tensor:
    *_, shape, device = arguments
    return torch.empty(*shape, dtype=torch.bool, device=device)


@global_indices.register_fake
def _(dropout: Tensor, size: int, device: torch.device) -> Tensor:  # noqa: ARG001
    return torch.empty(size, dtype=torch.int64, device=device)


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _, key, first_sample, use, p, indices, rank, ranks = inputs
    ctx.save_for_backward(key, first_sample, indices)
    ctx.numbers = use, p, rank, ranks


def _drop_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    key, first_sample, indices = ctx.saved_tensors
    use, p, rank, ranks = ctx.numbers
    dropped_gradient = keyed_dropout(gradient, key, first_sample, use, p, indices, rank, ranks)
    return dropped_gradient, *(None,) * 7


keyed_dropout.register_autograd(_drop_gradient, setup_context=_keep_arguments)


class DrawsAhead:
    """The draws of one dropout in one call of compiled code. `num_drawn` counts them."""

    def __init__(self, position: TrainingPosition, layer: int, number: int) -> None:
        """`number`: that of the dropout in `DROPOUTS`."""
        assert isinstance(position.step, int), "passes with compiled dropout are not recorded"
        start, first = hash_of(position.seed, position.step, layer), position.first_sample
        self.dropout = torch.tensor(number)
        self.key = torch.tensor([signed(start), position.uses.get(layer, 0)])  # in host memory
        self.first_sample = first if isinstance(first, Tensor) else torch.tensor(first)
        self.num_drawn = 0


# One dropout.


class KeyedDropout(Wrapper):
    """Drops by a mask that is a function of seed, step, layer name, sample and position."""

    entry: ClassVar[str] = "dropout"

    def __init__(self, module: nn.Module, name: str) -> None:
        assert isinstance(module, _DropoutNd)
        super().__init__(module)
        self.dropout, self.name = module, name
        self.layer = hash_text(name)
        self.indices: GlobalIndices | None = None
        self.feature_part: tuple[int, int] | None = None  # of the last dim: (rank, ranks)
        self.ahead: DrawsAhead | None = None  # only while compiled code runs
        self.draws_again = False  # keeps no mask for the backward pass, also where it takes long to draw

    @property
    def drops(self) -> bool:
        return self.dropout.training and self.dropout.p > 0

    def __call__(self, input: Tensor) -> Tensor:
        if not self.drops or input.ndim == 0:
            return self._plain(input)
        if self.ahead is not None:
            return self._drop_ahead(input, self.ahead)
        # What torch.compile would record of the open scope is a constant.
        return self._drop_untraced(input) if torch.compiler.is_compiling() else self._drop(input)

    def _plain(self, input: Tensor) -> Tensor:
        """Drop as torch's module. torch.compile records no bound method that is made on the way."""
        forward = type(self.dropout).forward
        plain: Tensor = forward(self.dropout, input) if self._next is None else self._next(input)
        return plain

    @untraced
    def _drop_untraced(self, input: Tensor) -> Tensor:
        return self._drop(input)

    def _drop(self, input: Tensor) -> Tensor:
        """Drop by the next draw of the open scope; outside every scope as torch's module."""
        use_of_scope = next_use(self.layer)
        if use_of_scope is None:
            self._refuse_recomputation()
            return self._plain(input)
        position, use = use_of_scope
        dropout, kind = self.dropout, self.kind
        shape = kind.mask_shape(input)
        indices = self.indices(shape[1]) if self.indices is not None and self._has_positions(shape) else None
        key = position.key(self.layer, use)
        draw = Draw(key, position.first_sample, dropout.p, indices, self.feature_part)
        if kind is _ELEMENTS and (self.draws_again or has_kernel(input)):
            return drop(input, draw, inplace=dropout.inplace)
        return kind.apply(input, mask_of(draw, shape, input.device), dropout.p, dropout.inplace)

    def _drop_ahead(self, input: Tensor, ahead: DrawsAhead) -> Tensor:
        """Drop by operators, which torch.compile records."""
        dropout, kind = self.dropout, self.kind
        shape = kind.mask_shape(input)
        use, ahead.num_drawn = ahead.num_drawn, ahead.num_drawn + 1
        indices = None
        if self.indices is not None and self._has_positions(shape):
            indices = global_indices(ahead.dropout, shape[1], input.device)
        draw = ahead.key, ahead.first_sample, use, dropout.p, indices, *(self.feature_part or (0, 1))
        if kind is _ELEMENTS and input.is_cuda and not dropout.inplace:
            fused: Tensor = keyed_dropout(input, *draw)
            return fused
        keep = keep_mask(*draw, shape, input.device)
        return kind.apply(input, keep, dropout.p, dropout.inplace)

    def _has_positions(self, shape: Shape) -> bool:
        """Return True if dim 1 of a mask is not the features, of which a part is here."""
        return self.feature_part is None or len(shape) > 2

    @property
    def kind(self) -> "_Kind":
        return _KINDS[type(self.dropout).forward]

    def _refuse_recomputation(self) -> None:
        """Refuse a second mask in a backward pass: it would differ from the first, and gradients be wrong."""
        if torch._C._current_graph_task_id() != -1:
            raise UserError(
                f"dropout in {self.name or 'the model'} runs again in the backward pass, where its position "
                "in the training is not known (torch.utils.checkpoint?): set its p to 0, do not checkpoint "
                "it (recompute=full replays masks), or leave masks to torch with parallelize(seed=None)"
            )


# The shape of the mask.


def _elements(x: Tensor) -> Shape:
    return tuple(x.shape)


def _channels(x: Tensor) -> Shape:
    """Return [samples, channels, 1 …]: one element for each channel of each sample."""
    return (*x.shape[:2], *[1] * (x.ndim - 2))


def _channels_1d(x: Tensor) -> Shape:
    return _channels(x[None]) if x.ndim == 2 else _channels(x)


def _channels_3d(x: Tensor) -> Shape:
    return _channels(x[None]) if x.ndim == 4 else _channels(x)


# How the mask is applied.


def zero(x: Tensor, keep: Tensor, p: float, inplace: bool) -> Tensor:
    """Compute x · keep / (1 - p). Autograd saves only the mask, one byte per element."""
    kept = x.mul_(keep) if inplace else x * keep
    return kept if p == 1 else kept.mul_(1 / (1 - p))


def saturate(x: Tensor, keep: Tensor, p: float, inplace: bool) -> Tensor:
    """Give dropped elements SELU's lowest value; then scale and shift all to keep mean and variance."""
    kept = x.mul_(keep) if inplace else x * keep
    if p == 1:
        return kept
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    shift = (keep.to(x.dtype) - 1).mul_(_ALPHA * scale).add_(_ALPHA * scale * p)
    return kept.mul_(scale).add_(shift)


class _Kind(NamedTuple):
    """The rule of one class of dropout modules. A mask with a dim more than the input is of one sample."""

    mask_shape: Callable[[Tensor], Shape]
    apply_mask: Callable[[Tensor, Tensor, float, bool], Tensor]

    def apply(self, x: Tensor, keep: Tensor, p: float, inplace: bool) -> Tensor:
        return self.apply_mask(x, keep[0] if keep.ndim > x.ndim else keep, p, inplace)


_ELEMENTS = _Kind(_elements, zero)
_KINDS: dict[Callable[..., Tensor], _Kind] = {
    nn.Dropout.forward: _ELEMENTS,
    nn.Dropout1d.forward: _Kind(_channels_1d, zero),
    nn.Dropout2d.forward: _Kind(_channels, zero),
    nn.Dropout3d.forward: _Kind(_channels_3d, zero),
    nn.AlphaDropout.forward: _Kind(_elements, saturate),
    nn.FeatureAlphaDropout.forward: _Kind(_channels, saturate),
}

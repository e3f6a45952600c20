"""Masks of dropout, pure functions of seed, step, layer, sample and position; and noise that is keyed alike.

Each hash (hashing.py) serves two neighbouring elements, 32 bits each: probabilities are exact to 2⁻³². Where
Triton is installed, `kernel` computes the same bits on a CUDA device in one pass, with nothing kept for the
backward pass but what decides the mask:

    forward     output = x · mask / (1 - p)
    backward    gradient of x = gradient · mask / (1 - p), with the mask computed again

Elsewhere a mask costs more to compute than to keep, and `modules` multiplies by it.
"""

import math
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from echelon.errors import UserError
from echelon.nn.dropout.training_position import check_samples, next_use
from echelon.nn.hashing import WEYL, hash_text, mix_, moved, signed, signed_key
from echelon.nn.triton_support import has_triton
from echelon.nn.wrapping import Wrapping


class Runs(NamedTuple):
    """The elements of a sample on this rank: runs of consecutive ones, all of one length. Run r begins at

        ((indices[r // inner] · inner + r % inner) · ranks + rank) · length

    of the whole sample, where `indices` are those of dim 1 (0, 1, 2 … if all of it is here). Every begin is a
    multiple of the length.
    """

    num_runs: int
    length: int
    inner: int = 1
    rank: int = 0
    ranks: int = 1

    @property
    def has_whole_words(self) -> bool:
        """True if no hash of two neighbouring elements decides for two runs."""
        return self.length % 2 == 0


def runs_of(shape: Sequence[int], *, has_indices: bool, feature_part: tuple[int, int] | None) -> Runs:
    """Return the runs of a sample, for elements of `shape` whose dim 0 counts samples.

    runs_of((8, 5, 6), has_indices=True, feature_part=None)         # 5 runs of 6 elements
    """
    if feature_part is not None:
        assert len(shape) > 1, "the last dim counts features, and not samples"
        return Runs(prod(shape[1:-1]), shape[-1], prod(shape[2:-1]), *feature_part)
    return Runs(shape[1], prod(shape[2:])) if has_indices else Runs(1, prod(shape[1:]))


_BITS = 32  # bits of a hash that decide one element
_PER_WORD = 64 // _BITS

# Words hashed at a time, which bounds the memory beside the mask. On a CPU they fit a cache.
_CPU_TILE, _GPU_TILE = 1 << 16, 1 << 22


class Draw(NamedTuple):
    """A mask without its shape, whose dim 0 counts samples.

    Element j of sample s is decided by hash(key, first_sample + s, j) and nothing else: a sample keeps the
    same elements however the batch is split.
    `indices`: the indices in the whole sample of dim 1, where a rank holds a part of it.
    `feature_part`: (1, 4) where the last dim is the second quarter of the whole one; together with
    `indices`, the last dim must not be dim 1.
    """

    key: int | Tensor
    first_sample: int | Tensor
    p: float
    indices: Tensor | None = None
    feature_part: tuple[int, int] | None = None

    @property
    def scale(self) -> float:
        """The factor of kept elements."""
        return 1.0 if self.p == 1 else 1 / (1 - self.p)

    def runs(self, shape: Sequence[int]) -> Runs:
        """Return the part of a whole sample that a tensor of this shape has."""
        return runs_of(shape, has_indices=self.indices is not None, feature_part=self.feature_part)


def mask_of(draw: Draw, shape: Sequence[int], device: torch.device | str) -> Tensor:
    """Draw a mask: True where an element is kept, with probability 1 - p."""
    if draw.p == 0:
        return torch.ones(*shape, dtype=torch.bool, device=device)
    keys = sample_keys(draw.key, draw.first_sample, shape[0], device)
    runs = draw.runs(shape)
    words, numbers = _words(runs, draw.indices, device)
    kept = torch.empty(len(keys), len(words) * _PER_WORD, dtype=torch.bool, device=device)
    counters = words.mul_(signed(WEYL))
    for rows, columns in _tiles(len(keys), len(words), kept.device):
        hashes = mix_(keys[rows, None] + counters[columns])
        halves = slice(columns.start * _PER_WORD, columns.stop * _PER_WORD)
        torch.lt(hashes.view(torch.int32), threshold(draw.p), out=kept[rows, halves])
    if numbers is not None:  # each element has a hash of its own, of which one half is its own
        by_hash = kept.view(len(kept), -1, _PER_WORD)
        kept = by_hash.gather(2, (numbers % _PER_WORD).expand(len(kept), -1)[..., None])[..., 0]
    return kept[:, : runs.num_runs * runs.length].reshape(*shape)


def _tiles(rows: int, columns: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield parts of whole rows, or of one row if it is long."""
    tile = _CPU_TILE if device.type == "cpu" else _GPU_TILE
    width = max(1, min(columns, tile))
    height = tile // width
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield slice(top, top + height), slice(left, min(left + width, columns))


def _words(runs: Runs, indices: Tensor | None, device: torch.device | str) -> tuple[Tensor, Tensor | None]:
    """Return the numbers of the hashes that decide the elements of a sample, in order. Where elements do not
    come in whole words, each has a hash of its own. Then the second result is the numbers of the elements."""
    if runs.num_runs == 1 and runs.rank == 0 and indices is None:
        return torch.arange(-(-runs.length // _PER_WORD), device=device), None
    begins = _begins(runs, indices, device)
    if runs.has_whole_words:
        in_run = torch.arange(runs.length // _PER_WORD, device=device)
        return (begins[:, None] // _PER_WORD + in_run).flatten(), None
    numbers = (begins[:, None] + torch.arange(runs.length, device=device)).flatten()
    return numbers // _PER_WORD, numbers


def _begins(runs: Runs, indices: Tensor | None, device: torch.device | str) -> Tensor:
    """Return where each run begins in the whole sample."""
    number = torch.arange(runs.num_runs, device=device)
    outer = number // max(1, runs.inner)
    outer = outer if indices is None else indices.to(device)[outer]
    return ((outer * runs.inner + number % max(1, runs.inner)) * runs.ranks + runs.rank) * runs.length


def sample_keys(key: int | Tensor, first: int | Tensor, samples: int, device: torch.device | str) -> Tensor:
    """Return a key for each sample, from the number `first` of the global batch on."""
    numbers = torch.arange(samples, device=device).add_(moved(first, device))
    return mix_(numbers.mul_(signed(WEYL)).add_(moved(signed_key(key), device)))


def threshold(p: float) -> int:
    """Return the number below which a fraction 1 - p of all signed numbers of `_BITS` bits lies."""
    half = 1 << (_BITS - 1)
    return min(round((1 - p) * 2 * half) - half, half - 1)


_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def has_kernel(x: Tensor) -> bool:
    """Return True if a kernel drops elements of `x` in one pass."""
    return x.is_cuda and x.dtype in _KERNEL_TYPES and has_triton()


def drop(x: Tensor, draw: Draw, *, inplace: bool = False) -> Tensor:
    """Compute x · mask / (1 - p), in the memory of `x` if `inplace`. Modes see one function of torch."""
    if has_torch_function_unary(x):
        overridden: Tensor = handle_torch_function(drop, (x,), x, draw, inplace=inplace)
        return overridden
    function: Any = _Drop.apply
    dropped: Tensor = function(x, draw, inplace)
    return dropped


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, draw: Draw, inplace: bool) -> Tensor:
        ctx.draw = draw
        ctx.set_materialize_grads(False)
        if not inplace:
            return dropped(x, draw)
        ctx.mark_dirty(x)
        return drop_into(x, x, draw)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None if gradient is None else drop(gradient, ctx.draw), None, None


def dropped(x: Tensor, draw: Draw) -> Tensor:
    """Compute x · mask / (1 - p), without a gradient, in new memory with the strides of `x`."""
    return drop_into(torch.empty_like(x), x, draw)


def drop_into(output: Tensor, x: Tensor, draw: Draw) -> Tensor:
    """Write `dropped` into the memory of `output`, which may be that of `x`."""
    if x.numel() and has_kernel(x):
        from echelon.nn.dropout import kernel  # imports Triton

        if kernel.fits(x.shape, draw):
            target = (
                output if output.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)
            )
            kernel.drop_into(target, x.contiguous(), draw)
            return output if target is output else output.copy_(target)
    return torch.mul(x, mask_of(draw, x.shape, x.device), out=output).mul_(draw.scale)


# Random numbers for modules that draw by themselves (gates of experts), keyed as masks of dropout are.
#
# A module that draws has an attribute `noise`. `key_dropout` gives it the module's name; then its numbers
# depend on seed, step, name, sample and position, and not on the plan.


_MOST_HASHES = 1 << 22  # computed at a time: bounds the memory beside the result


@final
class KeyedNoise:
    """Numbers for elements [samples, positions, …] of one module. Outside every scope torch draws them."""

    def __init__(self) -> None:
        self.name: str | None = None  # where it has one, numbers are drawn from the open scope

    def normal(self, shape: Sequence[int], like: Tensor, positions: Tensor | None = None) -> Tensor:
        """Draw from N(0, 1), in the type and on the device of `like`. `positions`: those of the whole sample
        that dim 1 has; None: all of them."""
        # u is never 0 or 1, so no number is infinite: 32 bits reach ±6.3.
        return self._draw(shape, like, positions).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2)).to(like.dtype)

    def uniform(self, shape: Sequence[int], like: Tensor, positions: Tensor | None = None) -> Tensor:
        """Draw uniform numbers of (0, 1); see `normal`."""
        below_one = 1 - torch.finfo(like.dtype).eps / 2  # to which float32 rounds what is nearer to 1
        return self._draw(shape, like, positions).to(like.dtype).clamp_max_(below_one)

    def _draw(self, shape: Sequence[int], like: Tensor, positions: Tensor | None) -> Tensor:
        """Draw multiples of 2⁻³², and half of that more; in float64. Not for compiled code."""
        layer = None if self.name is None else hash_text(self.name)
        use_of_scope = None if layer is None else next_use(layer)
        if layer is None or use_of_scope is None:
            self._refuse_recomputation()
            bits = torch.randint(2**32, tuple(shape), device=like.device)
            return bits.double().add_(0.5).mul_(2.0**-32)
        position, use = use_of_scope
        check_samples(f"noise of {self.name or 'the model'}", shape)
        key = position.key(layer, use)
        return _keyed(sample_keys(key, position.first_sample, shape[0], like.device), shape, positions)

    def _refuse_recomputation(self) -> None:
        """Refuse a second draw in a backward pass: it would differ from the first, and gradients be wrong."""
        if self.name is not None and torch._C._current_graph_task_id() != -1:
            raise UserError(
                f"noise of {self.name or 'the model'} is drawn again in the backward pass, where its "
                "position in the training is not known (torch.utils.checkpoint?): do not checkpoint it "
                "(recompute=full replays noise), or leave noise to torch with parallelize(seed=None)"
            )


def _keyed(keys: Tensor, shape: Sequence[int], positions: Tensor | None) -> Tensor:
    """Draw numbers of samples with these keys; `positions` are those of dim 1."""
    columns = math.prod(shape[2:])
    drawn = torch.empty(shape[0], shape[1] * columns, dtype=torch.float64, device=keys.device)
    width = max(1, min(drawn.shape[1], _MOST_HASHES))
    height = _MOST_HASHES // width
    for left in range(0, drawn.shape[1], width):
        counters = torch.arange(left, min(left + width, drawn.shape[1]), device=keys.device)
        if positions is not None:
            here = positions.to(keys.device)[counters.div(columns, rounding_mode="floor")]
            counters = here.mul_(columns).add_(counters.remainder_(columns))
        counters.mul_(signed(WEYL))
        for top in range(0, shape[0], height):
            hashes = mix_(keys[top : top + height, None] + counters)
            high = (hashes >> 32).bitwise_and_(2**32 - 1)
            drawn[top : top + height, left : left + width] = high.double().add_(0.5).mul_(2.0**-32)
    return drawn.view(tuple(shape))


def noises(model: nn.Module) -> dict[str, KeyedNoise]:
    """Return the noise of every module of `model` that has one, by the module's name in it."""
    found = {name: getattr(module, "noise", None) for name, module in model.named_modules()}
    return {name: noise for name, noise in found.items() if isinstance(noise, KeyedNoise)}


def key_noise(model: nn.Module, wrapping: Wrapping) -> None:
    """Let all noise of a whole model draw from the open scope. The first name stays, as with dropout."""
    for name, noise in noises(model).items():
        if noise.name is None:
            wrapping.assign(noise, "name", name)

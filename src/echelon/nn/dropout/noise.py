"""Random numbers for modules that draw by themselves (gates of experts), keyed as masks of dropout are.

A module that draws has an attribute `noise`. `key_dropout` gives it the module's name; then its numbers
depend on seed, step, name, sample and position, and not on the plan.
"""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.nn.dropout.mask import sample_keys
from echelon.nn.dropout.training_position import check_samples, next_use
from echelon.nn.hashing import WEYL, hash_text, mix_, signed
from echelon.nn.wrapping import Wrapping

_MOST_HASHES = 1 << 22  # computed at a time: bounds the memory beside the result


@final
class KeyedNoise:
    """Numbers for elements [samples, positions, …] of one module. Outside every scope torch draws them."""

    def __init__(self) -> None:
        self.name: str | None = None  # where it has one, numbers are drawn from the open scope

    def normal(self, shape: Sequence[int], like: Tensor, positions: Tensor | None = None) -> Tensor:
        """Draw from N(0, 1), in the type and on the device of `like`.

        `positions`: those of the whole sample that dim 1 has; None: all of them.
        """
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

"""Arguments of attention that have a part for each head (biases by distance, masks): a rank takes its own."""

from inspect import signature
from typing import Any, final

from torch import Tensor, nn

from echelon.errors import UserError


@final
class TakeHeads:
    """A forward pre-hook: of one argument, the part for this rank's heads."""

    def __init__(self, module: nn.Module, argument: str, heads: int, rank: int, ranks: int) -> None:
        self.argument, self.heads, self.rank, self.ranks = argument, heads, rank, ranks
        self.place = list(signature(type(module).forward).parameters).index(argument) - 1  # without self

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.argument in kwargs:
            return args, {**kwargs, self.argument: self._take(kwargs[self.argument])}
        if self.place < len(args):
            return (*args[: self.place], self._take(args[self.place]), *args[self.place + 1 :]), kwargs
        return args, kwargs

    def _take(self, value: Any) -> Any:
        """[batch, heads, …], or [batch · heads, …] of three dims. One part for all heads stays as it is."""
        if not isinstance(value, Tensor) or (value.ndim != 3 and value.shape[1] == 1):
            return value
        by_heads = value.unflatten(0, (-1, self.heads)) if value.ndim == 3 else value
        if by_heads.shape[1] != self.heads:
            raise UserError(
                f"tensor={self.ranks}: the argument {self.argument} of shape {list(value.shape)} must have a "
                f"part for each of {self.heads} heads along dim 1 (or batch · heads along dim 0 of three); "
                "fix the number in the table"
            )
        part = by_heads.chunk(self.ranks, 1)[self.rank]
        return part.flatten(0, 1) if value.ndim == 3 else part

"""Building on the meta device so that a tape sees all of it, also what torch leaves out there."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

from echelon.nn.initialization.tape import Tape, on_meta

_IS_META: Any = vars(torch._C.TensorBase)["is_meta"].__get__
_MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Inside, tensors are made on the meta device, and `tape` takes note of what they would hold."""
    with torch.device("meta"), _NothingLeftOut(), _truncated_draws(tape), tape:
        yield


class _NothingLeftOut(TorchFunctionMode):
    """Where torch would lose values because a tensor is on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META and sys._getframe(1).f_globals.get("__name__") == init.__name__:
            return False  # torch.nn.init gives a tensor of the meta device no values at all
        has_numbers = bool(args) and not isinstance(args[0], Tensor)
        if func not in _MADE_OF_NUMBERS or not has_numbers or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        made: Tensor = func(*args, **{**kwargs, "device": "cpu"})  # keeps the numbers
        # With torch.tensor([]) transformers asks for the device; on "meta" it leaves initial values out.
        return made.to("meta") if made.numel() else made


@contextmanager
def _truncated_draws(tape: Tape) -> Iterator[None]:
    """torch draws a truncated normal distribution again and again until it likes what it sees: one draw."""
    draw: Any = init._no_grad_trunc_normal_

    def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not on_meta(tensor):
            return tensor if tape.keeps(tensor) else draw(tensor, *args, **kwargs)
        tape.note_draw(draw, tensor, *args, **kwargs)
        return tensor

    init._no_grad_trunc_normal_ = note
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = draw

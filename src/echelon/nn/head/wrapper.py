"""The head of a model: its logits wait for the loss (deferred.py) where nothing else reads them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor, nn

from echelon.nn.head.deferred import defer
from echelon.nn.losses import VocabularyPart
from echelon.nn.tracing import is_transformed
from echelon.nn.wrapping import Wrapper, has_entry, replaced_forward

# Columns from which logits are large beside the hidden states: the head is a vocabulary, not some classes.
_LEAST_COLUMNS = 1024
_OTHERS = ("float64", "expert", "float8")  # entries that compute something else
_LOW = (
    torch.bfloat16,
    torch.float16,
)  # in float32 and float64 losses are those of plain torch to the last bit


@dataclass
class Deferral:
    """Whether logits may wait now: in a forward pass whose output goes to a loss that the engine knows, and
    to nothing else. `differentiates`: and back; a part without gradients is then a checkpoint's."""

    is_allowed: bool = False
    differentiates: bool = False


class SplitHead(Protocol):
    """A head of which this rank has some of the columns."""

    def enter(self, x: Tensor) -> Tensor: ...

    def part(self) -> VocabularyPart | None: ...


@final
class DeferredHead(Wrapper):
    """The last linear layer of a model below float32."""

    entry = "head"

    def __init__(
        self, module: nn.Module, deferral: Deferral, *, compiled: bool, split: SplitHead | None = None
    ) -> None:
        """`compiled`: the layer that it is in is. The logits that wait stay outside of its graph."""
        super().__init__(module)
        self._deferral, self._compiled, self._split = deferral, compiled, split
        self._call = self._make_call()

    def _make_call(self) -> Callable[..., Any]:
        # Made before a graph is recorded: what is assigned in the middle of one is assigned too late.
        return torch.compiler.disable(self._run) if self._compiled else self._run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._deferral.is_allowed and not kwargs and len(args) == 1 and self._suits(args[0]):
            weight, bias = cast(Any, self.module.weight), cast(Any, self.module.bias)
            if self._split is None:
                return defer(args[0], weight, bias)
            return defer(self._split.enter(args[0]), weight, bias, self._split.part())
        return self.inner(*args, **kwargs)

    def _suits(self, hidden: Any) -> bool:
        weight: Any = self.module.weight
        if type(hidden) is not Tensor or hidden.dim() < 2:
            return False
        if torch.is_grad_enabled() != self._deferral.differentiates:
            return False
        if hidden.dtype not in _LOW or hidden.dtype != weight.dtype or is_transformed():
            return False
        return not torch.is_autocast_enabled(hidden.device.type)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_call": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._call = self._make_call()


def find_head(module: nn.Module) -> nn.Linear | None:
    """Return the last linear layer of a module, if it has a vocabulary of outputs and its class's forward."""
    linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
    head = linears[-1] if linears else None
    if head is None or head.out_features < _LEAST_COLUMNS or type(head).forward is not nn.Linear.forward:
        return None
    is_changed = replaced_forward(head) is not None or any(has_entry(head, name) for name in _OTHERS)
    return None if is_changed else head

"""One training, as data that ranks can rebuild: the model, the batches, the loss, the optimizer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from echelon.errors import UserError
from echelon.nn.batch import tensors_of
from echelon.nn.dropout.modules import recurrent_dropout
from echelon.nn.huggingface.families import frequencies
from echelon.nn.huggingface.modules import casts_to_float32
from echelon.nn.initialization.initial_values import is_deferred
from echelon.nn.wrapping import Wrapper, Wrapping


@dataclass(frozen=True)
class Case:
    """One training to compare with one device. Functions must be importable, as for `launch`."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]  # the global batch of a step: (inputs, targets), or a dict with labels
    loss: Callable[[Any, Any], Any] | None  # None: the model's own, `output.loss`
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int = 20
    clip: float | None = 1.0
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # more arguments for `parallelize`

    def build(self, rank: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The model in `dtype`, in training mode, from the case's seed.

        Other ranks start from other weights, so that a plan that forgets to make them equal is found.
        """
        torch.manual_seed(self.seed + rank)
        model = self.make_model()
        random = recurrent_dropout(model)
        if random:
            raise UserError(
                f"dropout inside {', '.join(random)}: torch draws the masks between recurrent layers by "
                "itself, so that no two layouts can be compared; set it to 0, or use nn.Dropout there"
            )
        if not is_deferred(model):  # the engine converts what it fills
            _convert(model, dtype)
        if dtype == torch.float64:
            patch_float64(model)
        return model.train()

    def without_casts(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Inside, the model's own loss keeps to float64: that of transformers casts logits to float32."""
        return Float64() if self.loss is None and dtype == torch.float64 else nullcontext()

    def round_start(self, dtype: torch.dtype) -> "Case":
        """The same case, starting from weights that `dtype` can hold."""
        return replace(self, make_model=partial(_make_rounded, self.make_model, dtype))

    def batches(self, dtype: torch.dtype = torch.float64) -> list[Any]:
        """The global batches of all steps, in float64, or in float32 for types below."""
        dtype = torch.promote_types(dtype, torch.float32)
        return [cast_floats(self.make_batch(step), dtype) for step in range(self.steps)]


def cast_floats(structure: Any, dtype: torch.dtype) -> Any:
    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(convert, structure)


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Below float32, frequencies of rotary positions stay as they are: rounded, they would be useless."""
    kept = {id(buffer) for buffer in frequencies(model)} if dtype.itemsize < 4 else set()
    model._apply(lambda t: t.to(dtype) if t.is_floating_point() and id(t) not in kept else t)


def _make_rounded(make_model: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    model = make_model()
    _convert(model, dtype)
    return model.float()


# Float64 all the way: what transformers computes in float32, whatever the type of the model.

_CONVERSIONS = (Tensor.float, Tensor.to, Tensor.type)


def patch_float64(model: nn.Module) -> None:
    """Keep modules of transformers in float64 where they would cast down to float32."""
    wrapping = Wrapping()
    for module in model.modules():
        if casts_to_float32(module):
            wrapping.wrap(_Float64Forward(module))


@final
class _Float64Forward(Wrapper):
    entry = "float64"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with Float64():
            return self.inner(*args, **kwargs)


class Float64(TorchFunctionMode):
    """Inside, a function of a float64 tensor that asks for float32 gets float64, and so does the conversion
    of integers, as of positions that are multiplied with frequencies."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = (args, kwargs or {})
        tensors = tensors_of(arguments)
        converts_integers = func in _CONVERSIONS and not tensors[0].is_floating_point()
        if converts_integers or any(tensor.dtype == torch.float64 for tensor in tensors):
            func = Tensor.double if func is Tensor.float else func
            arguments = tree_map(lambda leaf: torch.float64 if leaf is torch.float32 else leaf, arguments)
        args, kwargs = arguments
        return func(*args, **kwargs)

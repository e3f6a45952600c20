"""What the readers of other systems' checkpoints have in common: tensors by name, read when asked for."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.state.weight_files.tensor_file import TensorEntry

# Of a state dict of several objects: the model's own part, and what is not of a model.
MODEL_PREFIXES = ("app.model.", "model.", "module.", "state_dict.", "")
OTHERS = ("optim", "app.optim", "lr_scheduler", "scheduler", "dataloader", "train_state", "rng")


Shape = tuple[int, ...]
Described = tuple[Shape, torch.dtype]
PARAMETERS = "parameters"  # the names of a group's parameters, among its options


def describe(tensor: Tensor) -> Described:
    return tuple(tensor.shape), tensor.dtype


class ForeignOptimizer(NamedTuple):
    """The state of an optimizer. `shapes`: of each part (exp_avg, step, …) of a named parameter, as `read`
    puts it together. `groups`: the options of its groups, with the names of their parameters."""

    shapes: dict[tuple[str, str], Described]
    read: Callable[[str, str], Tensor]
    groups: list[dict[str, Any]]

    @property
    def steps(self) -> int:
        """The steps that were made, as the parameters count them."""
        counts = [int(self.read(name, part)) for name, part in self.shapes if part == STEP]
        return max(counts, default=0)


STEP = "step"
_PLAIN = (bool, int, float, str, type(None))


def plain_options(group: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The options of a group that are plain values: lr, betas, …"""
    for name, value in group.items():
        value = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
        values = value if isinstance(value, tuple | list) else (value,)
        if name not in ("params", "param_names", STEP) and all(isinstance(each, _PLAIN) for each in values):
            yield str(name), value


def as_step(value: Tensor | float) -> Tensor:
    """A count of steps as torch's optimizers keep it."""
    return torch.as_tensor(value, dtype=torch.float32).reshape(())


class ForeignTensors(NamedTuple):
    """Tensors of a checkpoint. `read` puts one together; `kind` names the format, `skipped` lists what is no
    tensor. `optimizer` reads what there is of one; `aliases` are further names of tied tensors, and `steps`
    those of the training, if it is known."""

    kind: str
    shapes: dict[str, Described]
    read: Callable[[str], Tensor]
    skipped: tuple[str, ...] = ()
    optimizer: Callable[[], ForeignOptimizer] | None = None
    aliases: frozenset[str] = frozenset()
    steps: int | None = None

    def entries(self, names: Iterable[str], dtype: torch.dtype | None, prefix: str) -> list[TensorEntry]:
        """As they are to be written, without the prefix; numbers that are not real keep their type."""
        made = []
        for name in names:
            shape, stored = self.shapes[name]
            wanted = dtype if dtype is not None and stored.is_floating_point else stored
            made.append(TensorEntry(name.removeprefix(prefix), shape, wanted))
        return made

    def like(self, name: str) -> Tensor:
        shape, dtype = self.shapes[name]
        return torch.empty(shape, dtype=dtype, device="meta")

    def weights(self, prefix: str | None) -> tuple[str, list[str]]:
        """The model's tensors and what stands before their names: `prefix`, or what is found.

        {"model": …, "optimizer": …} has model.layers.0.weight and optimizer.state.…: the prefix is "model.".
        A model whose own names begin so (those of transformers) has no optimizer beside it.
        """
        names = [name for name in self.shapes if not name.startswith(OTHERS)]
        if prefix is None:
            has_others = len(names) < len(self.shapes) or any(
                each.startswith(OTHERS) for each in self.skipped
            )
            found = [
                each for each in MODEL_PREFIXES if names and all(name.startswith(each) for name in names)
            ]
            prefix = next((each for each in found if has_others or each in ("module.", "app.model.", "")), "")
        chosen = sorted(name for name in names if name.startswith(prefix) and name != prefix)
        if not chosen:
            first = ", ".join(sorted({name.split(".")[0] for name in self.shapes})[:10]) or "nothing"
            raise UserError(
                f"no tensor's name begins with '{prefix}'; names begin with {first}: set --prefix"
            )
        return prefix, chosen

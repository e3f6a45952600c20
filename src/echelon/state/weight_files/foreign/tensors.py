"""What the readers of other systems' checkpoints have in common: tensors by name, read when asked for."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.state.weight_files.tensor_file import TensorEntry

# Of a state dict of several objects: the model's own part, and what is not of a model.
MODEL_PREFIXES = ("app.model.", "model.", "module.", "state_dict.", "")
_OTHERS = ("optim", "app.optim", "lr_scheduler", "scheduler", "dataloader", "train_state", "rng")


class ForeignTensors(NamedTuple):
    """Tensors of a checkpoint. `read` puts one together; `kind` names the format, `skipped` lists what is no
    tensor."""

    kind: str
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    read: Callable[[str], Tensor]
    skipped: tuple[str, ...] = ()

    def entries(self, names: Iterable[str], dtype: torch.dtype | None, prefix: str) -> list[TensorEntry]:
        """As they are to be written, without the prefix; numbers that are not real keep their type."""
        made = []
        for name in names:
            shape, stored = self.shapes[name]
            wanted = dtype if dtype is not None and stored.is_floating_point else stored
            made.append(TensorEntry(name.removeprefix(prefix), shape, wanted))
        return made

    def weights(self, prefix: str | None) -> tuple[str, list[str]]:
        """The model's tensors and what stands before their names: `prefix`, or what is found.

        {"model": …, "optimizer": …} has model.layers.0.weight and optimizer.state.…: the prefix is "model.".
        A model whose own names begin so (those of transformers) has no optimizer beside it.
        """
        names = [name for name in self.shapes if not name.startswith(_OTHERS)]
        if prefix is None:
            has_others = len(names) < len(self.shapes) or any(
                each.startswith(_OTHERS) for each in self.skipped
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

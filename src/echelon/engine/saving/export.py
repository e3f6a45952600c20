"""The weights of an engine as a Hugging Face folder, written by rank 0, one tensor after the other."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from echelon.collectives.agreement import check_on_every_rank
from echelon.errors import UserError, raise_errors
from echelon.launching.watch.pulse import beat
from echelon.nn.huggingface import config_json, weight_layout
from echelon.nn.huggingface.modules import is_pretrained
from echelon.nn.huggingface.weight_layouts import write_generation_config
from echelon.state.assembly import Assembly, Key
from echelon.state.ownership import VALUE, StateNames
from echelon.state.weight_files.folder_writer import write_folder


def export(
    model: nn.Module, names: StateNames, assembly: Assembly, folder: str | Path, rank: int, shard_bytes: int
) -> None:
    """Write the weights that all ranks own. On every rank; an error of rank 0 is raised on all."""
    state = _whole_state(model, names, assembly)
    layout = weight_layout(model, state=state)
    raise_errors(f"{type(model).__name__} cannot be written", list(layout.problems))
    stream = _Stream(assembly, {name: (names.state[name], VALUE) for name in layout.needed_names()})

    def write() -> None:
        try:
            if rank == 0:
                entries = layout.entries({name: tensor.dtype for name, tensor in state.items()})
                config = config_json(model, entries[0].dtype)
                write_generation_config(model, folder)
                write_folder(folder, entries, layout.joined(stream.fetch), config, shard_bytes)
        finally:
            stream.finish()  # ranks bring their parts of all tensors, whether these are written or not

    check_on_every_rank(write)


def check_pretrained(model: nn.Module) -> None:
    """Refuse a model that transformers has no names for."""
    if not is_pretrained(model):
        raise UserError(
            f"save_pretrained: {type(model).__name__} is not a model of transformers; engine.export(folder) "
            "writes the weights of any model"
        )


def _whole_state(model: nn.Module, names: StateNames, assembly: Assembly) -> dict[str, Tensor]:
    """Return the state dict with tensors of the meta device; of tied tensors one. What is no tensor stays."""
    whole: dict[str, Tensor] = {name: assembly.like((name, part)) for name, part in assembly}
    local = model.state_dict(keep_vars=True)
    return {
        name: whole[first] if first in whole else local[name]
        for name, first in names.state.items()
        if first in whole or name in local
    }


class _Stream:
    """Whole tensors for rank 0 in one order; every rank brings its parts of each.

    A rank that fails inside a tensor leaves the others there. It brings nothing more: they would take the
    next tensor for this one.
    """

    def __init__(self, assembly: Assembly, keys: Mapping[str, Key]) -> None:
        self._assembly = assembly
        self._keys = iter(keys.items())
        self._is_inside_tensor = False

    def fetch(self, name: str) -> Tensor:
        """Return the next tensor, in host memory."""
        expected, key = next(self._keys)
        assert name == expected, "all ranks have one order"
        tensor = self._bring(key)
        assert tensor is not None
        return tensor.cpu()

    def finish(self) -> None:
        """Bring what was not fetched."""
        if not self._is_inside_tensor:
            for _, key in self._keys:
                self._bring(key)

    def _bring(self, key: Key) -> Tensor | None:
        self._is_inside_tensor = True
        tensor = self._assembly.tensor(key, to=0)
        self._is_inside_tensor = False
        beat()  # rank 0 writes it, and the others wait
        return tensor

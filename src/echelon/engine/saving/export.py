"""The weights of an engine as a Hugging Face folder, written by rank 0, one tensor after the other."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from echelon.collectives.agreement import agree_on_every_rank, check_on_every_rank
from echelon.errors import UserError, raise_errors
from echelon.launching.watch.pulse import beat
from echelon.nn.huggingface import config_json, weight_layout
from echelon.nn.huggingface.adapters import (
    adapted_layers,
    adapted_model,
    adapter_files,
    has_adapters,
    merge_layer,
    merged_form,
    write_adapter,
)
from echelon.nn.huggingface.modules import is_pretrained
from echelon.nn.huggingface.weight_layouts import write_generation_config
from echelon.state.assembly import Assembly, Key
from echelon.state.ownership import VALUE, StateNames
from echelon.state.weight_files.layout import WeightLayout
from echelon.state.weight_files.tensor_file import TensorEntry
from echelon.state.weight_files.weight_folder import write_folder

Fetch = Callable[[str], Tensor]


def export(
    model: nn.Module, names: StateNames, assembly: Assembly, folder: str | Path, rank: int, shard_bytes: int
) -> None:
    """Write the weights that all ranks own. On every rank; an error of rank 0 is raised on all."""
    state = _whole_state(model, names, assembly)
    layout = weight_layout(model, state=state)
    stream = _Stream(assembly, names, {name: [name] for name in layout.needed_names()})
    _write_model(model, state, layout, stream.fetch, folder, shard_bytes, partial(stream.write, rank=rank))


def save_pretrained(
    model: nn.Module,
    names: StateNames,
    assembly: Assembly,
    folder: str | Path,
    rank: int,
    shard_bytes: int,
    *,
    merged: bool,
) -> None:
    """Write a model of transformers, the adapters of one of peft, or that with its adapters `merged`."""
    if has_adapters(model):
        if merged:
            _export_merged(model, names, assembly, folder, rank, shard_bytes)
        else:
            _export_adapters(model, names, assembly, folder, rank)
        return
    if merged:
        raise UserError(
            f"save_pretrained(merged=True): {type(model).__name__} has no adapters of peft to merge; leave "
            "out merged=True"
        )
    if not is_pretrained(model):
        raise UserError(
            f"save_pretrained: {type(model).__name__} is not a model of transformers; engine.export(folder) "
            "writes the weights of any model"
        )
    export(model, names, assembly, folder, rank, shard_bytes)


def _write_model(
    model: nn.Module,
    state: Mapping[str, Tensor],
    layout: WeightLayout,
    fetch: Fetch,
    folder: str | Path,
    shard_bytes: int,
    write_on_first: Callable[[Callable[[], None]], None],
) -> None:
    raise_errors(f"{type(model).__name__} cannot be written", list(layout.problems))

    def write() -> None:
        entries = layout.entries({name: tensor.dtype for name, tensor in state.items()})
        config = config_json(model, entries[0].dtype)
        write_generation_config(model, folder)
        write_folder(folder, entries, layout.joined(fetch), config, shard_bytes)

    write_on_first(write)


def _export_adapters(
    model: nn.Module, names: StateNames, assembly: Assembly, folder: str | Path, rank: int
) -> None:
    """Write each adapter into its folder, as peft does."""
    state = _whole_state(model, names, assembly)
    # Rank 0 asks peft, which may look at the files of the base model.
    files: dict[str, dict[str, str]]
    files = agree_on_every_rank(lambda: None, lambda _: adapter_files(model, state))
    for adapter, tensors in files.items():
        stream = _Stream(assembly, names, {stored: [name] for stored, name in tensors.items()})
        entries = [
            TensorEntry(stored, tuple(state[n].shape), state[n].dtype) for stored, n in tensors.items()
        ]
        write = partial(write_adapter, model, adapter, folder, entries, stream.fetch)
        stream.write(write, rank)


def _export_merged(
    model: nn.Module, names: StateNames, assembly: Assembly, folder: str | Path, rank: int, shard_bytes: int
) -> None:
    """Write the model without adapters; rank 0 merges one layer after the other."""
    state = _whole_state(model, names, assembly)
    form, layers = merged_form(model, state), adapted_layers(model)
    layout = weight_layout(form)
    inner = adapted_model(model)
    prefix = next((f"{name}." for name, module in model.named_modules() if name and module is inner), "")
    layer_of = {  # the adapted layer that a tensor of the merged model belongs to
        name: next((plain for plain in layers if name.startswith(f"{plain}.")), None)
        for name in layout.needed_names()
    }
    sources: dict[str, list[str]] = {}
    for name, plain in layer_of.items():
        if plain is None:
            sources[name] = [prefix + name]
        else:
            sources.setdefault(plain, [each for each in state if each.startswith(f"{layers[plain]}.")])
    stream = _Stream(assembly, names, sources)
    merged: dict[str, Tensor] = {}  # of the last layer

    def fetch(name: str) -> Tensor:
        plain = layer_of[name]
        if plain is None:
            return stream.fetch(name)
        if name not in merged:
            layer = merge_layer(model, layers[plain], dict(stream.fetch_all(plain)))
            merged.update({f"{plain}.{key}": tensor for key, tensor in layer.state_dict().items()})
        return merged.pop(name)

    whole = form.state_dict(keep_vars=True)
    _write_model(form, whole, layout, fetch, folder, shard_bytes, partial(stream.write, rank=rank))


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
    """Whole tensors for rank 0 in one order; every rank brings its parts of each. A rank that fails inside a
    tensor leaves the others there. It brings nothing more: they would take the next tensor for this one."""

    def __init__(self, assembly: Assembly, names: StateNames, sources: Mapping[str, list[str]]) -> None:
        """`sources`: what is fetched together, in order → names of the state dict."""
        self._assembly = assembly
        keys = {
            group: [(name, (names.state[name], VALUE)) for name in each] for group, each in sources.items()
        }
        self._keys = iter([(group, name, key) for group, each in keys.items() for name, key in each])
        self._sizes = {group: len(each) for group, each in sources.items()}
        self._is_inside_tensor = False

    def write(self, write: Callable[[], None], rank: int) -> None:
        """Let rank 0 write, which fetches, and bring on all ranks what it did not fetch."""

        def run() -> None:
            try:
                if rank == 0:
                    write()
            finally:
                self.finish()  # ranks bring their parts of all tensors, whether these are written or not

        check_on_every_rank(run)

    def fetch(self, group: str) -> Tensor:
        """Return the next tensor, in host memory."""
        ((_, tensor),) = self.fetch_all(group)
        return tensor

    def fetch_all(self, group: str) -> list[tuple[str, Tensor]]:
        """Return the next tensors, by name, in host memory."""
        fetched = []
        for _ in range(self._sizes[group]):
            expected, name, key = next(self._keys)
            assert group == expected, "all ranks have one order"
            tensor = self._bring(key)
            assert tensor is not None
            fetched.append((name, tensor.cpu()))
        return fetched

    def finish(self) -> None:
        """Bring what was not fetched."""
        if not self._is_inside_tensor:
            for _, _, key in self._keys:
                self._bring(key)

    def _bring(self, key: Key) -> Tensor | None:
        self._is_inside_tensor = True
        tensor = self._assembly.tensor(key, to=0)
        self._is_inside_tensor = False
        beat()  # rank 0 writes it, and the others wait
        return tensor

"""The weights of adapters of peft in files, where the model itself has only parts of them.

A twin of a model has other tensors in the same modules: of the meta device, so that peft says which of them
it would write; or whole ones of a single layer, so that peft merges it.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from echelon.errors import UserError
from echelon.nn.huggingface.adapters import LAYER, adapted_model, find_places, is_around
from echelon.state.weight_files.tensor_file import TensorEntry, report_os_errors, write_tensor_file

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of names in files


def make_twin(module: nn.Module, tensors: Mapping[str, Tensor]) -> Any:
    """Return the same modules with these tensors, by name; buffers in no state dict are shared."""
    return _twin(module, "", tensors, {}, {})


def _twin(
    module: nn.Module,
    prefix: str,
    tensors: Mapping[str, Tensor],
    parameters: dict[int, nn.Parameter],
    twins: dict[nn.Module, nn.Module],
) -> nn.Module:
    if module in twins:
        return twins[module]
    twin = twins[module] = copy.copy(module)
    own = vars(twin)
    own.pop("forward", None)  # a wrapper of this module
    own |= {key: copy.copy(value) for key, value in own.items() if isinstance(value, list | dict)}
    for key, value in own["_parameters"].items():
        tensor = tensors.get(prefix + key)
        if tensor is not None:
            value = parameters.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=False))
        own["_parameters"][key] = value
    own["_buffers"] |= {key: tensors[prefix + key] for key in own["_buffers"] if prefix + key in tensors}
    for key, child in own["_modules"].items():
        if child is not None:
            own["_modules"][key] = _twin(child, f"{prefix}{key}.", tensors, parameters, twins)
    return twin


# Adapters alone, as peft writes and reads them.


def adapter_files(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, dict[str, str]]:
    """Return, for each adapter, which tensor of the state dict is written under which name."""
    from peft import get_peft_model_state_dict

    twin = make_twin(model, state)
    tensors = twin.state_dict(keep_vars=True)
    name_of = {id(tensor): name for name, tensor in tensors.items()}
    prefix = "" if is_around(model) else _PREFIX
    files = {}
    for adapter in twin.peft_config:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it writes embeddings too, if they are adapted
            stored = get_peft_model_state_dict(twin, dict(tensors), adapter)
        computed = [name for name, tensor in stored.items() if id(tensor) not in name_of]
        if computed:
            raise UserError(
                f"save_pretrained: peft computes {computed[0]} of adapter '{adapter}' from others when it "
                "writes, which needs all of them in one place; call engine.close() and the save_pretrained "
                "of the model, which is whole then"
            )
        files[adapter] = {prefix + name: name_of[id(tensor)] for name, tensor in stored.items()}
    return files


def write_adapter(
    model: Any,
    adapter: str,
    folder: str | Path,
    entries: Sequence[TensorEntry],
    fetch: Callable[[str], Tensor],
) -> None:
    """Write an adapter where peft looks for it; its config last."""
    path = Path(folder) if adapter == "default" else Path(folder) / adapter
    with report_os_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        (path / _CONFIG).unlink(missing_ok=True)
    write_tensor_file(path / _WEIGHTS, entries, (fetch(entry.name) for entry in entries))
    config, base = copy.deepcopy(model.peft_config[adapter]), adapted_model(model)
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(base).get("name_or_path") or None
    config.inference_mode = True
    kind = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    with report_os_errors(path):
        config.save_pretrained(path, auto_mapping_dict=kind if config.task_type is None else None)


# Adapters merged into the weights of their layers.


def merge_layer(model: nn.Module, name: str, state: Mapping[str, Tensor]) -> nn.Module:
    """Return what the adapted layer `name` of a model becomes, with its tensors in a state dict of the model.

    It is made from a twin, in which nothing is tied: peft changes weights in place.
    """
    own = {key.removeprefix(f"{name}."): each for key, each in state.items() if key.startswith(f"{name}.")}
    layer = make_twin(model.get_submodule(name), own)
    merged: nn.Module
    try:
        if hasattr(layer, "unload_and_optionally_merge_module"):
            merged = layer.unload_and_optionally_merge_module(True, safe_merge=False, adapter_names=None)
        else:
            layer.merge(safe_merge=False, adapter_names=None)
            merged = layer.get_base_layer()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UserError(
            f"save_pretrained(merged=True): peft cannot merge {type(layer).__name__}: {error}; leave out "
            "merged=True, which writes the adapters"
        ) from error
    return merged


def adapted_layers(model: nn.Module) -> dict[str, str]:
    """Return the names of adapted layers: in the model without adapters → in this one."""
    layers: dict[str, str] = {}
    for name, place in find_places(model).items():
        if place.role == LAYER:
            layers.setdefault(place.plain, name)  # the outermost, where several adapt one layer
    return layers


def merged_form(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Return a twin without adapters. `state` has tensors of the meta device, and so has the twin.

    Weights that were tied, of which one was adapted, are tied no more; the config says so.
    """
    layers = adapted_layers(model)
    twin = adapted_model(make_twin(model, state))
    if not layers:
        raise UserError(
            f"save_pretrained(merged=True): {type(model).__name__} has no layers whose adapters could be "
            "merged into their weights; leave out merged=True"
        )
    was_tied = _ties_embeddings(twin)
    for plain, name in layers.items():
        twin.set_submodule(plain, merge_layer(model, name, state))
    twin.__dict__.pop("peft_config", None)
    if was_tied and not _ties_embeddings(twin):
        twin.config = copy.deepcopy(twin.config)
        twin.config.tie_word_embeddings = False
    return twin  # type: ignore[no-any-return]


def _ties_embeddings(model: Any) -> bool:
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return False
    weights = [
        getattr(getattr(module, "base_layer", module), "weight", None)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
    ]
    return weights[0] is not None and weights[0] is weights[1]

"""Adapters of peft: which model is inside of them, what each module of an adapted layer is, and quantised
weights under them.

q_proj                      the adapted layer           plain name "q_proj", role "layer"
q_proj.base_layer           the matrix as it was                  "q_proj"       "base"
q_proj.lora_A.default       the pair of LoRA                      "q_proj"       "lora_A"
lm_head.original_module     before modules_to_save                "lm_head"      "base"
lm_head.modules_to_save.x   the copy that is trained              "lm_head"      "base"
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from echelon.errors import UserError
from echelon.state.weight_files.tensor_file import TensorEntry, report_os_errors, write_tensor_file

_BASES = ("base_layer", "original_module")  # what peft has put its own modules around
_COPIES = "modules_to_save"
BASE, LAYER = "base", "layer"


def has_adapters(model: Any) -> bool:
    """Return True for a model of peft, and for one that peft has put adapters into."""
    return isinstance(getattr(model, "peft_config", None), Mapping) and bool(model.peft_config)


def is_around(model: Any) -> bool:
    """Return True for a model of peft, which is around another model."""
    return has_adapters(model) and hasattr(model, "get_base_model")


def adapted_model(model: Any) -> Any:
    """Return the model inside of adapters, or the model itself."""
    return model.get_base_model() if is_around(model) else model


def reason_not_passed_on(model: Any) -> str:
    """Say why adapters are more than modules inside of a model, and the fix; empty if they are not.

    Most methods replace single layers, and the model of peft passes its input on. Others add tokens, or terms
    to the loss, in a forward of their own.
    """
    if not is_around(model):
        return ""
    tuner: Any = type(model.base_model)
    passes_on = type(model).__module__.startswith("peft.") and any(
        cls.__name__ == "BaseTuner" and cls.forward is tuner.forward for cls in tuner.__mro__
    )
    configs = model.peft_config.values()
    if passes_on and not any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        return ""
    kinds = ", ".join(dict.fromkeys(type(config).__name__ for config in configs))
    return (
        f"it is a {type(model).__name__} of peft, and what {kinds} adds is in its own forward, outside of "
        "all layers; use adapters that replace layers, like LoRA, or data and zero alone"
    )


def predicts_first(model: Any) -> bool:
    """Return True if adapters put tokens before those of a batch, so that its first label counts too."""
    configs = model.peft_config.values() if is_around(model) else ()
    adding = [config.peft_type.value for config in configs if getattr(config, "is_prompt_learning", False)]
    return any(kind not in ("PREFIX_TUNING", "CARTRIDGE") for kind in adding)  # which add keys and values


class Place(NamedTuple):
    """What a module is: `plain` is the name that its layer has in the model without adapters."""

    plain: str
    role: str = ""  # "": no part of an adapted layer


def find_places(model: nn.Module) -> dict[str, Place]:
    """Return the places of all modules by name."""
    inner = adapted_model(model)
    outer = next((name for name, module in model.named_modules() if module is inner), "")
    places: dict[str, Place] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        above, _, own = name.rpartition(".")
        is_inside = f"{name}.".startswith(f"{outer}.") if outer else bool(name)
        if not is_inside:
            places[name] = Place(name)
        else:
            places[name] = Place("") if name == outer else _place(own, module, places[above])
    return places


def _place(own: str, module: nn.Module, above: Place) -> Place:
    """Return the place of the module with the name `own` in one whose place is `above`."""
    if above.role == _COPIES:
        return Place(above.plain, BASE)  # one for each adapter
    if above.role not in ("", BASE, LAYER):
        return above  # inside of what an adapter has added
    if above.role == LAYER and own not in _BASES:
        return Place(above.plain, own)
    plain = above.plain if above.role == LAYER else f"{above.plain}.{own}".removeprefix(".")
    return Place(plain, LAYER if is_adapted(module) else BASE if above.role else "")


def is_adapted(module: Any) -> bool:
    """Return True for a layer that peft has put in the place of another one."""
    children = getattr(module, "_modules", {})
    return type(module).__module__.startswith("peft.") and any(name in children for name in _BASES)


def exchanges_parameter(module: Any) -> bool:
    """Return True for an adapter of a single parameter (target_parameters)."""
    return is_adapted(module) and type(module).__name__ == "ParamWrapper"


# Quantised weights: parameters of a class of their own, which hold packed numbers and scales beside them.


def is_packed(value: object) -> bool:
    """Return True for a parameter of bitsandbytes, or the state of one."""
    return type(value).__module__.startswith("bitsandbytes.")


def scales(parameter: nn.Parameter) -> list[Tensor]:
    """List the tensors that a parameter of bitsandbytes has beside its packed numbers."""
    if not is_packed(parameter):
        return []
    return [each for value in vars(parameter).values() for each in _tensors_in(value)]


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if not is_packed(value):
        return []
    return [each for inner in vars(value).values() for each in _tensors_in(inner)]


# The weights of adapters of peft in files, where the model itself has only parts of them.
#
# A twin of a model has other tensors in the same modules: of the meta device, so that peft says which of them
# it would write; or whole ones of a single layer, so that peft merges it.


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
    It is made from a twin, in which nothing is tied: peft changes weights in place."""
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
    """Return a twin without adapters. `state` has tensors of the meta device, and so has the twin. Weights
    that were tied, of which one was adapted, are tied no more; the config says so."""
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

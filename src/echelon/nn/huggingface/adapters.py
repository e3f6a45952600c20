"""Adapters of peft: which model is inside of them, what each module of an adapted layer is, and quantised
weights under them.

q_proj                      the adapted layer           plain name "q_proj", role "layer"
q_proj.base_layer           the matrix as it was                  "q_proj"       "base"
q_proj.lora_A.default       the pair of LoRA                      "q_proj"       "lora_A"
lm_head.original_module     before modules_to_save                "lm_head"      "base"
lm_head.modules_to_save.x   the copy that is trained              "lm_head"      "base"
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

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


class Place(NamedTuple):
    """What a module is: `plain` is the name that its layer has in the model without adapters."""

    plain: str
    role: str = ""  # "": no part of an adapted layer


def find_places(model: nn.Module) -> dict[str, Place]:
    """Return the places of all modules by name."""
    inner = adapted_model(model)
    outer = next((name for name, module in model.named_modules() if module is inner), "")
    prefix = f"{outer}." if outer else ""
    modules = dict(inner.named_modules(remove_duplicate=False))
    places: dict[str, Place] = {}
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        above = places.get(prefix + parent, Place("")) if name else Place("")
        places[prefix + name if name else outer] = _place(name, own, module, above, modules.get(parent))
    return {name: places.get(name, Place(name)) for name, _ in model.named_modules(remove_duplicate=False)}


def _place(name: str, own: str, module: nn.Module, above: Place, parent: nn.Module | None) -> Place:
    if above.role == _COPIES:  # the names of adapters
        return Place(above.plain, BASE)
    if above.role not in ("", BASE, LAYER):
        return above  # inside of what an adapter has added
    plain = f"{above.plain}.{own}" if above.plain else own
    if above.role == LAYER or (above.role == BASE and is_adapted(parent)):
        if own not in _BASES:
            return Place(above.plain, own)
        plain = above.plain
        return Place(plain, LAYER if is_adapted(module) else BASE)
    return Place(plain if name else "", LAYER if is_adapted(module) else above.role)


def is_adapted(module: Any) -> bool:
    """Return True for a layer that peft has put in the place of another one."""
    children = getattr(module, "_modules", {})
    return type(module).__module__.startswith("peft.") and any(name in children for name in _BASES)


# Quantised weights: parameters of a class of their own, which hold packed numbers and scales beside them.


def is_quantised(parameter: nn.Parameter) -> bool:
    """Return True for a parameter of bitsandbytes, or of any class that is made of several tensors."""
    return bool(scales(parameter)) or hasattr(type(parameter), "__tensor_flatten__")


def scales(parameter: nn.Parameter) -> list[Tensor]:
    """List the tensors that a parameter of bitsandbytes has beside its packed numbers."""
    if not type(parameter).__module__.startswith("bitsandbytes."):
        return []
    return [each for value in vars(parameter).values() for each in _tensors_in(value)]


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if not type(value).__module__.startswith("bitsandbytes."):
        return []
    return [each for inner in vars(value).values() for each in _tensors_in(inner)]

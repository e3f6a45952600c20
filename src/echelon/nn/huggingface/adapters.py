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

"""The model inside of what torch.compile made of it: a plan changes how modules are called, and names are
those of the model itself. `compile=true` in a plan compiles what it has made."""

from torch import nn


def without_compiling(model: nn.Module) -> nn.Module:
    """The model, with no module of it compiled."""
    model = _original(model)
    for module in list(model.modules()):
        if module._compiled_call_impl is not None:  # model.compile()
            module._compiled_call_impl = None
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _original(child)
    return model


def _original(module: nn.Module) -> nn.Module:
    while isinstance(inner := module._modules.get("_orig_mod"), nn.Module):
        module = inner
    return module

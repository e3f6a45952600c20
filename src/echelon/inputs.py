"""The arguments of a model's forward, as part of a batch.

Most models take one value, and a batch holds just that. `Inputs` stands where a model takes several, or some
by name. It is a structure like a tuple or a dict: its tensors are cut into samples, moved and cast with the
rest of the batch.
"""

from typing import Any, final

from torch import nn
from torch.utils._pytree import MappingKey, SequenceKey, register_pytree_node


@final
class Inputs:
    """What a model is called with: Inputs(a, b, mask=mask) calls model(a, b, mask=mask).

    engine.step((echelon.Inputs(a, b, mask=mask), targets))

    `shared` is not for the first layer alone: where a model runs layer by layer, every layer may ask for it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.shared: dict[str, Any] = {}

    def sharing(self, shared: dict[str, Any]) -> "Inputs":
        """The same arguments, beside what every layer may ask for."""
        inputs = Inputs(*self.args, **self.kwargs)
        inputs.shared = shared
        return inputs

    def __repr__(self) -> str:
        named = [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"Inputs({', '.join([*map(repr, self.args), *named])})"


def call(module: nn.Module, inputs: Any) -> Any:
    """Call a module, or the first layer of a model, with the inputs of a batch."""
    return module(*inputs.args, **inputs.kwargs) if isinstance(inputs, Inputs) else module(inputs)


def shared_inputs(inputs: Any) -> dict[str, Any]:
    """What every layer may ask for."""
    return inputs.shared if isinstance(inputs, Inputs) else {}


# As a structure of torch's: the values in order, and how many and under which names they are.
_Form = tuple[int, tuple[str, ...], tuple[str, ...]]


def _flatten(inputs: Inputs) -> tuple[list[Any], _Form]:
    values = [*inputs.args, *inputs.kwargs.values(), *inputs.shared.values()]
    return values, (len(inputs.args), tuple(inputs.kwargs), tuple(inputs.shared))


def _flatten_with_keys(inputs: Inputs) -> tuple[list[Any], _Form]:
    values, form = _flatten(inputs)
    keys: list[Any] = [SequenceKey(index) for index in range(form[0])]
    keys += [MappingKey(name) for name in (*form[1], *form[2])]
    return list(zip(keys, values, strict=True)), form


def _unflatten(values: Any, form: _Form) -> Inputs:
    items, (num_args, names, shared) = list(values), form
    first_shared = num_args + len(names)
    kwargs = dict(zip(names, items[num_args:first_shared], strict=True))
    inputs = Inputs(*items[:num_args], **kwargs)
    inputs.shared = dict(zip(shared, items[first_shared:], strict=True))
    return inputs


register_pytree_node(
    Inputs,
    _flatten,
    _unflatten,
    serialized_type_name="echelon.Inputs",
    flatten_with_keys_fn=_flatten_with_keys,
)

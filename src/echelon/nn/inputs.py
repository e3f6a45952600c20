"""The arguments of a model's forward, as part of a batch.

Most models take one value, and a batch holds just that. `Inputs` stands where a model takes several, or some
by name. It is a structure like a tuple or a dict: its tensors are cut into samples, moved and cast with the
rest of the batch.
"""

from typing import Any, final

from torch import Tensor, nn
from torch.utils._pytree import MappingKey, SequenceKey, register_pytree_node, tree_leaves


@final
class Inputs:
    """What a model is called with: Inputs(a, b, mask=mask) calls model(a, b, mask=mask).

    engine.step((echelon.Inputs(a, b, mask=mask), targets))

    Where a model runs layer by layer, the first layer takes the arguments, `as_one`: as one tuple. `shared`
    are further arguments of the model, which every layer may ask for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.shared: dict[str, Any] = {}
        self.as_one = False

    def for_layers(self, shared: dict[str, Any], *, as_one: bool = False) -> "Inputs":
        """The same for a model that runs layer by layer."""
        inputs = Inputs(*self.args, **self.kwargs)
        inputs.shared, inputs.as_one = shared, as_one
        return inputs

    def __repr__(self) -> str:
        named = [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"Inputs({', '.join([*map(repr, self.args), *named])})"


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model's own forward with the inputs of a batch, also if they were made for its layers."""
    if not isinstance(inputs, Inputs):
        return model(inputs)
    return model(*inputs.args, **inputs.kwargs, **inputs.shared)


def call_stage(stage: nn.Module, inputs: Any) -> Any:
    """Call a stage, or a layer, with the inputs of a batch or what the one before returned."""
    if not isinstance(inputs, Inputs):
        return stage(inputs)
    return stage(inputs.args) if inputs.as_one else stage(*inputs.args, **inputs.kwargs)


def shared_inputs(inputs: Any) -> dict[str, Any]:
    """What every layer may ask for."""
    return inputs.shared if isinstance(inputs, Inputs) else {}


def tensors_of(structure: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists, dicts and Inputs, in their order."""
    if type(structure) is Tensor:  # most are, and torch's walk of a tree costs ten times as much
        return [structure]
    if type(structure) in (tuple, list) and all(type(each) is Tensor for each in structure):
        return list(structure)
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor)]


# As a structure of torch's: the values in order; how many are by position, and the names of the others.
_Form = tuple[int, tuple[str, ...], tuple[str, ...], bool]


def _flatten(inputs: Inputs) -> tuple[list[Any], _Form]:
    values = [*inputs.args, *inputs.kwargs.values(), *inputs.shared.values()]
    return values, (len(inputs.args), tuple(inputs.kwargs), tuple(inputs.shared), inputs.as_one)


def _flatten_with_keys(inputs: Inputs) -> tuple[list[Any], _Form]:
    values, form = _flatten(inputs)
    keys: list[Any] = [SequenceKey(index) for index in range(form[0])]
    keys += [MappingKey(name) for name in (*form[1], *form[2])]
    return list(zip(keys, values, strict=True)), form


def _unflatten(values: Any, form: _Form) -> Inputs:
    items, (num_args, names, shared, as_one) = list(values), form
    first_shared = num_args + len(names)
    kwargs = dict(zip(names, items[num_args:first_shared], strict=True))
    inputs = Inputs(*items[:num_args], **kwargs)
    return inputs.for_layers(dict(zip(shared, items[first_shared:], strict=True)), as_one=as_one)


register_pytree_node(
    Inputs,
    _flatten,
    _unflatten,
    serialized_type_name="echelon.Inputs",
    flatten_with_keys_fn=_flatten_with_keys,
)

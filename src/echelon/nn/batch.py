"""Batches: any structure of tensors whose first dim counts samples, and the arguments of a forward in it.

Most models take one value, and a batch holds just that. `Inputs` stands where a model takes several, or some
by name. It is a structure like a tuple or a dict: its tensors are cut into samples, moved and cast with the
rest of the batch.

Cutting follows numpy's array_split: where samples do not divide evenly the first parts take one more, so
parts may differ by one, and may be empty.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from inspect import Parameter
from types import MethodType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, SequenceKey, register_pytree_node, tree_leaves, tree_map

from echelon.errors import UserError
from echelon.nn.wrapping import replaced_forward

# The types that a plan computes in, by the word of `precision`.
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # but for some products (float8.py)
}


Objective = Callable[[nn.Module, Any], Any]


@final
class Inputs:
    """The arguments of a model: Inputs(a, b, mask=mask) calls model(a, b, mask=mask).

        engine.step((echelon.Inputs(a, b, mask=mask), targets))

    Where a model runs layer by layer, the first layer takes the arguments, `as_one`: as one tuple. `shared`
    are further arguments of the model, which every layer may ask for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.shared: dict[str, Any] = {}
        self.as_one = False

    def for_layers(self, shared: dict[str, Any], *, as_one: bool = False) -> "Inputs":
        """Return the same arguments for a model that runs layer by layer."""
        inputs = Inputs(*self.args, **self.kwargs)
        inputs.shared, inputs.as_one = shared, as_one
        return inputs

    def __repr__(self) -> str:
        named = [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"Inputs({', '.join([*map(repr, self.args), *named])})"


@final
class ObjectiveInputs:
    """A whole batch, of which `objective(model, batch)` computes the loss; the function calls the model."""

    def __init__(self, objective: Objective, batch: Any) -> None:
        self.objective, self.batch = objective, batch


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model's own forward with the inputs of a batch, also if they were made for its layers."""
    if isinstance(inputs, ObjectiveInputs):
        return inputs.objective(model, inputs.batch)
    if not isinstance(inputs, Inputs):
        return model(inputs)
    return model(*inputs.args, **inputs.kwargs, **inputs.shared)


def call_stage(stage: nn.Module, inputs: Any) -> Any:
    """Call a stage, or a layer, with the inputs of a batch or what the one before returned."""
    if not isinstance(inputs, Inputs):
        return call(stage, inputs)
    return stage(inputs.args) if inputs.as_one else stage(*inputs.args, **inputs.kwargs)


def shared_inputs(inputs: Any) -> dict[str, Any]:
    """Return the arguments that every layer may ask for."""
    return inputs.shared if isinstance(inputs, Inputs) else {}


_ONLY_TENSORS = {Tensor}


def tensors_of(structure: Any) -> list[Tensor]:
    """List the tensors of nested tuples, lists, dicts and Inputs, in their order."""
    if type(structure) is Tensor:  # as most are: torch's walk of a tree costs ten times as much
        return [structure]
    if type(structure) in (tuple, list) and {*map(type, structure)} == _ONLY_TENSORS:
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
register_pytree_node(
    ObjectiveInputs,
    lambda inputs: ([inputs.batch], inputs.objective),
    lambda values, objective: ObjectiveInputs(objective, next(iter(values))),
    serialized_type_name="echelon.ObjectiveInputs",
    flatten_with_keys_fn=lambda inputs: ([(MappingKey("batch"), inputs.batch)], inputs.objective),
)

Batch = tuple[Any, Any]  # (inputs, targets)


def num_samples(structure: Any) -> int:
    """Count the samples of a batch, or of a part of one."""
    sizes = {tensor.shape[0] for tensor in tensors_of(structure)}
    if len(sizes) != 1:
        raise UserError(
            "every tensor of a batch must have the same first dim, the samples; "
            f"got {sorted(sizes) or 'no tensor at all'}"
        )
    return sizes.pop()


def part_bounds(samples: int, index: int, parts: int) -> tuple[int, int]:
    """Return where part `index` of `parts` begins and ends."""
    base, more = divmod(samples, parts)
    begin = index * base + min(index, more)
    return begin, begin + base + (index < more)


def take_part(batch: Any, index: int, parts: int) -> Any:
    """Return part `index` of `parts` of the samples, as views."""
    return _samples(batch, *part_bounds(num_samples(batch), index, parts))


def _samples(batch: Any, begin: int, end: int) -> Any:
    if type(batch) is tuple and {*map(type, batch)} == _ONLY_TENSORS:  # as most batches are
        return tuple(each[begin:end] for each in batch)
    return tree_map(lambda leaf: leaf[begin:end] if isinstance(leaf, Tensor) else leaf, batch)


def microbatches(batch: Any, count: int, *, always: bool) -> list[tuple[Any, int]]:
    """Split the batch into at most `count` parts that hold samples, each with weight 1.

    `always`: exactly `count`, because ranks communicate in every one of them. Where samples do not suffice,
    the rest are the first sample again, with weight 0.
    """
    samples = num_samples(batch)
    # As most are: two tensors from which no gradient goes back.
    is_plain = type(batch) is tuple and all(type(t) is Tensor and not t.requires_grad for t in batch)
    if min(count, samples) == 1 and is_plain:
        parts = [(tuple(each.detach() for each in batch), 1)]  # a third of the time of a view
    else:
        bounds = (part_bounds(samples, index, count) for index in range(min(count, samples)))
        parts = [(_samples(batch, *each), 1) for each in bounds]
    if always and len(parts) < count:
        if samples == 0:
            raise UserError(
                "a replica has no sample in this batch, and in a pipeline, with zero=2 or 3, with batch "
                "norm, with gather_samples and with a schedule from a file every replica takes part in every "
                "microbatch; give each replica at least one sample"
            )
        parts += [(_samples(batch, 0, 1), 0)] * (count - len(parts))
    return parts


def cast(structure: Any, dtype: torch.dtype) -> Any:
    """Return the same structure, with tensors of real numbers in `dtype`."""
    if type(structure) is Tensor and structure.dtype is dtype:
        return structure

    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return convert(structure) if type(structure) is Tensor else tree_map(convert, structure)


_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class CallSignature(NamedTuple):
    """The parameters of a forward, without self; what an engine puts around it counts as nothing."""

    owner: str  # the class
    positional: tuple[str, ...]
    named: tuple[str, ...]
    required: tuple[str, ...]  # of both, those without a default
    any_positional: bool  # *args
    any_named: bool  # **kwargs

    @classmethod
    def of(cls, module: nn.Module) -> "CallSignature":
        """Read the signature of a module's forward."""
        name = type(module).__name__
        forward = replaced_forward(module) or MethodType(type(module).forward, module)
        try:
            parameters = inspect.signature(forward).parameters.values()
        except (TypeError, ValueError):  # of a builtin
            return cls(name, (), (), (), any_positional=True, any_named=True)
        listed = [p for p in parameters if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
        return cls(
            name,
            tuple(p.name for p in listed if p.kind in _BY_POSITION),
            tuple(p.name for p in listed if p.kind in _BY_NAME),
            tuple(p.name for p in listed if p.default is Parameter.empty),
            any(p.kind is Parameter.VAR_POSITIONAL for p in parameters),
            any(p.kind is Parameter.VAR_KEYWORD for p in parameters),
        )

    @property
    def takes_one(self) -> bool:
        """True if just one argument can be given by position."""
        return len(self.positional) == 1 and not self.any_positional

    @property
    def needs_several(self) -> bool:
        """True if one argument by position is too few."""
        return sum(name in self.required for name in self.positional) > 1

    def errors(self, args: Sequence[Any], names: Collection[str]) -> list[str]:
        """List why a call with these arguments would fail."""
        errors = []
        if len(args) > len(self.positional) and not self.any_positional:
            errors.append(
                f"{len(args)} inputs by position: {self.describe()} takes {len(self.positional)}; give it as "
                "many, or name them in a dict"
            )
        by_position = self.positional[: len(args)]
        twice = [name for name in names if name in by_position]
        unknown = [] if self.any_named else [name for name in names if name not in self.named]
        missing = [name for name in self.required if name not in names and name not in by_position]
        errors += [f"{name}: is given twice, by position and by name; give it once" for name in twice]
        errors += [f"{name}: {self.describe()} does not take it; rename or drop it" for name in unknown]
        errors += [f"{name}: {self.describe()} needs it; add it to the batch" for name in missing]
        return errors

    def describe(self) -> str:
        """Write the call: 'Net.forward(a, b, mask)'."""
        names = dict.fromkeys([*self.positional, *self.named])
        several = ["*args"] * self.any_positional + ["**kwargs"] * self.any_named
        return f"{self.owner}.forward({', '.join([*names, *several])})"

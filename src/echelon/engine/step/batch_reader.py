"""Batches as people hand them in, read as (inputs, targets).

    {"input_ids": i, "attention_mask": m, "labels": t}   model(input_ids=i, attention_mask=m), targets t
    (x, targets)                                         model(x)
    (a, b, targets), ((a, b), targets)                   model(a, b), where the forward takes several
    (Inputs(a, mask=m), targets)                         model(a, mask=m)

The signature of the model's forward decides how a tuple or a dict becomes arguments. Where both readings are
possible, the batch is refused, and `Inputs` says which is meant.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, final

from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from echelon.errors import UserError, raise_errors
from echelon.nn.batch import Batch, CallSignature, Inputs, ObjectiveInputs
from echelon.nn.huggingface.adapters import adapted_model
from echelon.nn.huggingface.families import find_family
from echelon.nn.huggingface.inputs import CACHE, layer_inputs
from echelon.nn.huggingface.own_loss import shift
from echelon.nn.layering import listed_layers
from echelon.nn.losses import Loss
from echelon.nn.sequence import POSITIONS
from echelon.parallel.own_loss import ObjectiveLoss, OwnLoss, takes_next_labels
from echelon.plan import AUTO, Plan

_LABELS = "labels"
_GATE_LOSS = "output_router_logits"  # whether a model of transformers adds the losses of its gates


@final
class BatchReader:
    """Reads the batches of one model; `by_layers`: its layers run, and not its own forward."""

    def __init__(self, model: nn.Module, plan: Plan, loss: Loss, *, by_layers: bool) -> None:
        self._signature, self._plan = CallSignature.of(model), plan
        self._is_own_loss, self._shifts = isinstance(loss, OwnLoss), takes_next_labels(loss)
        self._objective = loss.objective if isinstance(loss, ObjectiveLoss) else None
        self._is_family = by_layers and find_family(adapted_model(model)) is not None
        self._first = CallSignature.of(listed_layers(model)[0]) if by_layers else None
        # Arguments of the model that its layers ask their view for.
        self._shared: tuple[str, ...] = tuple(getattr(model, "shared_inputs", ())) if by_layers else ()
        config = getattr(model, "config", None)
        self._adds_no_gate_loss = getattr(config, _GATE_LOSS, None) is False
        self._checked: set[object] = set()  # the forms of calls that are known to be right
        if self._objective is not None and self._is_family:
            raise UserError(
                f"objective with plan '{plan}': {type(model).__name__} runs layer by layer, and an objective "
                "calls its forward; use data, with tensor or not, and zero=0, or give a loss(output, target)"
            )
        if self._is_own_loss and self._is_family:
            raise UserError(
                f"loss=None with plan '{plan}': {type(model).__name__} runs layer by layer, and its own loss "
                "is computed by its forward; give parallelize a loss, or use data, with tensor or not, and "
                "zero=0"
            )

    def for_loss(self, loss: Loss | None) -> "BatchReader":
        """The reader of batches for another loss than the engine's own, if one is given."""
        if loss is None or not (self._is_own_loss or self._shifts or self._objective):
            return self
        reader = copy.copy(self)
        reader._is_own_loss, reader._shifts, reader._objective = False, False, None
        return reader

    def read(self, batch: Any) -> Batch:
        """(inputs, targets), which can be cut into samples: inputs are one value, or `Inputs`."""
        if self._objective is not None:
            whole = ObjectiveInputs(self._objective, to_plain(batch)), None
            check_batch(whole)
            return whole
        inputs, targets = self._divide(to_plain(batch))
        if isinstance(inputs, Inputs):
            inputs = self._without_cache(inputs)
            self._check(self._signature, inputs)
            inputs = inputs if self._first is None else self._for_layers(inputs, targets)
        check_batch((inputs, targets))
        return inputs, targets

    def _divide(self, batch: Any) -> Batch:
        if isinstance(batch, dict):
            return self._take_labels(_named(batch), None)
        if isinstance(batch, Inputs):
            return self._take_labels(batch, None)
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise UserError(
                f"the batch is a {type(batch).__name__}{size}: must be (inputs, targets), with targets=None "
                "if there are none, or (a, b, targets) for several inputs, or a dict of the arguments of the "
                "model's forward"
            )
        *values, targets = batch
        inputs = self._unpack(values[0]) if len(values) == 1 else self._unpack_flat(tuple(values))
        return self._take_labels(inputs, targets)

    # Arguments.

    def _unpack(self, value: Any) -> Any:
        """The inputs of a pair as arguments, or as they are: one argument."""
        if isinstance(value, dict):
            return self._unpack_dict(value)
        if not isinstance(value, tuple | list) or self._signature.takes_one:
            return value
        if self._signature.needs_several or self._signature.any_positional:
            return Inputs(*value)
        raise UserError(
            f"the inputs are a {type(value).__name__} of {len(value)}, and {self._signature.describe()} can "
            "take them as one argument or as several; write echelon.Inputs((a, b)) for one, "
            "echelon.Inputs(a, b) for several"
        )

    def _unpack_flat(self, values: tuple[Any, ...]) -> Any:
        return values if self._signature.takes_one else Inputs(*values)

    def _unpack_dict(self, value: dict[Any, Any]) -> Any:
        """By name, if the forward has these names; else one argument."""
        signature = self._signature
        unnamed = [name for name in value if name not in signature.named]
        by_kwargs = signature.any_named and (len(unnamed) < len(value) or not signature.positional)
        if not value or (len(unnamed) == len(value) and not by_kwargs):
            return value
        if (unnamed and not by_kwargs) or (signature.takes_one and list(value) == [*signature.positional]):
            raise UserError(
                f"the inputs are a dict of {', '.join(map(str, value))}, and {signature.describe()} can take "
                "it as one argument or by names; write echelon.Inputs({…}) for one, echelon.Inputs(name=…) "
                "for names"
            )
        return _named(value)

    def _without_cache(self, inputs: Inputs) -> Inputs:
        """Positions of sequences in a row separate them in transformers only where no cache is made."""
        if POSITIONS not in inputs.kwargs or CACHE in inputs.kwargs or CACHE not in self._signature.named:
            return inputs
        return Inputs(*inputs.args, **inputs.kwargs, **{CACHE: False})

    def _check(self, signature: CallSignature, inputs: Inputs) -> None:
        form = (signature, len(inputs.args), *inputs.kwargs)
        if form not in self._checked:
            raise_errors("the inputs of the batch", signature.errors(inputs.args, inputs.kwargs))
            self._checked.add(form)
        if self._adds_no_gate_loss and inputs.kwargs.get(_GATE_LOSS):
            raise UserError(
                f"the batch has {_GATE_LOSS}=True and model.config has {_GATE_LOSS}=False: which loss a plan "
                f"computes is chosen before the first step; set model.config.{_GATE_LOSS}=True before "
                "parallelize, and leave it out of the batch"
            )

    # Labels.

    def _take_labels(self, inputs: Any, targets: Any) -> Batch:
        """Labels among the arguments are the targets; the model needs them for a loss of its own."""
        if targets is None and isinstance(inputs, Inputs):
            targets = inputs.kwargs.get(_LABELS)
            keeps = self._is_own_loss or _LABELS in self._signature.required
            inputs = inputs if keeps else _without_labels(inputs)
        elif self._is_own_loss and targets is not None:
            inputs = self._with_labels(inputs, targets)
        return inputs, self._shifted(targets) if self._shifts else targets

    def _with_labels(self, inputs: Any, labels: Any) -> Inputs:
        """Arguments and the targets beside them, for a model that computes its own loss."""
        arguments = inputs if isinstance(inputs, Inputs) else Inputs(inputs)
        if _LABELS in self._signature.named:
            return Inputs(*arguments.args, **{**arguments.kwargs, _LABELS: labels})
        return Inputs(*arguments.args, labels, **arguments.kwargs)

    def _shifted(self, labels: Any) -> Any:
        if isinstance(labels, Tensor) and labels.ndim > 1 and not labels.is_floating_point():
            return shift(labels)
        if self._is_own_loss:
            return labels
        form = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise UserError(
            f"loss=None: {self._signature.owner} computes its loss of labels, and those of the batch are "
            f"{form}: must be token ids, [samples, positions]; add 'labels' to the batch, mostly a copy of "
            "input_ids, or give parallelize a loss"
        )

    # Layers.

    def _for_layers(self, inputs: Inputs, targets: Any) -> Any:
        """Return the input of the first layer."""
        if self._is_family:
            by_position = dict(zip(self._signature.positional, inputs.args, strict=False))
            return layer_inputs({**by_position, **inputs.kwargs}, targets, context=self._plan.context)
        assert self._first is not None
        if self._first.takes_one and len(inputs.args) > 1 and not inputs.kwargs:
            return inputs.for_layers({}, as_one=True)
        shared = {name: inputs.kwargs[name] for name in self._shared if name in inputs.kwargs}
        if shared:
            check_shared(shared, self._plan)
            own = {name: value for name, value in inputs.kwargs.items() if name not in shared}
            inputs = Inputs(*inputs.args, **own).for_layers(shared)
        errors = self._first.errors(inputs.args, inputs.kwargs)
        if errors:
            raise UserError(
                f"plan '{self._plan}' runs layer by layer, and the first layer is called with the inputs of "
                f"the batch, which are those of {self._signature.describe()}:",
                errors,
            )
        return inputs


def check_shared(shared: Mapping[str, Any], plan: Plan) -> None:
    """Refuse positions of documents where ranks share a sequence, and count its positions themselves."""
    if POSITIONS in shared and plan.context > 1:
        raise UserError(
            f"plan '{plan}': {POSITIONS} with context={plan.context}: ranks that share a sequence cannot "
            "tell the documents of a packed batch apart; use context=1, or batches without packing"
        )


def read_sample(model: nn.Module, plan: Plan, loss: Loss, sample_batch: Any) -> Batch | None:
    """The batch on which pipeline=auto measures layers, if there is one."""
    if sample_batch is None:
        return None
    by_layers = plan.pipeline == AUTO and bool(listed_layers(model))
    try:
        return BatchReader(model, plan, loss, by_layers=by_layers).read(sample_batch)
    except UserError as refusal:
        raise UserError(f"sample_batch: {refusal.title}", refusal.errors) from None


def to_plain(structure: Any) -> Any:
    """The same structure with dicts for other mappings, like those of tokenizers, which torch cannot cut."""
    if type(structure) is Tensor:
        return structure
    if isinstance(structure, Mapping):
        items = {name: to_plain(value) for name, value in structure.items()}
        return structure if isinstance(structure, dict) and type(structure) is not dict else items
    if type(structure) in (tuple, list):
        return type(structure)(map(to_plain, structure))
    return structure


def _named(values: Mapping[Any, Any]) -> Inputs:
    wrong = [name for name in values if not isinstance(name, str)]
    if wrong:
        raise UserError(
            f"the batch is a dict with {wrong[0]!r}: its names must be text, those of the forward's arguments"
        )
    return Inputs(**values)


def _without_labels(inputs: Inputs) -> Inputs:
    return Inputs(*inputs.args, **{name: value for name, value in inputs.kwargs.items() if name != _LABELS})


# What a batch may hold: tensors with one row per sample, and plain values that are the same for all.

_PLAIN_LEAVES = (str, int, float, bool, type(None))


def check_batch(batch: Batch) -> None:
    """Refuse (inputs, targets) that hold what cannot be cut into samples."""
    inputs, targets = batch
    are_tensors = type(inputs) is type(targets) is Tensor  # as in most batches
    if are_tensors and inputs.dim() and targets.dim() and inputs.shape[0] == targets.shape[0]:
        return
    leaves = tree_leaves(batch)
    if all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves):
        errors = []
    else:
        errors = [_leaf_error(place, leaf) for place, leaf in _places(batch) if not _is_leaf(leaf)]
    raise_errors("the batch", errors or _size_errors(batch, leaves))


def _is_leaf(leaf: object) -> bool:
    return leaf.dim() > 0 if isinstance(leaf, Tensor) else isinstance(leaf, _PLAIN_LEAVES)


def _leaf_error(place: str, leaf: object) -> str:
    kind = type(leaf).__name__
    if isinstance(leaf, Tensor):
        return (
            f"{place} is a tensor without dims: its first dim must count the samples; give it one for each, "
            "or give a number"
        )
    if isinstance(leaf, Mapping):
        return f"{place} is a {kind}, which torch does not look into: give a dict"
    return (
        f"{place} is a {kind}: must be a tensor, str, int, float, bool or None, or a dict, list or tuple of "
        "them; convert it, like torch.as_tensor(values)"
    )


def _size_errors(batch: Batch, leaves: list[Any]) -> list[str]:
    """Return errors of tensors with different numbers of samples, and of lists with a value per sample."""
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    if len(sizes) == 1:
        samples = sizes.pop()
        has_values = samples > 1 and any(not isinstance(leaf, Tensor | None) for leaf in leaves)
        return [_list_error(place, samples) for place in _lists(batch, samples)] if has_values else []
    tensors = [(place, leaf) for place, leaf in _places(batch) if isinstance(leaf, Tensor)]
    rows = ", ".join(f"{place} {list(leaf.shape)}" for place, leaf in tensors)
    return [
        "every tensor of a batch must have the same first dim, the samples, and the batch has "
        f"{rows or 'no tensor at all'}; expand what is the same for all samples, like "
        "positions.expand(samples, -1)"
    ]


def _list_error(place: str, samples: int) -> str:
    return (
        f"{place} is a list of {samples} values, as many as the batch has samples, and only tensors are cut "
        "into samples; make it a tensor, like torch.tensor(values), or keep it in the model"
    )


def _places(batch: Batch) -> Iterator[tuple[str, Any]]:
    """Every leaf and its place, like inputs['mask']."""
    for name, part in zip(("inputs", "targets"), batch, strict=True):
        for path, leaf in tree_flatten_with_path(part)[0]:
            yield name + keystr(path), leaf


def _lists(batch: Batch, length: int) -> Iterator[str]:
    """The places of lists of so many plain values."""
    pending: list[tuple[str, Any]] = list(zip(("inputs", "targets"), batch, strict=True))
    while pending:
        place, value = pending.pop()
        items = _items(value)
        is_list = type(value) in (list, tuple) and len(value) == length
        if is_list and all(isinstance(item, str | int | float) for _, item in items):
            yield place
        pending += [(f"{place}[{key!r}]", item) for key, item in items]


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Inputs):
        return [*enumerate(value.args), *value.kwargs.items()]
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, tuple | list) else []

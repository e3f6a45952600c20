"""Checks of layers that get a part of a sequence: they must not mix its positions, or draw their own masks.

With `context`, a rank holds a part of the positions; with `sequence`, it does so between the split parts of
layers. Attention asks its view (echelon.nn.sequence) for the other positions. The code of a forward cannot be
read, so modules that mix positions are known by class. A model in which no module asks a view must be made of
modules that work on each position separately.
"""

import math
from collections.abc import Collection, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from echelon.errors import UserError, raise_errors
from echelon.nn.dropout.mask import noises
from echelon.nn.dropout.modules import is_keyed, unkeyed_dropout
from echelon.nn.huggingface.adapters import adapted_model, is_adapted
from echelon.nn.huggingface.families import find_family
from echelon.nn.huggingface.modules import draws_by_head
from echelon.nn.sequence import View
from echelon.nn.wrapping import replaced_forward
from echelon.parallel.context import head_errors
from echelon.parallel.tensor.modules import is_matrix
from echelon.parallel.tensor.split import Sharded
from echelon.plan import Plan

_MIXERS = (
    *(nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase, nn.GroupNorm),
    _NormBase,  # of batches and instances
)

# These work on each position separately. Subclasses are not included: their forward may do something else.
_BY_POSITION = (
    *(nn.Linear, nn.Embedding, nn.Identity, nn.RMSNorm, nn.LayerNorm, nn.Dropout, nn.AlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh),
    *(nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid),
    nn.PReLU,
)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterDict)

_FIX = (
    "let attention ask its view (self.view = echelon.sequence.WHOLE, then self.view.attend(query, key, "
    "value): docs/context.md)"
)


# With `context`.


def check_positions(layers: Sequence[nn.Module], plan: Plan) -> None:
    """Refuse layers that would mix the positions of a rank's part as if it were the whole sequence."""
    if plan.context == 1:
        return
    errors = [
        f"{name} ({type(module).__name__}) mixes positions, and with context={plan.context} a rank has only "
        f"a part of them; {_FIX}, or use context=1"
        for name, module in _mixers(layers)
    ]
    raise_errors(f"plan '{plan}'", errors or _errors_without_view(layers, plan))


def check_heads(model: nn.Module, plan: Plan) -> None:
    """Refuse heads of which ranks cannot each take a part, where the model's config has their numbers. Of
    another model, its first forward pass shows them."""
    config = getattr(model, "config", None)
    heads = _first_number(config, ("heads", "num_attention_heads", "n_head"))
    if plan.attention != "all-to-all" or heads is None:
        return
    kv_heads = _first_number(config, ("num_kv_heads", "num_key_value_heads")) or heads
    raise_errors(f"plan '{plan}'", head_errors(heads, kv_heads, plan.context, plan.tensor))


def _first_number(config: object, names: Sequence[str]) -> int | None:
    numbers = (getattr(config, name, None) for name in names)
    return next((number for number in numbers if isinstance(number, int)), None)


def _mixers(layers: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules that mix positions, known by class, with names; of nested ones the outermost."""
    mixers: list[tuple[str, nn.Module]] = []
    for number, layer in enumerate(layers):
        for name, module in layer.named_modules():
            path = f"layer {number}{'.' * bool(name)}{name}"
            is_nested = any(path.startswith(f"{outer}.") for outer, _ in mixers)
            if not is_nested and _mixes(module):
                mixers.append((path, module))
    return mixers


def _mixes(module: nn.Module) -> bool:
    if isinstance(module, _ConvNd):
        return any(size > 1 for size in module.kernel_size)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) > 1
    return isinstance(module, _MIXERS)


def _errors_without_view(layers: Sequence[nn.Module], plan: Plan) -> list[str]:
    """An error if no module of the layers asks a view, and some module may still mix positions."""
    modules = [module for layer in layers for module in layer.modules()]
    if any(isinstance(getattr(module, "view", None), View) for module in modules):
        return []
    unknown = {type(module).__name__: None for module in modules if not _works_by_position(module)}
    if not unknown:
        return []
    return [
        f"context={plan.context}: no module of its layers asks a view, so if {', '.join(unknown)} mixes "
        f"positions, it would do so only within each rank's part; {_FIX}; a module that mixes none can say "
        "so by the same attribute; or use context=1"
    ]


def _works_by_position(module: nn.Module) -> bool:
    if type(module).forward is nn.Sequential.forward or is_adapted(module):  # as what it adapts
        return True
    if type(module) is nn.PReLU and module.num_parameters > 1:  # one weight for each index of dim 1
        return False
    return type(module) in _BY_POSITION and replaced_forward(module) is None


# With `sequence`.


def check_split(
    model: nn.Module, whole_sequence: Collection[nn.Module], sharded: Sharded, plan: Plan
) -> None:
    """Refuse modules that are not split, and that would wrongly get a part of the sequence.

    These are a last layer whose output the loss needs whole, and modules that may mix positions. The modules
    in `whole_sequence` get all of it.
    """
    errors = []
    if sharded.vocabulary is None:
        errors.append(
            "the last layer would return a part of the sequence, because its projection is whole on every "
            "rank, and the loss has all targets; make that projection 'vocabulary' in the table that "
            "parallelize(tensor_table=…) takes, or use sequence=false"
        )
    split = {parameter for name, parameter in model.named_parameters() if name in sharded.shards}
    refused: list[str] = []
    for name, module in model.named_modules():
        if module in whole_sequence or not _may_mix(module) or not split.isdisjoint(module.parameters()):
            continue
        if any(name.startswith(f"{outer}.") for outer in refused):
            continue
        refused.append(name)
        errors.append(
            f"{name} ({type(module).__name__}) has matrices, of which none is split, so it would get only a "
            "part of the sequence, and be wrong if it attends; make them 'column' and 'row' in the table, or "
            "use sequence=false"
        )
    raise_errors(f"plan '{plan}'", errors)


def _may_mix(module: nn.Module) -> bool:
    """Return whether a module contains matrices, and a forward of its own that may do anything with them."""
    if is_matrix(module) or _works_by_position(module) or isinstance(module, _CONTAINERS):
        return False
    return any(map(is_matrix, module.modules()))


def classes_not_causal(model: nn.Module, layers: Sequence[nn.Module]) -> list[str]:
    """The classes of modules that might attend to later positions, so that nothing may be padded at the end.

    Causal are modules that ask a view, that work on each position separately, and those of our own models
    and of known families of transformers.
    """
    known = ("echelon.", "transformers.") if find_family(adapted_model(model)) is not None else ("echelon.",)

    def is_causal(module: nn.Module) -> bool:
        if isinstance(getattr(module, "view", None), View) or _works_by_position(module):
            return True
        is_known = type(module).__module__.startswith(known) or isinstance(module, _CONTAINERS)
        return is_known and replaced_forward(module) is None

    modules = (module for layer in layers for module in layer.modules())
    return list(dict.fromkeys(type(module).__name__ for module in modules if not is_causal(module)))


def check_weight_masks(by_heads: Collection[nn.Module], plan: Plan, length: int) -> None:
    """Refuse to pad where attention's weights are dropped: masks of [positions, positions] would differ."""
    if not any(module.training and getattr(module, "p", 0.0) > 0 for module in by_heads):
        return
    raise UserError(
        f"plan '{plan}': a sequence of {length} positions would be padded, and dropout of attention weights, "
        "[positions, positions], would then drop others than on one device; use sequences of a multiple of "
        f"{plan.tensor}, or set that dropout to 0"
    )


def check_gate_padding(plan: Plan, length: int) -> None:
    """Refuse to pad where gates with a forward of their own would route the padding."""
    multiple = math.lcm(2 * plan.context if plan.context > 1 else 1, plan.tensor if plan.sequence else 1)
    multiple = math.lcm(multiple, plan.context * plan.tensor) if plan.sequence else multiple
    raise UserError(
        f"plan '{plan}': a sequence of {length} positions would be padded, and gates of experts with a "
        "forward of their own would route the padding too, and balance by it; use sequences of a multiple "
        f"of {multiple}, or let the gate implement `route` and end with echelon.nn.experts.finish"
    )


# With `tensor`.


def check_masks(model: nn.Module, plan: Plan) -> None:
    """Refuse dropout that draws from each rank's own generator, where all ranks must drop the same."""
    if plan.tensor == 1:
        return
    by_torch = [
        name or "the model"
        for name, module in model.named_modules()
        if isinstance(module, _DropoutNd) and module.p > 0 and not is_keyed(module)
    ]
    modules = {name or "the model": module for name, module in model.named_modules()}
    inside = [name for name in unkeyed_dropout(model) if name not in by_torch]
    inside = [name for name in inside if not draws_by_head(modules[name])]
    errors = []
    if by_torch:
        errors.append(
            f"dropout of {', '.join(by_torch)} is drawn by torch (seed=None, or a forward of its own), and "
            "ranks along tensor would drop different elements of states that must be equal; give parallelize "
            "a seed and use nn.Dropout, or set p to 0"
        )
    if inside:
        errors.append(
            f"{', '.join(inside)} draw at random inside (dropout, router_jitter_noise), and ranks along "
            "tensor would draw different numbers for states that must be equal; set their rates to 0"
        )
    unkeyed = [name or "the model" for name, noise in noises(model).items() if noise.name is None]
    if unkeyed:
        errors.append(
            f"noise of {', '.join(unkeyed)} is drawn by torch (seed=None), and ranks along tensor would "
            "route the same tokens to different experts; give parallelize a seed"
        )
    raise_errors(f"tensor={plan.tensor}", errors)

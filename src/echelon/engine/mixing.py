"""What layers must not do on a part of the whole: mix positions by themselves, or draw masks of their own.

With `context`, a rank has a part of the positions; with `sequence`, that is so between the split parts of
layers. Attention here asks its view (echelon.sequence) for the others. A forward cannot be read, so what
mixes is known by class; and a model in which nothing asks must be made of modules that work on each position
by itself.
"""

from collections.abc import Collection, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from echelon.dropout import is_keyed, unkeyed_dropout
from echelon.errors import raise_errors
from echelon.huggingface import draws_by_head
from echelon.plan import Plan
from echelon.sequence import View
from echelon.tensor_parallel import Sharded
from echelon.tensor_parallel.modules import is_matrix
from echelon.wrapping import replaced_forward

_MIXERS = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.RNNBase,
    nn.GroupNorm,
    _NormBase,  # of batches and instances
)

# What works on each position by itself; of these classes and no subclass, whose forward may be another.
_BY_POSITION = (
    *(nn.Linear, nn.Embedding, nn.Identity, nn.RMSNorm, nn.LayerNorm, nn.Dropout, nn.AlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh),
    *(nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid),
    nn.PReLU,
)

_MEND = (
    "let attention ask its view (self.view = echelon.sequence.WHOLE, and then self.view.attend(query, key, "
    "value): docs/context.md)"
)


def check_positions(layers: Sequence[nn.Module], plan: Plan) -> None:
    """Refuse layers that would mix the positions of a part along `context`, as if it were the whole."""
    if plan.context == 1:
        return
    errors = [
        f"{name} ({type(module).__name__}) mixes positions, and with context={plan.context} a rank has a "
        f"part of them; {_MEND}, or use context=1"
        for name, module in _mixers(layers)
    ]
    raise_errors(f"plan '{plan}'", errors or _silent_errors(layers, plan))


def _mixers(layers: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """What mixes positions by its class, with a name; of mixers in each other the outermost."""
    found: list[tuple[str, nn.Module]] = []
    for number, layer in enumerate(layers):
        for name, module in layer.named_modules():
            place = f"layer {number}{'.' * bool(name)}{name}"
            inside = any(place.startswith(f"{outer}.") for outer, _ in found)
            if not inside and _mixes(module):
                found.append((place, module))
    return found


def _mixes(module: nn.Module) -> bool:
    if isinstance(module, _ConvNd):
        return any(size > 1 for size in module.kernel_size)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) > 1
    return isinstance(module, _MIXERS)


def _silent_errors(layers: Sequence[nn.Module], plan: Plan) -> list[str]:
    """A error, if nothing in the layers asks a view and something may mix positions all the same."""
    modules = [module for layer in layers for module in layer.modules()]
    if any(isinstance(getattr(module, "view", None), View) for module in modules):
        return []
    unknown = {type(module).__name__: None for module in modules if not _works_by_position(module)}
    if not unknown:
        return []
    return [
        f"context={plan.context}: no module of its layers asks a view, so if {', '.join(unknown)} mixes "
        f"positions, it would do so within each rank's part; {_MEND}; a module that mixes none may say so by "
        "the same attribute; or use context=1"
    ]


def _works_by_position(module: nn.Module) -> bool:
    if type(module).forward is nn.Sequential.forward:
        return True
    if type(module) is nn.PReLU and module.num_parameters > 1:  # one for each place of dim 1
        return False
    return type(module) in _BY_POSITION and replaced_forward(module) is None


def check_split(model: nn.Module, before: Collection[nn.Module], sharded: Sharded, plan: Plan) -> None:
    """Refuse, with `sequence`, what is not split and would be given a part of the sequence: a last layer
    whose output the loss wants whole, and modules that may mix positions. `before` are those that see all."""
    errors = []
    if not sharded.splits_logits:
        errors.append(
            "the last layer would return a part of the sequence, because its projection is whole on every "
            "rank, and the loss has all targets; make that projection 'vocabulary' in the table that "
            "parallelize(table=…) takes, or use sequence=false"
        )
    split = {parameter for name, parameter in model.named_parameters() if name in sharded.shards}
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and module not in before and _may_mix(module) and split.isdisjoint(module.parameters()):
            found.append(name)
            errors.append(
                f"{name} ({type(module).__name__}) has matrices, of which none is split, so it would be "
                "given a part of the sequence, and be wrong if it attends; make them 'column' and 'row' in "
                "the table, or use sequence=false"
            )
    raise_errors(f"plan '{plan}'", errors)


def _may_mix(module: nn.Module) -> bool:
    """Whether a module has matrices inside, and a forward of its own to do with them what it likes."""
    if is_matrix(module) or _works_by_position(module) or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    return any(map(is_matrix, module.modules()))


def check_masks(model: nn.Module, plan: Plan) -> None:
    """Refuse dropout whose masks come from each rank's own generator, where ranks must drop the same."""
    if plan.tensor == 1:
        return
    drops = [
        name or "the model"
        for name, module in model.named_modules()
        if isinstance(module, _DropoutNd) and module.p > 0 and not is_keyed(module)
    ]
    inside = [
        name
        for name in unkeyed_dropout(model)
        if name not in drops and not draws_by_head(model.get_submodule("" if name == "the model" else name))
    ]
    errors = []
    if drops:
        errors.append(
            f"dropout of {', '.join(drops)} is drawn by torch (seed=None, or a class with a forward of its "
            "own), and ranks along tensor would drop different elements of states that must be equal; give "
            "parallelize a seed and use nn.Dropout, or set p to 0"
        )
    if inside:
        errors.append(
            f"{', '.join(inside)} draw at random inside (dropout, router_jitter_noise), and ranks along "
            "tensor would draw different numbers for states that must be equal; set their rates to 0"
        )
    raise_errors(f"tensor={plan.tensor}", errors)

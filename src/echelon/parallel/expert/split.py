"""The modules that hold experts, and what a rank keeps of them: a slice of their stacked matrices.

8 experts, expert=4     rank 0: experts 0 and 1     rank 1: experts 2 and 3     …
"""

import inspect
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from echelon.collectives import Group
from echelon.errors import raise_errors
from echelon.nn.wrapping import Wrapping, find_wrapper
from echelon.parallel.expert.modules import SpreadExperts
from echelon.state.ownership import Shard, part_of, replace_parameters

# What the arguments of their forward are called: echelon's and most of transformers', and those of GPT-OSS.
_ARGUMENTS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
_WHAT_CAN = (
    "a module whose matrices are stacked along dim 0, one for each of its `num_experts`, with "
    "forward(hidden_states, top_k_index, top_k_weights): echelon.experts.Experts, and those of Mixtral, "
    "Qwen-MoE, DeepSeek and most others in transformers"
)


def spread_experts(model: nn.Module, group: Group, wrapping: Wrapping) -> dict[str, Shard]:
    """Keep this rank's experts, in place, and let their modules send rows to the ranks with the others. All
    ranks start from the same weights.

    Returns the part that this rank has of each parameter of experts, by the parameter's first name.
    """
    if group.size == 1:
        return {}
    found = {name: module for name, module in model.named_modules() if is_stack_of_experts(module)}
    raise_errors(f"expert={group.size}", list(_errors(model, found, group.size)))
    names = {parameter: name for name, parameter in model.named_parameters()}
    shards: dict[nn.Parameter, Shard] = {}
    for module in found.values():
        number = num_experts(module)
        shard = Shard(0, (number,), group.rank, group.size)
        shards |= dict.fromkeys(module.parameters(), shard)
        wrapping.wrap(SpreadExperts(module, group, number))
        wrapping.assign(module, "num_experts", number // group.size)
    replace_parameters(model, {parameter: part_of(parameter, shard) for parameter, shard in shards.items()})
    return {names[parameter]: shard for parameter, shard in shards.items()}


def is_stack_of_experts(module: nn.Module) -> bool:
    """Return whether a module holds experts that can be spread over ranks."""
    number = getattr(module, "num_experts", None)
    own = [p for p in module._parameters.values() if p is not None]
    if not isinstance(number, int) or not own or any(p.ndim < 2 or p.shape[0] != number for p in own):
        return False
    return tuple(inspect.signature(type(module).forward).parameters)[1:4] in _ARGUMENTS


def num_experts(module: nn.Module) -> int:
    number = module.num_experts
    assert isinstance(number, int)
    return number


def _errors(model: nn.Module, found: dict[str, nn.Module], ranks: int) -> Iterator[str]:
    if not found:
        yield f"{type(model).__name__} has no experts that ranks can share out, {_WHAT_CAN}; drop expert"
    kinds = (nn.ModuleList, nn.ModuleDict)
    all_lists = [(name, m) for name, m in model.named_modules() if isinstance(m, kinds) and len(m) > 1]
    lists = [name for name, _ in all_lists if name.rpartition(".")[2] == "experts"]
    if lists:
        yield (
            f"{lists[0]}: a list of single experts cannot be spread over ranks (what can is {_WHAT_CAN}); "
            "stack their matrices, or drop expert"
        )
    for name, module in found.items():
        yield from _errors_of(name, module, ranks)
    yield from _shared_weights(model, found)


def _shared_weights(model: nn.Module, found: dict[str, nn.Module]) -> Iterator[str]:
    owner = {p: name for name, module in found.items() for p in module.parameters(recurse=False)}
    for path, module in model.named_modules():
        own = () if module in found.values() else module.parameters(recurse=False)
        shared = [owner[p] for p in own if p in owner]
        if shared:
            yield (
                f"{path}: it has weights of {shared[0]} too, of which each rank keeps its experts; give it "
                "weights of its own"
            )


def _errors_of(name: str, module: nn.Module, ranks: int) -> Iterator[str]:
    number = num_experts(module)
    if number % ranks:
        divisors = [str(n) for n in range(1, number + 1) if number % n == 0]
        yield (
            f"{name}: {number} experts are not divisible by expert={ranks}; use an expert that divides "
            f"{number} ({', '.join(divisors)})"
        )
    if find_wrapper(module, SpreadExperts) is not None:
        yield f"{name}: another engine has spread its experts already; close that engine first"
    hooked = [n for n, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        yield (
            f"{name}.{hooked[0]}: has a hook on its gradient, of which each rank would have only that of its "
            "experts; remove the hook"
        )
    inside = {p for child in module.children() for p in child.parameters()}
    if inside:
        yield (
            f"{name}: it has parameters in modules inside of it, which no rank could share out; make them "
            "stacked parameters of its own"
        )
    dropouts = [m for m in module.modules() if isinstance(m, _DropoutNd) and m.p > 0]
    if dropouts:
        yield (
            f"{name}: it has dropout inside, whose masks are those of samples, and experts see tokens of all "
            "ranks mixed; drop out what the layer around it returns, or set p=0"
        )

"""The options of an optimizer's groups (lr, weight_decay, …), from a checkpoint, as load_state_dict has them.

Groups are found by the names of their parameters: a stage of a pipeline may have fewer of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from echelon.engine.saving.checkpoints import PARAMETERS
from echelon.update.update import Update

# How an optimizer works on a device is not a part of what it computes.
_LOCAL = frozenset({PARAMETERS, "params", "param_names", "fused", "foreach", "capturable", "differentiable"})
Groups = Sequence[Mapping[str, Any]]


def option_errors(saved: Groups, update: Update) -> list[str]:
    """Why groups here cannot have the options of those that were saved: parameters of one group were in
    several, of different options."""
    errors = []
    for number, names in enumerate(_names_of_groups(update)):
        found = _matching(saved, names)
        differing = sorted(
            {key for each in found for key in _options(each) if each.get(key) != found[0].get(key)}
        )
        if differing:
            errors.append(
                f"group {number} of the optimizer has parameters that were in {len(found)} groups, with "
                f"different {', '.join(differing)} (as {min(names)}); make the same groups, or keep the "
                "options of now: load(path, options=False)"
            )
    return errors


def apply_options(saved: Groups, update: Update) -> None:
    """Give each group the options that its parameters had."""
    for group, names in zip(update.optimizer.param_groups, _names_of_groups(update), strict=True):
        for options in _matching(saved, names)[:1]:
            for key, value in _options(options).items():
                if key in group or key == "initial_lr":
                    group[key] = _like(group.get(key), value)


def _names_of_groups(update: Update) -> list[set[str]]:
    names: dict[nn.Parameter, str] = {tensor: name for name, tensor in update.updated_tensors()}
    groups = update.optimizer.param_groups
    return [{names[p] for p in group["params"] if p in names} for group in groups]


def _matching(saved: Groups, names: set[str]) -> list[Mapping[str, Any]]:
    return [group for group in saved if names.intersection(group.get(PARAMETERS, ()))]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _LOCAL}


def _like(now: Any, value: Any) -> Any:
    """JSON has no tuples and no tensors."""
    if isinstance(now, Tensor):
        return now.fill_(value)
    return tuple(value) if isinstance(now, tuple) and isinstance(value, list) else value

"""The experts of a model as plain data: `ExpertsConfig`. It needs no torch; `blocks` builds the modules.

`value_errors` are those of single values of any config: counts, numbers, yes or no.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from echelon.errors import did_you_mean, raise_errors


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or isinstance(value, float)


# Kind of value → what it must be, and the check.
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "count": ("an integer, at least 1", lambda value: _is_integer(value) and value >= 1),
    "count or 0": ("an integer, at least 0", lambda value: _is_integer(value) and value >= 0),
    "number": ("a number above 0", lambda value: _is_number(value) and 0 < value < math.inf),
    "weight": ("a number, at least 0", lambda value: _is_number(value) and 0 <= value < math.inf),
    "fraction": ("a number from 0 to below 1", lambda value: _is_number(value) and 0 <= value < 1),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
}


def value_errors(config: object, kind: str, *names: str) -> list[str]:
    """List the fields of a config that are not of this kind."""
    rule, is_valid = _RULES[kind]
    values = {name: getattr(config, name) for name in names}
    return [f"{name}={value!r}: must be {rule}" for name, value in values.items() if not is_valid(value)]


GateName = Literal["softmax", "noisy-top-k", "switch", "gshard", "sigmoid", "hierarchical"]

# Of the fields that not every gate has, those that each reads. Another one would be ignored in silence.
GATE_FIELDS: dict[str, tuple[str, ...]] = {
    "softmax": ("normalize", "balance", "z_loss", "capacity", "jitter"),
    "noisy-top-k": ("importance", "load", "z_loss", "capacity"),
    "switch": ("balance", "z_loss", "capacity", "jitter"),
    "gshard": ("balance", "z_loss", "capacity"),
    "sigmoid": ("normalize", "scale", "groups", "group_top_k", "bias_rate", "capacity"),
    "hierarchical": ("groups", "group_top_k", "importance", "load", "capacity"),
}
_GATE_TOP_K = {"switch": 1, "gshard": 2}
# What is only trained with: a model computes the same with other values.
TRAINING_FIELDS = ("balance", "importance", "load", "z_loss", "bias_rate", "jitter")


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward parts that are mixtures of experts, and the gate that chooses among them.

        ExpertsConfig(num_experts=8, top_k=2, hidden=128, balance=0.01)

    Attributes:
        hidden: the width of the hidden part of an expert.
        normalize: whether the weights of a token's experts sum to 1.
        scale: of these weights, after that.
        shared: the width of the hidden part of the expert that sees every token; 0: there is none.
        shared_gate: whether the shared expert is weighted by a sigmoid of the token, as in Qwen2-MoE.
        first_dense: how many of the first layers have one dense feed-forward part of the model's width `ffn`.
        capacity: most tokens of a sample for an expert, as a multiple of its fair share; None: no limit.
        groups: of experts, of equal size.
        group_top_k: a token chooses among the experts of the best few groups; None: of all.
        balance: the weight of the balancing loss.
        importance: the weight of the importance loss.
        load: the weight of the load loss.
        z_loss: the weight of the loss that keeps logits small.
        bias_rate: the step of the bias that balances without a loss.
        jitter: the part by which inputs of the gate are scaled at random in training.
    """

    num_experts: int
    top_k: int
    hidden: int
    gate: GateName = "softmax"
    normalize: bool = True
    scale: float = 1.0
    shared: int = 0
    shared_gate: bool = False
    first_dense: int = 0
    capacity: float | None = None
    groups: int = 1
    group_top_k: int | None = None
    balance: float = 0.0
    importance: float = 0.0
    load: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        gates = get_args(GateName)
        errors = []
        if self.gate not in gates:
            errors.append(f"gate={self.gate!r}: is not a gate{did_you_mean(str(self.gate), gates)}")
        errors += [
            *value_errors(self, "count", "num_experts", "top_k", "hidden", "groups"),
            *value_errors(self, "count or 0", "shared", "first_dense"),
            *value_errors(self, "flag", "normalize", "shared_gate"),
            *value_errors(self, "number", "scale"),
            *value_errors(self, "weight", *TRAINING_FIELDS),
        ]
        if self.group_top_k is not None:
            errors += value_errors(self, "count", "group_top_k")
        if self.capacity is not None:
            errors += value_errors(self, "number", "capacity")
        # How values fit together is checked only if each value is valid.
        raise_errors("experts config", errors or _fit_errors(self))

    @property
    def num_chosen_groups(self) -> int:
        return self.groups if self.group_top_k is None else self.group_top_k

    @property
    def num_gate_rows(self) -> int:
        if self.gate == "hierarchical":
            return 2 * (self.groups + self.num_experts)
        return 2 * self.num_experts if self.gate == "noisy-top-k" else self.num_experts


def _fit_errors(config: ExpertsConfig) -> list[str]:
    errors = [*_unread_errors(config), *_choice_errors(config), *_group_errors(config)]
    if config.shared_gate and not config.shared:
        errors.append("shared_gate=True shared=0: there is no shared expert to weigh; set shared, its width")
    return errors


def _choice_errors(config: ExpertsConfig) -> list[str]:
    gate, top_k, num_experts = config.gate, config.top_k, config.num_experts
    errors = []
    if top_k > num_experts:
        errors.append(
            f"top_k={top_k} num_experts={num_experts}: a token cannot have more experts than there are; set "
            f"top_k to at most {num_experts}"
        )
    wanted = _GATE_TOP_K.get(gate, top_k)
    if top_k != wanted:
        errors.append(f"top_k={top_k} gate={gate!r}: this gate chooses {wanted}; set top_k={wanted}")
    if top_k == 1 and config.normalize and "normalize" in GATE_FIELDS[gate]:
        errors.append(
            "top_k=1 normalize=True: a single weight would always be 1, and the gate would learn nothing of "
            "the loss; set normalize=False"
        )
    return errors


def _group_errors(config: ExpertsConfig) -> list[str]:
    chosen, groups, num_experts = config.num_chosen_groups, config.groups, config.num_experts
    if num_experts % groups:
        return [
            f"num_experts={num_experts} groups={groups}: groups have equal numbers of experts; make "
            f"num_experts a multiple of {groups}"
        ]
    if chosen > groups:
        return [
            f"group_top_k={chosen} groups={groups}: a token cannot choose more groups than there are; set "
            f"group_top_k to at most {groups}"
        ]
    if config.gate == "hierarchical" and config.top_k % chosen:
        return [
            f"top_k={config.top_k} group_top_k={chosen}: a token takes equally many experts of each of its "
            f"groups; make top_k a multiple of {chosen}"
        ]
    reachable = chosen * (num_experts // groups)
    if reachable < config.top_k <= num_experts:
        return [
            f"top_k={config.top_k} group_top_k={chosen}: the chosen groups have {reachable} experts; set "
            "group_top_k higher"
        ]
    return []


def _unread_errors(config: ExpertsConfig) -> list[str]:
    """Fields that are set, and that only another gate reads."""
    errors = []
    for field in dataclasses.fields(ExpertsConfig):
        gates = [repr(gate) for gate, names in GATE_FIELDS.items() if field.name in names]
        value = getattr(config, field.name)
        if gates and repr(config.gate) not in gates and value != field.default:
            errors.append(
                f"{field.name}={value!r} gate={config.gate!r}: this gate does not read {field.name}; leave "
                f"it out, or use {' or '.join(gates)}"
            )
    return errors

"""The experts of a model as plain data: `ExpertsConfig`. It needs no torch; `mixture` builds the modules."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from echelon.errors import did_you_mean, raise_errors
from echelon.models.value_checks import count_errors, flag_errors, number_errors, weight_errors

GateName = Literal["softmax", "noisy-top-k", "switch", "gshard", "sigmoid", "hierarchical"]

# Of the fields that not every gate has, those that each reads. Another one would be ignored in silence.
GATE_FIELDS: dict[str, tuple[str, ...]] = {
    "softmax": ("normalize", "scale", "capacity", "balance", "z_loss"),
    "noisy-top-k": ("capacity", "importance", "load"),
    "switch": ("capacity", "balance", "z_loss"),
    "gshard": ("capacity", "balance"),
    "sigmoid": ("normalize", "scale", "groups", "group_top_k", "balance", "bias_rate"),
    "hierarchical": ("groups", "group_top_k", "importance", "load"),
}
_GATE_TOP_K = {"switch": 1, "gshard": 2}
_WEIGHTS = ("balance", "importance", "load", "z_loss", "bias_rate")


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward parts that are mixtures of experts, and the gate that chooses among them.

    hidden        width of the hidden part of an expert
    normalize     whether the weights of a token's experts sum to 1
    scale         of these weights, after that
    shared        width of the hidden part of the expert that sees every token; 0: there is none
    shared_gate   whether the shared expert is weighted by a sigmoid of the token, as in Qwen2-MoE
    first_dense   how many of the first layers have one dense feed-forward part of the model's width `ffn`
    capacity      most tokens of an expert, as a multiple of the fair share of a sample; None: all are computed
    groups, group_top_k   experts lie in so many groups, and a token chooses among those of the best few
    balance, importance, load, z_loss   weights of the losses that are added
    bias_rate     step of the bias that balances without a loss

    ExpertsConfig(num_experts=8, top_k=2, hidden=128, balance=0.01)
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
    group_top_k: int = 1
    balance: float = 0.0
    importance: float = 0.0
    load: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        gates = get_args(GateName)
        errors = []
        if self.gate not in gates:
            errors.append(f"gate={self.gate!r}: is not a gate{did_you_mean(str(self.gate), gates)}")
        errors += [
            *count_errors(self, "num_experts", "top_k", "hidden", "groups", "group_top_k"),
            *count_errors(self, "shared", "first_dense", least=0),
            *flag_errors(self, "normalize", "shared_gate"),
            *number_errors(self, "scale"),
            *weight_errors(self, *_WEIGHTS),
        ]
        if self.capacity is not None:
            errors += number_errors(self, "capacity")
        # How values fit together is checked only if each value is valid.
        raise_errors("experts config", errors or _fit_errors(self))

    @property
    def num_gate_rows(self) -> int:
        """Rows of the width of the model in the gate's matrices."""
        if self.gate == "noisy-top-k":
            return 2 * self.num_experts
        return self.num_experts + (self.groups if self.gate == "hierarchical" else 0)


def _fit_errors(config: ExpertsConfig) -> list[str]:
    errors = _unread_errors(config)
    if config.top_k > config.num_experts:
        errors.append(
            f"top_k={config.top_k} num_experts={config.num_experts}: a token cannot have more experts than "
            f"there are; set top_k to at most {config.num_experts}"
        )
    wanted = _GATE_TOP_K.get(config.gate)
    if wanted is not None and config.top_k != wanted:
        errors.append(
            f"top_k={config.top_k} gate={config.gate!r}: this gate has {wanted} for each token; set top_k={wanted}"
        )
    if config.num_experts % config.groups:
        errors.append(
            f"num_experts={config.num_experts} groups={config.groups}: groups have equal numbers of experts; "
            f"make num_experts a multiple of {config.groups}"
        )
    if config.group_top_k > config.groups:
        errors.append(
            f"group_top_k={config.group_top_k} groups={config.groups}: a token cannot choose more groups than "
            f"there are; set group_top_k to at most {config.groups}"
        )
    if config.shared_gate and not config.shared:
        errors.append("shared_gate=True shared=0: there is no shared expert to weigh; set shared, its width")
    return errors


def _unread_errors(config: ExpertsConfig) -> list[str]:
    """Fields that are set, and that the gate does not read."""
    read = GATE_FIELDS[config.gate]
    return [
        f"{name}={value!r} gate={config.gate!r}: this gate does not read {name}; leave it out, or use "
        f"{' or '.join(repr(gate) for gate, fields in GATE_FIELDS.items() if name in fields)}"
        for name, default in _gate_defaults().items()
        if name not in read and (value := getattr(config, name)) != default
    ]


def _gate_defaults() -> dict[str, Any]:
    names = {name for fields in GATE_FIELDS.values() for name in fields}
    return {field.name: field.default for field in dataclasses.fields(ExpertsConfig) if field.name in names}

"""The shape of a transformer as plain data: `ModelConfig`, and `ExpertsConfig` of its experts.

It needs no torch, so that a planner can size a model that fits on no machine here.
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


def value_errors(config: object, kind: str, *names: str, optional: bool = False) -> list[str]:
    """List the fields of a config that are not of this kind, or None if they are optional."""
    (rule, is_valid), values = _RULES[kind], {name: getattr(config, name) for name in names}
    wrong = {n: v for n, v in values.items() if not is_valid(v) and not (optional and v is None)}
    return [f"{name}={value!r}: must be {rule}" for name, value in wrong.items()]


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
            *value_errors(self, "count", "group_top_k", optional=True),
            *value_errors(self, "number", "capacity", optional=True),
        ]
        # How values fit together is checked only if each value is valid.
        errors = errors or [*_unread_errors(self), *_choice_errors(self), *_group_errors(self)]
        raise_errors("experts config", errors)

    @property
    def num_chosen_groups(self) -> int:
        return self.groups if self.group_top_k is None else self.group_top_k

    @property
    def num_gate_rows(self) -> int:
        if self.gate == "hierarchical":
            return 2 * (self.groups + self.num_experts)
        return 2 * self.num_experts if self.gate == "noisy-top-k" else self.num_experts


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
    """List the fields that are set, and that nothing reads here."""
    errors = []
    for field in dataclasses.fields(ExpertsConfig):
        gates = [repr(gate) for gate, names in GATE_FIELDS.items() if field.name in names]
        value = getattr(config, field.name)
        if gates and repr(config.gate) not in gates and value != field.default:
            errors.append(
                f"{field.name}={value!r} gate={config.gate!r}: this gate does not read {field.name}; leave "
                f"it out, or use {' or '.join(gates)}"
            )
    if config.shared_gate and not config.shared:
        errors.append("shared_gate=True shared=0: there is no shared expert to weigh; set shared, its width")
    return errors


Family = Literal["gpt", "llama"]

_TOO_MANY = 2**62  # parameters, or positions: torch could not count their bytes


@dataclass(frozen=True)
class RopeScaling:
    """The rule by which Llama 3.1 stretches its rotary positions beyond the sequence it was first trained on.

    Wavelengths longer than `original_sequence / low_freq_factor` are stretched by `factor`, those shorter
    than `original_sequence / high_freq_factor` are kept, and those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_sequence: int

    def __post_init__(self) -> None:
        errors = [
            *value_errors(self, "number", "factor", "low_freq_factor", "high_freq_factor"),
            *value_errors(self, "count", "original_sequence"),
        ]
        if not errors and self.low_freq_factor >= self.high_freq_factor:
            errors.append(
                f"low_freq_factor={self.low_freq_factor} high_freq_factor={self.high_freq_factor}: "
                "the low factor must be below the high one"
            )
        raise_errors("rope scaling", errors)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of one model. `None` means "by the family's rule" and stays None, so that
    `dataclasses.replace(config, heads=8)` also moves what follows from `heads`.

        ModelConfig("llama", layers=4, width=128, heads=4, kv_heads=2, vocab=256, sequence=128)
    """

    family: Family
    layers: int
    width: int
    heads: int
    vocab: int
    sequence: int
    kv_heads: int | None = None
    ffn: int | None = None
    tied: bool = False
    dropout: float = 0.0  # after the embedding, and of what attention and feed-forward add
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    head_width: int | None = None  # of query, key and value; width / heads if left out
    qk_norm: bool = False  # RMSNorm of each head of query and key, before rotary positions
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        families = get_args(Family)
        errors = []
        if self.family not in families:
            guess = did_you_mean(str(self.family), families)
            errors.append(f"family={self.family!r}: is not a model family{guess}")
        errors += [
            *value_errors(self, "count", "layers", "width", "heads", "vocab", "sequence"),
            *value_errors(self, "count", "kv_heads", "ffn", "head_width", optional=True),
            *value_errors(self, "number", "norm_epsilon", "rope_theta"),
            *value_errors(self, "flag", "tied", "qk_norm"),
            *value_errors(self, "fraction", "dropout"),
        ]
        if self.experts is not None and not isinstance(self.experts, ExpertsConfig):
            errors.append(f"experts={self.experts!r}: must be an ExpertsConfig")
        # How values fit together is checked only if each value is valid.
        raise_errors("model config", errors or _fit_errors(self))

    @property
    def head_dim(self) -> int:
        return self.width // self.heads if self.head_width is None else self.head_width

    @property
    def query_width(self) -> int:
        return self.head_dim * self.heads

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def kv_width(self) -> int:
        return self.head_dim * self.num_kv_heads

    @property
    def ffn_width(self) -> int:
        """Hidden width of the feed-forward part: as given, or 4·width (GPT), or 8/3·width rounded up to a
        multiple of 256 (Llama: its three matrices then weigh about as much as GPT's two)."""
        if self.ffn is not None:
            return self.ffn
        return 4 * self.width if self.family == "gpt" else -(-(8 * self.width // 3) // 256) * 256

    @property
    def bias(self) -> bool:
        return self.family == "gpt"

    @property
    def num_parameters(self) -> int:
        """The exact number of parameters; a tied weight counts once."""
        return self._count(self.experts.num_experts if self.experts else 0)

    @property
    def num_active_parameters(self) -> int:
        """The number of parameters that compute one token: of experts, those that its gate chooses."""
        return self._count(self.experts.top_k if self.experts else 0)

    @property
    def num_routed_parameters(self) -> int:
        """The number of parameters of experts that gates choose from, which `expert` ranks divide."""
        return self.num_parameters - self._count(0)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.first_dense

    def _count(self, num_experts: int) -> int:
        matrices = (2 if self.family == "gpt" else 3) * self.width  # of a feed-forward part, per hidden unit

        def feed_forward(hidden: int) -> int:
            return matrices * hidden + (hidden + self.width if self.bias else 0)

        projection = 0 if self.tied else self.vocab * self.width
        embedding = (self.vocab + (self.sequence if self.family == "gpt" else 0)) * self.width
        norm = 2 * self.width if self.family == "gpt" else self.width
        attention = 2 * self.width * (self.query_width + self.kv_width)
        attention += self.query_width + 2 * self.kv_width + self.width if self.bias else 0
        attention += 2 * self.head_dim if self.qk_norm else 0
        count = embedding + self.layers * (attention + 2 * norm) + norm + projection
        sparse = max(0, self.layers - self.experts.first_dense) if self.experts else 0
        if (experts := self.experts) is not None:  # which have no biases
            gate = (experts.num_gate_rows + experts.shared_gate) * self.width
            shared = feed_forward(experts.shared) if experts.shared else 0
            count += sparse * (gate + num_experts * matrices * experts.hidden + shared)
        return count + (self.layers - sparse) * feed_forward(self.ffn_width)


def _fit_errors(config: ModelConfig) -> list[str]:
    errors = [*_head_errors(config), *_family_fit_errors(config), *_expert_errors(config)]
    if not errors and max(config.num_parameters, config.sequence * config.width) >= _TOO_MANY:
        errors.append(
            f"layers={config.layers} width={config.width} vocab={config.vocab} sequence={config.sequence}: "
            "the model would have 2^62 parameters or positions, or more; choose smaller sizes"
        )
    return errors


def _head_errors(config: ModelConfig) -> list[str]:
    errors = []
    if config.head_width is None and config.width % config.heads:
        errors.append(
            f"width={config.width} heads={config.heads}: each head takes an equal part of the width; "
            f"make width a multiple of {config.heads}, or set head_width"
        )
    elif config.family == "llama" and config.head_dim % 2:
        where, fix = f"width={config.width} heads={config.heads}", "make width / heads even"
        if config.head_width is not None:
            where, fix = f"head_width={config.head_width}", "make head_width even"
        errors.append(f"{where}: rotary positions turn pairs, and a head is {config.head_dim} wide; {fix}")
    if config.family == "llama" and config.heads % config.num_kv_heads:
        errors.append(
            f"heads={config.heads} kv_heads={config.kv_heads}: each key/value head serves an equal number of "
            f"heads; make heads a multiple of {config.kv_heads}"
        )
    return errors


def _family_fit_errors(config: ModelConfig) -> list[str]:
    """List options that GPT does not have."""
    if config.family != "gpt":
        return []
    errors = []
    if config.num_kv_heads != config.heads:
        errors.append(
            f"heads={config.heads} kv_heads={config.kv_heads}: GPT does not group key/value heads; "
            "leave kv_heads out, or use family='llama'"
        )
    if config.rope_scaling is not None:
        errors.append("rope_scaling: GPT has learned positions; leave it out, or use family='llama'")
    if config.head_width is not None and config.head_width * config.heads != config.width:
        errors.append(
            f"width={config.width} heads={config.heads} head_width={config.head_width}: GPT's heads take "
            "equal parts of the width; leave head_width out, or use family='llama'"
        )
    if config.qk_norm:
        errors.append(
            "qk_norm=True: GPT does not normalise queries and keys; leave it out, or use family='llama'"
        )
    return errors


def _expert_errors(config: ModelConfig) -> list[str]:
    experts = config.experts
    if experts is None:
        return []
    errors = []
    if experts.first_dense >= config.layers:
        errors.append(
            f"layers={config.layers} experts.first_dense={experts.first_dense}: no layer is left that has "
            f"experts; set first_dense below {config.layers}, or leave experts out"
        )
    if config.ffn is not None and not experts.first_dense:
        errors.append(
            f"ffn={config.ffn} experts.first_dense=0: no layer has a dense feed-forward part; leave ffn out "
            f"(the width of an expert is experts.hidden={experts.hidden}), or set first_dense"
        )
    return errors

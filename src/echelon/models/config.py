"""The shape of a transformer as plain data: `ModelConfig`.

It needs no torch, so that a planner can size a model that fits on no machine here. Named sizes are in
`presets`, the modules in `transformer`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from echelon.errors import did_you_mean, raise_errors
from echelon.models.experts_config import ExpertsConfig, value_errors

Family = Literal["gpt", "llama"]

_OPTIONAL = ("kv_heads", "ffn", "head_width")
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
            *value_errors(self, "count", *(name for name in _OPTIONAL if getattr(self, name) is not None)),
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
        """Width of the key, and of the value, of one token."""
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
        """True if linear layers add a bias: GPT's do, Llama's do not."""
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

        positions = self.sequence * self.width if self.family == "gpt" else 0
        projection = 0 if self.tied else self.vocab * self.width
        embedding = self.vocab * self.width + positions
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
        where, fix = (
            (f"width={config.width} heads={config.heads}", "make width / heads even")
            if config.head_width is None
            else (f"head_width={config.head_width}", "make head_width even")
        )
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

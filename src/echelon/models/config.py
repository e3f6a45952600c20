"""The shape of a transformer as plain data: `ModelConfig`.

It needs no torch, so that a planner can size a model that fits on no machine here. Named sizes are in
`presets`, the modules in `gpt` and `llama`.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from echelon.errors import did_you_mean, raise_errors

Family = Literal["gpt", "llama"]


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches its rotary positions beyond the sequence it was first trained on.

    Wavelengths longer than `original_sequence / low_freq_factor` are stretched by `factor`, those shorter
    than `original_sequence / high_freq_factor` are kept, and those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_sequence: int

    def __post_init__(self) -> None:
        errors = [
            *_number_errors(self, "factor", "low_freq_factor", "high_freq_factor"),
            *_count_errors(self, "original_sequence"),
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

    def __post_init__(self) -> None:
        errors = [
            *_family_errors(self.family),
            *_count_errors(self, "layers", "width", "heads", "vocab", "sequence"),
            *_count_errors(self, *(name for name in ("kv_heads", "ffn") if getattr(self, name) is not None)),
            *_number_errors(self, "norm_epsilon", "rope_theta"),
        ]
        if not isinstance(self.tied, bool):
            errors.append(f"tied={self.tied!r}: must be true or false")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            errors.append(f"dropout={self.dropout!r}: must be a number from 0 to below 1")
        # How values fit together is checked only if each value is valid.
        raise_errors("model config", errors or _fit_errors(self))

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def kv_width(self) -> int:
        """Width of the key, and of the value, of one token."""
        return self.head_width * self.num_kv_heads

    @property
    def ffn_width(self) -> int:
        """Hidden width of the feed-forward part: as given, or 4·width (GPT), or 8/3·width rounded up to a
        multiple of 256 (Llama: its three matrices then weigh about as much as GPT's two)."""
        if self.ffn is not None:
            return self.ffn
        return 4 * self.width if self.family == "gpt" else -(-(8 * self.width // 3) // 256) * 256

    @property
    def bias(self) -> bool:
        """Whether linear layers add a bias: GPT's do, Llama's do not."""
        return self.family == "gpt"

    @property
    def num_parameters(self) -> int:
        """Exact count; a tied weight counts once."""
        positions = self.sequence * self.width if self.family == "gpt" else 0
        projection = 0 if self.tied else self.vocab * self.width
        embedding = self.vocab * self.width + positions
        return embedding + self.layers * _num_block_parameters(self) + _num_norm_parameters(self) + projection


def _num_norm_parameters(config: ModelConfig) -> int:
    return 2 * config.width if config.family == "gpt" else config.width


def _num_block_parameters(config: ModelConfig) -> int:
    width, kv_width, ffn = config.width, config.kv_width, config.ffn_width
    attention = 2 * width * (width + kv_width)
    mlp = (2 if config.family == "gpt" else 3) * width * ffn
    biases = 2 * (width + kv_width) + ffn + width if config.bias else 0
    return attention + mlp + biases + 2 * _num_norm_parameters(config)


def _family_errors(family: str) -> list[str]:
    families = get_args(Family)
    if family in families:
        return []
    return [f"family={family!r}: is not a model family{did_you_mean(str(family), families)}"]


def _count_errors(config: object, *names: str) -> list[str]:
    return [
        f"{name}={value!r}: must be an integer, at least 1"
        for name in names
        if isinstance(value := getattr(config, name), bool) or not isinstance(value, int) or value < 1
    ]


def _number_errors(config: object, *names: str) -> list[str]:
    return [
        f"{name}={value!r}: must be a number above 0"
        for name in names
        if not _is_number(value := getattr(config, name)) or not 0 < value < math.inf
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fit_errors(config: ModelConfig) -> list[str]:
    errors = []
    if config.width % config.heads:
        errors.append(
            f"width={config.width} heads={config.heads}: each head takes an equal part of the width; "
            f"make width a multiple of {config.heads}"
        )
    elif config.family == "llama" and config.head_width % 2:
        errors.append(
            f"width={config.width} heads={config.heads}: rotary positions turn pairs, and a head is "
            f"{config.head_width} wide; make width / heads even"
        )
    if config.family == "llama" and config.heads % config.num_kv_heads:
        errors.append(
            f"heads={config.heads} kv_heads={config.kv_heads}: each key/value head serves an equal number of "
            f"heads; make heads a multiple of {config.kv_heads}"
        )
    if config.family == "gpt" and config.num_kv_heads != config.heads:
        errors.append(
            f"heads={config.heads} kv_heads={config.kv_heads}: GPT does not group key/value heads; "
            "leave kv_heads out, or use family='llama'"
        )
    if config.family == "gpt" and config.rope_scaling is not None:
        errors.append("rope_scaling: GPT has learned positions; leave it out, or use family='llama'")
    return errors

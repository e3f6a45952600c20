"""What a training tells while it runs. Rank 0 makes these; whoever shows or keeps them reads them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Starting:
    """The job is sound and has its folder; ranks come next."""

    run: str


@dataclass(frozen=True)
class Started:
    parameters: int
    train_tokens: int
    corpus: str
    device: str


@dataclass(frozen=True)
class Stepped:
    step: int  # counted from 1: how many are done
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    moved_bytes: int
    comm_seconds: float
    comm_hidden_seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Evaluated:
    step: int
    loss: float


@dataclass(frozen=True)
class Sampled:
    text: str


Event = Starting | Started | Stepped | Evaluated | Sampled

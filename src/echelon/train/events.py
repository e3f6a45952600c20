"""The events of a training. Rank 0 makes them; the display shows them and the logbook keeps them."""

from dataclasses import dataclass

from echelon.audit.report import AuditResult


@dataclass(frozen=True)
class Starting:
    """The job is valid and has its folder; ranks start next."""

    run: str


@dataclass(frozen=True)
class Started:
    parameters: int
    train_tokens: int
    corpus: str
    device: str
    unit: str = "tokens"  # what the loss counts


@dataclass(frozen=True)
class Audited:
    """What the audit has found so far, one result per entry; again where a later step has told more."""

    results: tuple[AuditResult, ...]


@dataclass(frozen=True)
class Stepped:
    step: int  # how many are done
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    moved_bytes: int
    comm_seconds: float
    comm_hidden_seconds: float
    memory_bytes: int
    skipped: bool = False  # fp16: gradients were not finite
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Evaluated:
    step: int
    loss: float
    accuracy: float | None = None  # of images: the part that was named rightly


@dataclass(frozen=True)
class Sampled:
    text: str


Event = Starting | Started | Audited | Stepped | Evaluated | Sampled

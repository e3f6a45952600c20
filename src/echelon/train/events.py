"""The events of a training. Rank 0 makes them; the display shows them and the logbook keeps them."""

from dataclasses import dataclass

from echelon.engine.audit import AuditResult

FROM_DISK = "from its checkpoint on disk"


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
    after_step: int = 0  # of the checkpoint that training goes on from; later steps are made again
    lines: tuple[str, ...] = ()  # of metrics.jsonl, up to there: it may lack them
    rollbacks: tuple["RolledBack", ...] = ()  # of the run so far: metrics.jsonl may lack them
    source: str = FROM_DISK  # or 'from memory': the state after that step


@dataclass(frozen=True)
class Audited:
    """The findings of the audit so far, one result per entry; again where a later step has told more."""

    results: tuple[AuditResult, ...]


@dataclass(frozen=True)
class GateLoad:
    """The work of a gate on the global batch of a step; see engine.expert_load()."""

    gate: str  # its name in the model
    tokens: tuple[float, ...]  # slots of each expert
    dropped: float
    entropy: float

    @property
    def largest_share(self) -> float:
        """The load of the busiest expert, as a multiple of the fair share."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else 1.0


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
    skipped: bool = False  # gradients, or the loss, were not finite
    loss_scale: float = 1.0
    experts: tuple[GateLoad, ...] = ()


@dataclass(frozen=True)
class Evaluated:
    step: int
    loss: float
    accuracy: float | None = None  # of images: the part that was named rightly


@dataclass(frozen=True)
class Sampled:
    text: str


@dataclass(frozen=True)
class Restarting:
    """A rank was lost. All ranks were ended, and new ones start."""

    reason: str  # 'rank 1 was killed by SIGKILL before it finished'
    number: int  # of restarts since the last checkpoint
    limit: int


@dataclass(frozen=True)
class Noted:
    """Something that a person should know of: a damaged checkpoint was passed over, the plan was changed."""

    text: str


@dataclass(frozen=True)
class RolledBack:
    """The loss has jumped, or numbers were not finite: training goes on after an earlier step."""

    step: int  # of the checkpoint
    from_step: int  # the last that went wrong
    reason: str
    first_batch: int  # those from here …
    end_batch: int  # … to before this are left out
    number: int  # of rollbacks in this run
    limit: int


Event = Starting | Started | Audited | Stepped | Evaluated | Sampled | Restarting | Noted | RolledBack

"""What is foreseen of a step: bytes per stage, seconds by part, and rates. Plain data."""

from dataclasses import dataclass
from typing import Any, NamedTuple

_USABLE = 0.97  # of a device; fragments take the others
_HOST_SHARE = 0.8  # of the memory of the host; programs and files take the rest


class Memory(NamedTuple):
    """Bytes of one rank at the peak of a step, by the categories of `engine.memory()`, which has `gathered`
    weights among parameters. `temporary` is what kernels hold beside them: logits. `host`: in the memory of
    the host."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    gathered: float
    temporary: float
    host: float

    @property
    def peak(self) -> float:
        """All of the device at once."""
        return sum(self[:7])

    @property
    def metered(self) -> float:
        """The peak as `engine.memory()` counts it, but for gathered weights."""
        return self.peak - self.temporary - self.gathered

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer


class Seconds(NamedTuple):
    """Parts of a step on the slowest rank, in seconds that nothing hides; `hidden` is beside them."""

    compute: float
    recompute: float
    host: float  # kernels that wait for their launch, and the host's own work
    tensor: float
    context: float
    expert: float
    pipeline: float  # messages between stages
    data: float  # gradients and weights along `data`
    bubble: float
    optimizer: float
    offload: float
    stragglers: float
    hidden: float  # communication behind computation

    @property
    def step(self) -> float:
        return sum(self[:-1])


@dataclass(frozen=True)
class Prediction:
    """A step of a plan on a cluster. `mfu` counts a step's operations once, `hfu` also those made again."""

    ranks: int
    memory: tuple[Memory, ...]  # of the stages that differ: the first, one between, the last
    stages: tuple[int, ...]  # their indices
    seconds: Seconds
    tokens: float
    flops: float  # of the model, all ranks
    mfu: float
    hfu: float
    capacity: float  # bytes of a device
    host_capacity: float  # bytes of host memory per device; 0: not known
    price: float
    reserve: float = 0.0  # bytes of a device that are always taken

    @property
    def step_seconds(self) -> float:
        return self.seconds.step

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return max(stage.peak for stage in self.memory)

    @property
    def fits(self) -> bool:
        """Whether all stages fit, beside what is always taken: contexts, messages' buffers, fragments."""
        if self.host_capacity and max(stage.host for stage in self.memory) > _HOST_SHARE * self.host_capacity:
            return False
        return self.peak + self.reserve <= _USABLE * self.capacity

    @property
    def bubble(self) -> float:
        """The share of a step in which stages wait for each other."""
        return self.seconds.bubble / self.step_seconds

    @property
    def cost(self) -> float:
        """The price of a step, if the cluster has one per device and hour."""
        return self.price * self.ranks * self.step_seconds / 3600

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return {
            "ranks": self.ranks,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "bubble": self.bubble,
            "cost": self.cost,
            "fits": self.fits,
            "peak_bytes": self.peak,
            "capacity_bytes": self.capacity,
            "seconds": self.seconds._asdict(),
            "memory": [
                {"stage": stage, "peak": memory.peak, **memory._asdict()}
                for stage, memory in zip(self.stages, self.memory, strict=True)
            ],
        }

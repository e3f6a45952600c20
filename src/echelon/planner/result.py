"""A partition: stages with replicas, their times and memory, and the matching fields of a plan."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on some workers. All times are per microbatch of the whole pipeline.

    `seconds` is the time of the stage, or of a transfer to or from it where that is longer. `memory_bytes` is
    the memory of one of its workers in the cost model.
    """

    layers: tuple[str, ...]
    replicas: int
    seconds: float
    compute_seconds: float
    gradient_seconds: float
    activation_seconds: float
    memory_bytes: float
    workers: tuple[int, ...]

    @property
    def limit(self) -> str:
        """What limits the stage: the part that takes the longest."""
        times = {
            "compute": self.compute_seconds,
            "gradients": self.gradient_seconds,
            "activations": self.activation_seconds,
        }
        return max(times, key=lambda name: times[name])

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "layers": list(self.layers),
            "workers": list(self.workers),
            "limit": self.limit,
        }


@dataclass(frozen=True)
class Partition:
    """A split of a profile. `exact`: no other split is faster under the cost model."""

    stages: tuple[Stage, ...]
    pipeline_seconds: float
    data_parallel_seconds: float
    single_device_seconds: float
    cost_model: str
    exact: bool

    @property
    def speedup_over_data_parallel(self) -> float:
        return self.data_parallel_seconds / self.pipeline_seconds

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(stage.replicas for stage in self.stages)

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """How many layers each stage has: with a chain of layers, where to cut."""
        return tuple(len(stage.layers) for stage in self.stages)

    @property
    def plan(self) -> str:
        """The fields of a plan: 'data=4' for one stage, 'pipeline=4', or 'pipeline=3-1'."""
        if len(self.stages) == 1:
            return f"data={self.replicas[0]}"
        if set(self.replicas) == {1}:
            return f"pipeline={len(self.stages)}"
        return "pipeline=" + "-".join(map(str, self.replicas))

    def to_dict(self) -> dict[str, Any]:
        return {
            "pipeline_seconds": self.pipeline_seconds,
            "data_parallel_seconds": self.data_parallel_seconds,
            "single_device_seconds": self.single_device_seconds,
            "speedup_over_data_parallel": self.speedup_over_data_parallel,
            "plan": self.plan,
            "cost_model": self.cost_model,
            "exact": self.exact,
            "stages": [stage.to_dict() for stage in self.stages],
        }

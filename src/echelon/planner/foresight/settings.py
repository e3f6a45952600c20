"""What a prediction reads of a plan, in numbers. A word of the plan that has no cost is refused by name."""

from typing import NamedTuple

from echelon.errors import did_you_mean, raise_errors
from echelon.plan import AUTO, Plan
from echelon.planner.foresight.kernels import BYTES
from echelon.quantities import read_bytes


class Optimizer(NamedTuple):
    """Numbers of state per weight, in float32 or wider; bytes that an update moves per weight, beside state,
    gradient and weight: sums over rows and columns, in kernels of their own."""

    states: int
    moved: float = 0.0


ADAM = "adamw"
OPTIMIZERS = {
    ADAM: Optimizer(2),
    "sgd": Optimizer(1),  # with momentum
    "sm3": Optimizer(1, 60.0),
    "adafactor": Optimizer(0, 60.0),
}


class Settings(NamedTuple):
    """A plan in numbers; and what only other programs' runs have: fp8, experts without tensor ranks."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1  # of the tensor ranks, so many share each expert; the others take other tokens
    chunks: int = 1
    microbatches: int = 1
    zero: int = 0
    shard: int = 0
    schedule: str = "1f1b"
    sequence: bool = False
    attention: str = "ring"
    precision: str = "bf16"  # of products
    recompute: str = "none"
    budget: float = 0.0  # bytes, of recompute=budget
    remade: float = 1.0  # share of layers that recompute=budget makes again
    split_checkpoints: bool = False
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0  # that a rank keeps
    message_bytes: float = 4.0  # of a gradient that ranks exchange
    optimizer_bytes: float = 12.0
    update_bytes: float = 0.0  # per weight, see `Optimizer`
    update: str = "step"
    sync: str = "all-reduce"
    offload: frozenset[str] = frozenset()
    delay: int = 0
    saved: float = 1.0  # share of saved activations that compression leaves
    compiled: bool = False
    graphs: bool = False  # passes of one rank are replayed, where the host is the slower one
    frozen: bool = False  # weights have no gradients (LoRA)
    records_first: bool = False  # a pass of forwards records what gates do

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def copies(self) -> int:
        """Ranks that hold the same dense weights."""
        return self.data * self.context

    @property
    def shards(self) -> int:
        """Ranks over which zero shards dense weights."""
        return self.shard or self.copies

    @property
    def forwards_first(self) -> bool:
        """Whether every rank runs all forwards of a step before its first backward."""
        if self.microbatches == 1 or self.pipeline == 1:
            return self.microbatches == 1
        is_filled = self.schedule == "interleaved" and self.microbatches == self.pipeline
        return is_filled or self.schedule == "gpipe"


_GIST_BITS = {"gist-fp16": 16, "gist-fp10": 10, "gist-fp8": 8}


def settings_of(plan: Plan, optimizer: str = ADAM) -> Settings:
    """Return what a plan costs by, with one of `OPTIMIZERS`; a UserError names every word of it that has no
    cost here."""
    refusals = _refusals(plan)
    if optimizer not in OPTIMIZERS:
        refusals.append(f"optimizer={optimizer}: is unknown{did_you_mean(optimizer, OPTIMIZERS)}")
    if refusals:
        raise_errors(f"foresight of plan '{plan}'", refusals)
    assert isinstance(plan.pipeline, int)
    size = float(BYTES["bf16" if plan.precision == "fp8" else plan.precision])
    is_narrow = size < BYTES["fp32"]
    gradient = summed_bytes(plan.precision, plan.microbatches, plan.data * plan.context)
    if plan.gradients == "same":
        gradient = size
    states = OPTIMIZERS[optimizer].states * max(4.0, size)
    return Settings(
        plan.data,
        plan.tensor,
        plan.pipeline,
        plan.context,
        plan.expert,
        expert_tensor=plan.tensor,
        chunks=plan.chunks,
        microbatches=plan.microbatches,
        zero=plan.zero,
        shard=plan.shard,
        schedule=plan.schedule,
        sequence=plan.sequence,
        attention=plan.attention,
        precision=plan.precision,
        recompute=plan.recompute.partition(":")[0],
        budget=read_bytes(plan.recompute.partition(":")[2]) if ":" in plan.recompute else 0.0,
        split_checkpoints=plan.checkpoints == "split",
        weight_bytes=size,
        gradient_bytes=gradient,
        message_bytes=gradient,
        optimizer_bytes=states + (4.0 if is_narrow and plan.masters else 0.0),
        update_bytes=OPTIMIZERS[optimizer].moved,
        update=plan.update,
        sync=plan.sync,
        offload=frozenset(plan.offload),
        delay=plan.delay,
        saved=_GIST_BITS.get(plan.compress, 8 * size) / (8 * size),
        compiled=plan.compile,
        graphs=plan.graphs != "false",
    )


def summed_bytes(precision: str, microbatches: int, copies: int) -> float:
    """Bytes of a gradient: of float32 where narrow ones are summed, over microbatches or ranks."""
    kept = "bf16" if precision == "fp8" else precision
    is_summed = BYTES[kept] < BYTES["fp32"] and microbatches * copies > 1
    return 4.0 if is_summed else float(BYTES[kept])


def _refusals(plan: Plan) -> list[str]:
    errors = []
    if plan.pipeline == AUTO:
        errors.append("pipeline=auto: stages are measured at the start; give their number, like pipeline=4")
    elif not isinstance(plan.pipeline, int):
        errors.append(
            f"pipeline={'-'.join(map(str, plan.pipeline))}: stages with different numbers of replicas are "
            "predicted by `echelon partition`, from a profile"
        )
    if plan.schedule.endswith(".txt"):
        errors.append(
            f"schedule={plan.schedule}: an order from a file has no cost; `echelon schedule` draws it"
        )
    if plan.debug:
        errors.append("debug=true: what comparing calls takes is not predicted; drop it")
    return errors

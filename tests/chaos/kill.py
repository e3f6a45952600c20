"""What a kill is: which rank, at which moment; drawn by a seed."""

import random
from dataclasses import dataclass

MOMENTS = ("step", "save", "start")
PLANS = (
    "data=2",
    "data=2 zero=3",
    "pipeline=2 microbatches=2",
    "tensor=2",
    "data=2 zero=1 precision=bf16",
    "data=2 context=2",
    "data=3 zero=2",
    "data=1",
)


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a rank, `delay` seconds after its moment.

    step    a step, or what comes after it: the first one that is reported from `step` on
    save    a checkpoint is being written, of `step` or a later one
    start   ranks start: at first, or after the kill before this one
    """

    moment: str
    step: int
    rank: int  # modulo the number of ranks
    delay: float

    def __str__(self) -> str:
        return f"{self.moment}@{self.step}:rank{self.rank}+{1e3 * self.delay:.1f}ms"


def draw_kills(seed: str, number: int, steps: int) -> list[Kill]:
    """Kills for one run, by step: half of them during a save."""
    random_ = random.Random(seed)
    return [_draw(random_, 1 + index * steps // (number + 1), index) for index in range(number)]


def _draw(random_: random.Random, step: int, index: int) -> Kill:
    moment = "save" if index % 2 else random_.choice(("step", "step", "start"))
    longest = {"step": 0.02, "save": 0.03, "start": 1.5}[moment]
    # Squared: short delays more often, for they hit the middle of something.
    return Kill(moment, step, random_.randrange(8), longest * random_.random() ** 2)

"""One random training as plain data, which prints as one line and is read from it again.

>>> print(RandomTraining(Plan(data=2, zero=1), model="llama", samples=5))
data=2 zero=1 | model=llama samples=5
"""

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Any

from echelon.plan import AUTO, Plan

ORDER_FILE = "order.txt"  # in a random plan; the runner writes the file


@dataclass(frozen=True)
class RandomTraining:
    """A plan, a model, an optimizer and a batch. The defaults are the simplest values."""

    plan: Plan
    order: str = ""  # the schedule file of the plan, its lines joined by " / "
    workers: int = 1  # how many ranks pipeline=auto has for each replica
    bold: bool = False  # what the model is known to be refused for may be drawn too
    model: str = "gpt"
    layers: int = 1
    heads: int = 2
    kv_heads: int = 0  # 0: as many as heads
    vocab: int = 16
    tokens: int = 8  # of a sequence
    tied: bool = False
    dropout: float = 0.0
    optimizer: str = "sgd"
    decay: str = "none"
    clip: float = 0.0  # 0: none
    samples: int = 1
    batch: str = "pair"  # or a dict with labels, for a loss that is given or the model's own
    targets: str = "all"
    steps: int = 3
    prefetch: int = 1
    smallest_unit: int = 0
    resident_bytes: int = 0
    rates: str = "constant"  # of learning, by step
    deferred: bool = False  # the model is built without memory
    boundaries: str = "even"  # of stages
    seed: int = 0
    before: str = ""  # the plan of the first `stop` steps, after which a checkpoint is loaded into `plan`
    stop: int = 0

    @property
    def first_part(self) -> "RandomTraining":
        """The training up to the checkpoint; what belongs to `plan` alone is as simple as it can be."""
        return dataclasses.replace(
            self,
            plan=Plan.parse(self.before),
            order="",
            workers=1,
            prefetch=1,
            resident_bytes=0,
            boundaries="even",
            before="",
            stop=0,
        )

    @property
    def ranks(self) -> int:
        plan = self.plan
        if plan.pipeline == AUTO:
            return plan.data * plan.tensor * plan.context * self.workers
        return plan.ranks

    @property
    def order_text(self) -> str:
        """The schedule file as it is written."""
        return self.order.replace(" / ", "\n") + "\n"

    def __str__(self) -> str:
        words = [
            f"{field.name}={shlex.quote(str(getattr(self, field.name)))}"
            for field in dataclasses.fields(self)[1:]
            if getattr(self, field.name) != field.default
        ]
        return f"{self.plan} | {' '.join(words)}"

    @classmethod
    def parse(cls, line: str) -> "RandomTraining":
        plan, _, rest = line.partition("|")
        words = dict(word.split("=", 1) for word in shlex.split(rest))
        return cls(Plan.parse(plan.strip()), **{name: _read(name, text) for name, text in words.items()})


def _read(name: str, text: str) -> Any:
    default = next(field.default for field in dataclasses.fields(RandomTraining) if field.name == name)
    return text == "True" if isinstance(default, bool) else type(default)(text)

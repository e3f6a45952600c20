"""What each bench is held to. `python -m benchmarks NAME` exits with 1 when a target is missed.

All targets stand here, and nowhere else in the repository. Limits are for medians.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from benchmarks.compare import Row
from echelon.quantities import show_figure

_NOT_SLOWER = "issue 34: never slower than plain torch"
_COMPILED = "echelon compile=true"


class Target(NamedTuple):
    """A limit on a figure of every row whose case and contender match these patterns.

    `figure` is `ratio`, or the name of an extra. A limit that is text is another extra of the same row.
    """

    limit: float | str
    source: str
    case: str = "*"
    contender: str = "echelon"
    figure: str = "ratio"
    at_least: bool = False

    def covers(self, row: Row) -> bool:
        return fnmatchcase(row.case, self.case) and fnmatchcase(row.contender, self.contender)

    def is_met(self, row: Row) -> bool:
        """False also where the row does not have the figure."""
        value, limit = _figure(row, self.figure), self._limit(row)
        if value is None or limit is None:
            return False
        return value >= limit if self.at_least else value <= limit

    def show(self, row: Row) -> str:
        """'ratio ≤ 0.97'"""
        limit = self._limit(row)
        shown = self.limit if limit is None else _show(self.figure, limit)
        return f"{self.figure.replace('_', ' ')} {'≥' if self.at_least else '≤'} {shown}"

    def show_measured(self, row: Row) -> str:
        value = _figure(row, self.figure)
        return "not measured" if value is None else _show(self.figure, value)

    def _limit(self, row: Row) -> float | None:
        return row.extras.get(self.limit) if isinstance(self.limit, str) else self.limit


TARGETS: dict[str, tuple[Target, ...]] = {
    "step": (Target(1.0, _NOT_SLOWER),),
    "data-parallel": (Target(1.0, _NOT_SLOWER),),
    "pipeline": tuple(
        Target(0.97, "issue 34: at most 0.97 of torch's pipelining", case)
        for case in ("gpipe", "1f1b", "interleaved")
    ),
    "tensor": (Target(1.0, _NOT_SLOWER),),
    "start": tuple(
        Target(f"{phase}_limit_bytes", f"docs/large-models.md: {what}", "*", "*", f"{phase}_peak_bytes")
        for phase, what in (
            ("start", "the weights that a rank owns, and two units"),
            ("step", "the state that a rank owns, two units, and activations"),
        )
    ),
    "checkpoint": (Target(1.0, _NOT_SLOWER, "load*", "engine.load"),),
    "one-gpu": (
        Target(1.0, _NOT_SLOWER, "*, B=*", "echelon compile=true"),
        Target(0.46, "issue 34: 46 % of the arithmetic", "GPT-2 124M, B=*", _COMPILED, "share_of_peak", True),
        Target(0.40, "issue 34: 40 % without compile", "GPT-2 124M, B=*", "echelon", "share_of_peak", True),
        Target(22 * 2**30, "issue 34: peak at most 22 GiB", "GPT-2 124M, B=*", _COMPILED, "peak_bytes"),
        Target(0.50, "issue 34: 50 % of the arithmetic", "GPT-2 1.5B, B=*", _COMPILED, "share_of_peak", True),
        Target(60 * 2**30, "issue 34: peak at most 60 GiB", "GPT-2 1.5B, B=*", _COMPILED, "peak_bytes"),
        Target(15, "issue 34: first step in 15 s", "Llama*", _COMPILED, "first_seconds"),
        Target(1.05, "issue 34: microbatches=4 at least 0.95 of one batch", "*", "4 microbatches"),
    ),
    "kernels": (Target(1.0, _NOT_SLOWER, "dropout*"),),
    "recompute": (Target(1.05, "issue 34: selective at most 5 % slower", "*", "selective"),),
    "gist": tuple(
        Target(1.05, "issue 34: at most 1.05 of torch without it", network, "gist*")
        for network in ("alexnet", "nin", "vgg16", "inception-v1")
    ),
    "offload-optimizer": (Target(1 / 0.95, "issue 34: at least 95 % of no offload", "*", "offload*"),),
    "moe-layer": (Target(0.85, "issue 34: at least 85 % of dense", figure="share_of_dense", at_least=True),),
}


def targets_of(name: str, row: Row) -> list[Target]:
    """The targets that this row of a bench is held to."""
    return [target for target in TARGETS.get(name, ()) if target.covers(row)]


def missed(name: str, rows: Iterable[Row], *, partial: bool = False) -> list[str]:
    """A sentence for each target that is missed. Unless the result is `partial`, every target needs a row."""
    rows = list(rows)
    sentences = [
        f"{row.case}, {row.contender} beside {row.baseline}: {target.show(row)} does not hold: "
        f"it is {target.show_measured(row)} ({target.source})"
        for row in rows
        for target in targets_of(name, row)
        if not target.is_met(row)
    ]
    idle = [target for target in TARGETS.get(name, ()) if not any(map(target.covers, rows))]
    if not partial:
        sentences += [
            f"no row is '{target.case}' with contender '{target.contender}', which has a target: "
            "rename it in benchmarks/targets.py"
            for target in idle
        ]
    return sentences


def _figure(row: Row, name: str) -> float | None:
    return row.ratio.median if name == "ratio" else row.extras.get(name)


def _show(figure: str, value: float) -> str:
    return f"{value:.3g}" if figure == "ratio" else show_figure(figure, value)

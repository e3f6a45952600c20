"""From samples to rows: medians of seconds, and of paired ratios against a baseline.

The speed of a machine drifts while a bench runs. Contenders that take turns drift together, so the ratio of
two samples of the same round is reliable where absolute times are not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles

Samples = Mapping[str, Sequence[float]]  # by contender, one number per round


@dataclass(frozen=True)
class Spread:
    """The quartiles of some numbers: a quarter of them is below `low`, a quarter above `high`."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Spread":
        if len(numbers) == 1:
            return cls(numbers[0], numbers[0], numbers[0])
        return cls(*quantiles(numbers, n=4, method="inclusive"))


@dataclass(frozen=True)
class Row:
    """One contender in one case. `ratio` is its time divided by the baseline's time of the same round.

    `extras` are further figures, each named with its unit: bus_bytes_per_second, peak_bytes …
    """

    case: str
    contender: str
    baseline: str
    seconds: Spread
    ratio: Spread
    extras: dict[str, float] = field(default_factory=dict)


def compare(case: str, samples: Samples, baseline: str) -> list[Row]:
    """A row for each contender, in their order; the baseline's own ratio is 1."""
    return [
        Row(case, contender, baseline, Spread.of(seconds), Spread.of(_ratios(seconds, samples[baseline])))
        for contender, seconds in samples.items()
    ]


def slowest(ranks: Sequence[Samples]) -> dict[str, list[float]]:
    """The samples of the slowest rank, round by round: ranks that work together wait for it."""
    return {
        contender: [max(same_round) for same_round in zip(*(rank[contender] for rank in ranks), strict=True)]
        for contender in ranks[0]
    }


def _ratios(seconds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    return [own / reference for own, reference in zip(seconds, baseline, strict=True)]

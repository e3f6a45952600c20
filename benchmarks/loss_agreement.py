"""Whether two contenders train the same: their first losses, and those of one device where they differ.

A peer that trains differently does other work, so a reader must know. The figures are still measured.
"""

import math
from collections.abc import Callable, Sequence

from benchmarks.replicas import Peer

ECHELON = "echelon"

# Float32 sums in another order differ by this much of a loss after some steps of AdamW.
_ROUNDING = 1e-3

RankLosses = dict[str, list[float]]  # of one rank by contender, one number per step


def difference(
    peer: Peer, ranks: Sequence[RankLosses], steps: int, one_device: Callable[[], list[float]]
) -> str | None:
    """A sentence if echelon and `peer` had other losses over the global batch in their first steps.

    `one_device` trains on the global batch in plain torch, and is called only if they differ.
    """
    losses = {name: _global_losses(name, ranks, steps) for name in (ECHELON, peer.name)}
    if _gap(losses[ECHELON], losses[peer.name]) <= _ROUNDING:
        return None
    reference = one_device()[:steps]
    gaps = {name: _gap(own, reference) for name, own in losses.items()}
    equal = [name for name, gap in gaps.items() if gap <= _ROUNDING]
    which = f"one device trains as {' and '.join(equal)}" if equal else "one device trains as neither"
    listing = "; ".join(f"{name} {_show(own)}, off by {gaps[name]:.1e}" for name, own in losses.items())
    return (
        f"zero={peer.level}: the losses of {ECHELON} and {peer.name} differ, so they do not train the same; "
        f"{which}: {listing}; one device {_show(reference)}"
    )


def _global_losses(contender: str, ranks: Sequence[RankLosses], steps: int) -> list[float]:
    """A peer reports the loss of a rank's own samples, echelon that of all: their means over ranks agree."""
    by_step = zip(*(losses[contender][:steps] for losses in ranks), strict=True)
    return [sum(losses) / len(losses) for losses in by_step]


def _gap(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of a step; infinite for what is not a number."""
    gaps = [
        abs(own - other) / max(abs(own), abs(other), 1e-30)
        for own, other in zip(losses, reference, strict=True)
    ]
    return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0)


def _show(losses: Sequence[float]) -> str:
    return " ".join(f"{loss:.6f}" for loss in losses)

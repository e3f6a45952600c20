"""What the layers of a rank keep for the backward pass, and what they keep at most when some are recomputed.

Layers are kept, or lie in a segment: a run of consecutive layers of which only the input is kept, and the
rest computed again just before its backward pass. For one microbatch of a stage, kept bytes are

    K   what kept layers save, and the input of each segment

and with n microbatches in flight on the stage, the bytes of a rank are at their peak either

    when the last of them has gone forward:         sum over stages of n·K
    or when a segment has been computed again:      the same, less what this microbatch kept of the layers
                                                    behind the segment, and what the segment's layers save

Where a backward pass is in two halves (zero-bubble), what was computed again stays until the second half: of
a microbatch that waits for it, everything is alive. What code around the layers saves, and masks that it
hands to them, is counted as if it were alive until the end of the backward pass.

What is alive in truth is never more: a storage that two neighbours save is counted once, and everything else
that may lie in one storage is counted as if it did not.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

Segments = tuple[tuple[int, int], ...]  # each from its first layer to before its last, in order


class LayerCost(NamedTuple):
    """One forward pass of one layer, measured."""

    saved: int  # bytes that autograd saves in it
    input: int  # bytes of its input
    seconds: float
    reused: int = 0  # bytes of what it saves that lie in its input
    shared: int = 0  # bytes of what it saves that the layer before saves too
    can_recompute: bool = True


class StageCosts(NamedTuple):
    """The layers of one stage, in order, and how many microbatches it keeps at once: before their backward
    pass, and between its halves. `outside`: bytes that each keeps from code around the layers."""

    layers: tuple[LayerCost, ...]
    in_flight: int
    waiting: int = 0
    outside: int = 0

    @property
    def fixed_bytes(self) -> int:
        """What is there whatever is chosen."""
        between_halves = self.waiting * sum(layer.saved for layer in self.layers)
        return between_halves + (self.in_flight + self.waiting) * self.outside


class Choice(NamedTuple):
    """For each stage its segments; what they cost and take."""

    segments: tuple[Segments, ...]
    seconds: float  # of forward passes that are made again, in a microbatch
    peak: int  # bytes of the rank


def evaluate(stages: Sequence[StageCosts], segments: Sequence[Segments]) -> Choice:
    """What a choice takes and costs."""
    kept = [_kept_bytes(stage.layers, chosen) for stage, chosen in zip(stages, segments, strict=True)]
    forward = sum(stage.in_flight * sum(each) for stage, each in zip(stages, kept, strict=True))
    forward += sum(stage.fixed_bytes for stage in stages)
    peak, seconds = forward, 0.0
    for stage, chosen, each in zip(stages, segments, kept, strict=True):
        total = sum(each)
        behind = [total, *(total - before for before in accumulate(each))]
        for begin, end in chosen:
            again = 0 if stage.waiting else recomputed_bytes(stage.layers, begin, end)  # else counted above
            peak = max(peak, forward - behind[end] + again)
            seconds += sum(layer.seconds for layer in stage.layers[begin:end])
    return Choice(tuple(segments), seconds, peak)


def recomputed_bytes(layers: Sequence[LayerCost], begin: int, end: int) -> int:
    """What a segment takes beside its input when it has been computed again."""
    inside = sum(layer.saved for layer in layers[begin:end])
    return inside - layers[begin].reused - sum(layer.shared for layer in layers[begin + 1 : end])


def uniform_choices(stages: Sequence[StageCosts], longest: int | None = None) -> Iterator[Choice]:
    """No segments; then every layer in segments of one length, for each length up to `longest`."""
    yield evaluate(stages, [() for _ in stages])
    most = max((len(stage.layers) for stage in stages), default=0)
    for length in range(1, min(most, longest or most) + 1):
        yield evaluate(stages, [tuple(_cut(stage.layers, length)) for stage in stages])


def _cut(layers: Sequence[LayerCost], length: int) -> Iterator[tuple[int, int]]:
    """Segments of `length` layers, or fewer where a layer that cannot be recomputed follows."""
    begin = 0
    for index in range(len(layers) + 1):
        is_stop = index == len(layers) or not layers[index].can_recompute
        if is_stop or index - begin == length:
            if index > begin:
                yield begin, index
            begin = index + is_stop


def _kept_bytes(layers: Sequence[LayerCost], segments: Segments) -> list[int]:
    """What one microbatch keeps of each layer from its forward to its backward pass."""
    kept: list[int] = []
    first_of = {index: begin for begin, end in segments for index in range(begin, end)}
    for index, layer in enumerate(layers):
        if index in first_of:
            kept.append(layer.input if first_of[index] == index else 0)
        else:
            follows_kept = index > 0 and index - 1 not in first_of
            kept.append(layer.saved - (layer.shared if follows_kept else 0))
    return kept

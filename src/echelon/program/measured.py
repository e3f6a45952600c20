"""Measured steps in the words of the simulation: their bubble, and the costs that they show.

Planned and measured spans are judged by the same rule (`work`, `bubble`). Measured costs feed a simulation of
the same program. The gap between the two bubbles comes from effects that the cost model leaves out.
"""

from collections.abc import Iterator, Sequence
from statistics import median

from echelon.program.instruction import RECEIVES, SENDS, Op
from echelon.program.simulate import Costs
from echelon.program.timeline import WORK, Span

Step = Sequence[Span]  # of all ranks, those of one rank together and in their order


def work(spans: Step) -> list[Span]:
    """The computations and updates: what a rank does alone. In all else ranks wait for each other."""
    return [span for span in spans if span.op in WORK]


def bubble(spans: Step, ranks: int) -> float:
    """1 − busy / (ranks · length), from the start of the first work to the end of the last, on any rank.

    rank 0  F0 ·  B0
    rank 1  ·  F0 ·       ->  1/2
    """
    length = seconds(spans)
    busy = sum(float(span.seconds) for span in work(spans))
    return 1 - busy / (ranks * length) if length else 0.0


def seconds(spans: Step) -> float:
    """From the start of the first work to the end of the last, on any rank."""
    shown = work(spans)
    if not shown:
        return 0.0
    return float(max(span.end for span in shown) - min(span.start for span in shown))


def costs(steps: Sequence[Step], stages: int) -> Costs:
    """The median seconds over all steps: of each kind of work at each stage, and of a transfer."""
    durations: dict[tuple[Op, int], list[float]] = {}
    for span in (span for step in steps for span in work(step)):
        durations.setdefault((span.op, span.instruction.stage), []).append(float(span.seconds))

    def each(op: Op) -> list[float]:
        return [median(durations.get((op, stage), [0.0])) for stage in range(stages)]

    return Costs(
        forward=each(Op.FORWARD),
        backward=each(Op.BACKWARD),
        backward_input=each(Op.BACKWARD_INPUT),
        backward_weight=each(Op.BACKWARD_WEIGHT),
        update=each(Op.UPDATE),
        transfer=_transfer(steps),
    )


def _transfer(steps: Sequence[Step]) -> float:
    """The median hop: from the start of a send to the end of its receive.

    Only where the receiver was waiting: one that comes later finds the message, and shows nothing of the hop.
    """
    pairs = [pair for step in steps for pair in _pairs(step)]
    waited = [float(recv.end - send.start) for send, recv in pairs if recv.start <= send.start]
    return median(waited or [float(recv.seconds) for _, recv in pairs] or [0.0])


def _pairs(step: Step) -> Iterator[tuple[Span, Span]]:
    """Each send with its receive: the n-th from one rank to another is the n-th that this one receives."""
    sends: dict[tuple[int, int | None], list[Span]] = {}
    receives: dict[tuple[int | None, int], list[Span]] = {}
    for span in step:
        peer = span.instruction.peer
        if span.op in SENDS:
            sends.setdefault((span.rank, peer), []).append(span)
        elif span.op in RECEIVES:
            receives.setdefault((peer, span.rank), []).append(span)
    for (source, target), spans in sends.items():
        assert target is not None
        yield from zip(spans, receives.get((source, target), []), strict=True)

"""The numbers of an update: what it does with its gradients, and what it tells of itself.

Reading a number from a CUDA device stops the host until all work that was queued before it is done, and the
device then has nothing to do until the host has queued more. So a step reads nothing there: its numbers stay
0-dim tensors, `StepNumbers` starts a copy to the host, and only `read` waits for it. On the CPU they are
floats: `scale` takes 90 µs on tensors there, and 4 µs on floats.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.parallel.data.gradients import clip_factor
from echelon.parallel.data.sharing import Problem

Number = float | Tensor
Flag = bool | Tensor


def choose(condition: Flag, one: Number, other: Number) -> Number:
    """Return `one` where the condition holds, else `other`. A condition on the device is not read."""
    if isinstance(condition, Tensor):
        return torch.where(condition, one, other)
    return one if condition else other


def either(one: Flag, other: Flag) -> Flag:
    """Return `one | other`, without an operation on the device where one of them is known to be false."""
    if one is False or other is False:
        return other if one is False else one
    return one | other


class Counted(NamedTuple):
    """The sums of a tally that the host may know: how much losses counted, and that times what they were
    divided by before the backward pass. Those of means are numbers of samples."""

    amount: float
    weighted: float

    def plus(self, amount: Number, weighted: Number) -> "Counted | None":
        """Return the sums with another loss; None where one of its numbers is on the device."""
        if isinstance(amount, Tensor) or isinstance(weighted, Tensor):
            return None
        return Counted(self.amount + float(amount), self.weighted + float(weighted))  # numpy's too


class Scaling(NamedTuple):
    """`factor` of the gradients; `norm` of the mean's, before clipping.

    No weight changes if it is `refused` (no samples, or a problem), `overflows` (gradients are not finite,
    and losses are scaled), or is `left_out` (not finite, where the plan leaves such steps out).
    """

    factor: Number
    refused: Flag
    overflows: Flag
    norm: Number
    left_out: Flag = False

    @property
    def skip(self) -> Flag:
        return either(either(self.refused, self.overflows), self.left_out)


def scale(
    sums: Sequence[Number] | Tensor, clip: float | None, *, scaled: bool = False, skips: bool = False
) -> Scaling:
    """From the sums over ranks to what an update does with its gradients.

        sums        loss total, count, count · normaliser, squares of the gradients of total / normaliser, a
                    flag for each problem
        mean        gradients · normaliser / count
        clipped     · min(1, clip / norm of the mean)

    `scaled`: losses have a loss scale, as part of the normaliser. Then squares that are not finite are an
    overflow. (Those of finite gradients are: 65,504 squared is far below the 3e38 of float32.)
    `skips`: a step whose loss or squares are not finite is left out. Of scaled losses that is one whose loss
    is not finite, which no other loss scale would help: an overflow of gradients alone is not.
    """
    total, count, weighted, square = sums[:4]
    flags, is_empty = sums[4:], count == 0
    refused = either(is_empty, flags.any() if isinstance(flags, Tensor) else any(flags))
    # `refused ^ True` is `not`, of a bool and of a tensor alike. What is not asked for is not computed: on a
    # device each operation takes the host as long as a small layer.
    overflows = (refused ^ True) & _is_not_finite(square) if scaled else False
    left_out: Flag = False
    if skips:
        left_out = (refused ^ True) & _is_not_finite(total + count if scaled else total + count + square)
    divisor = count + is_empty  # where it is empty, all sums are 0, and so is the mean
    mean = weighted / divisor / divisor
    norm = mean * square**0.5
    factor = mean if clip is None else mean * clip_factor(norm, clip)
    return Scaling(factor, refused, overflows, norm, left_out)


class RankNumbers(NamedTuple):
    """What one rank finds out of its losses and gradients for an update, where no other rank takes part and
    nothing is wrong. `values`: those of `Outcome` that are on the device, in order; `known`: all of them, and
    None for these."""

    scaling: Scaling
    counted: Number
    values: Tensor
    known: tuple[float | None, ...]


Known = Counted | RankNumbers  # of a tally, on the host; or all numbers, of a replay


def rank_numbers(
    tally: Tensor, square: Tensor, counted: Counted | None, clip: float | None, *, skips: bool
) -> RankNumbers:
    """Compute them of the tally and the squares of gradients; reads nothing from the device."""
    total, count, weighted = tally.unbind() if counted is None else (tally[0], *counted)
    scaling = scale([total, count, weighted, square], clip, skips=skips)
    found = (total, count, scaling.norm, 1.0, scaling.left_out)
    values = torch.stack([each.double() for each in found if isinstance(each, Tensor)])
    known = tuple(None if isinstance(each, Tensor) else float(each) for each in found)
    return RankNumbers(scaling, count, values, known)


class Tally(NamedTuple):
    """The sums of a batch's losses on this rank: the row (loss total, count, count · normaliser), and what
    the host knows of it."""

    row: Tensor
    counted: Counted | None = None


@final
class Tallies:
    """The losses of the batches whose gradients add up to one update: a tally of each, on this rank."""

    def __init__(self) -> None:
        self._tallies: list[Tally] = []
        self.replayed: RankNumbers | None = None  # all numbers, of a replay that nothing comes after
        self.own: int | None = None  # the last row of the engine's own loss, of which later steps learn
        self.is_summed = False  # whether gradients are summed over ranks
        self._num_passes = 0  # those of losses that are still to come too

    def __len__(self) -> int:
        return len(self._tallies)

    def next_pass(self) -> int:
        """Count a pass; returns how many came before it."""
        self.check_not_summed()
        self._num_passes += 1
        return self._num_passes - 1

    def check_not_summed(self) -> None:
        if self.is_summed:
            raise UserError("last=True: gradients are summed over ranks already; call engine.update() first")

    def add(self, tally: Tally, *, is_own: bool = False, is_summed: bool = False) -> None:
        self.own = len(self._tallies) if is_own else self.own
        self._tallies.append(tally)
        self.is_summed = is_summed

    @property
    def known(self) -> Known | None:
        """Return the numbers of a replay, or what the host knows of the row, if there is just one."""
        return self.replayed or (self._tallies[0].counted if len(self._tallies) == 1 else None)

    def joined(self) -> Tensor:
        """Return the row, or all of several."""
        rows = [tally.row for tally in self._tallies]
        return rows[0] if len(rows) == 1 else torch.stack(rows)


def add_calls(sums: Tensor) -> tuple[Tensor, Tensor]:
    """From the tallies of several batches, a row each, to that of one whose mean is the sum of theirs; and
    whether they were divided by different multiples of their counts, so that gradients cannot be added."""
    total, count, weighted = sums.unbind(1)
    divisor = count + (count == 0)
    means, factors = total / divisor, weighted / divisor / divisor
    all_count = count.sum() * (count != 0).all()  # one that counts nothing refuses the update
    factor = factors.max()
    row = torch.stack([means.sum() * all_count, all_count, factor * all_count * all_count])
    return row, ((factors - factor) * (count != 0)).abs().max() > 1e-9 * factor


def _is_not_finite(number: Any) -> Any:
    return number - number != 0


_NO_SAMPLE = "no replica had a sample that the loss counts; give the step one that has"
_NO_SAMPLE_HERE = "this worker had no sample that the loss counts; give every worker at least one per step"


class Outcome(NamedTuple):
    """The result of an update: the loss total, its count, the norm of the mean's gradient; what losses were
    scaled by, how many updates were skipped because gradients were not finite, and on how many ranks the
    step took another way through the model than those before it."""

    total: float
    counted: float
    norm: float
    loss_scale: float = 1.0
    num_skipped: float = 0.0
    auxiliary: float = 0.0  # losses of gates, which are no part of the total
    other_ways: float = 0.0


class GateNumbers(NamedTuple):
    """The share of gates in the numbers of an update: this rank's share of their losses, for each gate
    whether its statistics are not finite, and what the user reads then."""

    auxiliary: Tensor
    is_broken: Tensor
    errors: Sequence[str]


@final
class HostCopy:
    """A small tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor.clone()  # a replay may write into it
        else:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def is_ready(self) -> bool:
        return self._copied is None or self._copied.query()

    def wait(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._host.tolist()
        return values


@final
class StepNumbers:
    """Loss total, count, norm and problems of one update, the same on every rank."""

    def __init__(
        self,
        values: Tensor | Sequence[float],
        *,
        may_be_empty: bool = False,
        of_worker: bool = False,
        gate_errors: Sequence[str] | None = None,
        tells_ways: bool = False,
        known: Sequence[float | None] | None = None,
    ) -> None:
        """`values`: the first five of `Outcome`, and flags for each `Problem` where there may be any.

        `known`: all of these, where the host knows some: `values` are those that are None.

        `may_be_empty`: an update of no samples is no error. `of_worker`: it is of one worker's samples.
        `gate_errors`: of each gate; then its flag follows among `values`, and at the end the auxiliary loss.
        `tells_ways`: last of all come the ranks that took another way.
        """
        self._values, self._known = values, known  # until they are read
        self._gate_errors, self._tells_ways = gate_errors, tells_ways
        self._may_be_empty, self._of_worker = may_be_empty, of_worker
        self._copy = HostCopy(values) if isinstance(values, Tensor) else None
        self._outcome: Outcome | None = None
        self._error: str | None = None

    @classmethod
    def known(cls, outcome: Outcome, *, of_worker: bool = False) -> "StepNumbers":
        """Numbers that are on the host already."""
        return cls(outcome, of_worker=of_worker, gate_errors=(), tells_ways=True)

    @property
    def norm(self) -> Number:
        """The norm: on the device, if the numbers came from there and were not read."""
        assert self._known is None  # else there are fewer values
        return self._values[2]

    @property
    def is_ready(self) -> bool:
        """Return whether `read` returns without waiting for the device."""
        return self._copy is None or self._copy.is_ready

    @property
    def outcome(self) -> Outcome:
        """The numbers, also if the update was refused. Waits for the device."""
        if self._outcome is None:
            values = self._values if self._copy is None else self._copy.wait()
            if self._known is not None:
                read = iter(values)
                values = [next(read) if each is None else each for each in self._known]
            total, counted, norm, scale, skipped, *flags = map(float, values)
            other_ways = flags.pop() if self._tells_ways else 0.0
            auxiliary = 0.0 if self._gate_errors is None else flags.pop()
            norm = math.inf if skipped and math.isnan(norm) else norm  # a difference of two infinities
            self._outcome = Outcome(total, counted, norm, scale, skipped, auxiliary, other_ways)
            self._error = self._first_error(self._outcome, flags)
            self._values, self._copy = self._outcome, None  # gives pinned memory back to torch
        return self._outcome

    def error(self) -> UserError | None:
        """Why the update was refused, if it was. Waits for the device."""
        _ = self.outcome
        return None if self._error is None else UserError(self._error)

    def read(self) -> Outcome:
        """The numbers; raises if the update was refused. Waits for the device."""
        error = self.error()
        if error is not None:
            raise error
        return self.outcome

    def _first_error(self, outcome: Outcome, flags: Sequence[float]) -> str | None:
        errors = self._gate_errors or ()
        of_gates, of_problems = flags[len(flags) - len(errors) :], flags[: len(flags) - len(errors)]
        if any(of_gates):
            return next(error for error, flag in zip(errors, of_gates, strict=True) if flag)
        if any(of_problems):
            return next(problem.value for problem, flag in zip(Problem, of_problems, strict=True) if flag)
        if outcome.counted != 0 or self._may_be_empty:
            return None
        return _NO_SAMPLE_HERE if self._of_worker else _NO_SAMPLE

    def __reduce__(self) -> tuple[Any, ...]:
        return StepNumbers.known, (self.read(),)


def loss_and_count(total: float, count: float, divisors: float) -> tuple[float, float]:
    """Return (loss total, count) of an evaluation, and refuse a mean over nothing. `divisors`: 0 of losses
    that are sums, and not divided by their count."""
    if count == 0:
        raise UserError(_NO_SAMPLE)
    return total if divisors else total * count, count

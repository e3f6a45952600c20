"""The passes of a step, run as they are, or replayed as one recording.

    steps with batches of one form     passes
    the first 4                        run as they are, and are measured
    the next                           run as they are: does the model wait, draw, or change Python objects?
    if the host is slower (auto)       are recorded
    2 steps                            run both ways: gradients and losses must agree, a replay be faster
    all others                         are replayed; after 4, 8, 16 … 256, 512, 768 … they run both ways again

A replay runs no Python: what code has read is compared before each (constants.py), and a change begins the
table again. Where gradients differ after steps were replayed, the step raises.
"""

import warnings
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.engine.step.feed import Feed
from echelon.engine.step.graphs.constants import Constants, TooManyOwnersError
from echelon.engine.step.graphs.cuda_recorder import NumbersOf, Recorded, Recorder, Recording
from echelon.engine.step.graphs.obstacles import (
    WARM_STEPS,
    DrawWatch,
    hook_obstacle,
    is_seen,
    sees_gradients,
)
from echelon.engine.step.graphs.static_feed import LiveFeed, StaticFeed
from echelon.engine.step.graphs.step_times import StepTimes
from echelon.engine.step.runtime.flight import Microbatch
from echelon.engine.step.runtime.script import Script
from echelon.errors import UserError
from echelon.nn.forward_state import BufferSnapshot
from echelon.parallel.observer import Observers
from echelon.parallel.stage import LocalStages
from echelon.plan import Plan
from echelon.update.numbers import HostCopy, RankNumbers, Tally

_COMPARISONS = 2  # before the first replay that counts
_LONGEST_GAP = 256  # replays between two comparisons
_MOST_FORMS = 8  # of batches: each has memory of its own
_MOST_CHANGES = 4  # of what code reads, after which passes run as they are
_TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}

Passes = Callable[[Script, Mapping[int, Microbatch]], Tally]


class Surroundings(NamedTuple):
    """What passes run in. `aside`: what the interpreter keeps between steps stays out of a recording;
    `draws`: what the model draws that no replay could; `loss`: what is computed of outputs; `numbers_of`:
    what the update finds out of a tally and gradients."""

    plan: Plan
    device: torch.device
    local: LocalStages
    feed: Feed
    observers: Observers
    aside: Callable[[], AbstractContextManager[None]]
    start_spans: Callable[[], None]
    draws: Callable[[], str | None]
    loss: Callable[[], Any]
    numbers_of: NumbersOf
    warns: bool


@dataclass
class _Form:
    """All steps with batches of one form."""

    times: StepTimes = field(default_factory=StepTimes)
    is_probed: bool = False
    is_declined: bool = False  # the device is the slower one
    static: StaticFeed | None = None
    recording: Recording | None = None
    pending: HostCopy | None = None  # of the last comparison
    num_agreed: int = 0
    num_replays: int = 0

    @property
    def is_due(self) -> bool:
        """Return whether the next replay is compared with passes as they are."""
        number = self.num_replays
        return number % _LONGEST_GAP == 0 or (number > 2 and number & (number - 1) == 0)


@final
class GraphedPasses:
    """Runs the passes of each step of one rank."""

    def __init__(self, run: Passes, surroundings: Surroundings, recorder: Recorder) -> None:
        self._run_as_is, self._around, self._recorder = run, surroundings, recorder
        self._loss = surroundings.loss()  # the engine's own
        self._always = surroundings.plan.graphs == "true"
        self._modules = [each for root in surroundings.local.modules for each in root.modules()]
        self._parameters = list(
            dict.fromkeys(p for each in self._modules for p in each._parameters.values() if p is not None)
        )
        self._buffers = BufferSnapshot(surroundings.local.modules, largest=2**40)
        self._forms: dict[Hashable, _Form] = {}
        self._constants: Constants | None = None
        self._num_changes = 0
        self._measured: _Form | None = None  # whose passes were measured in the last step
        self._step = 0  # the number that passes draw by
        self.enters_other_nodes = False  # into graphs of autograd, in the last step, than passes as they are
        self.numbers: RankNumbers | None = None  # of the last step, if it was replayed with them
        self.reason: str | None = None  # why nothing is recorded any more

    def describe(self) -> str:
        """Return one line for `print(engine)`."""
        if self.reason is not None:
            return f"graphs: passes run as they are, since {self.reason}"
        recorded = sum(form.recording is not None for form in self._forms.values())
        if recorded:
            return (
                f"graphs: passes are replayed ({recorded} {'form' if recorded == 1 else 'forms'} of batches)"
            )
        if any(form.is_declined for form in self._forms.values()):
            return "graphs: passes run as they are, since the device is slower than the host"
        return "graphs: no passes are recorded yet"

    def close(self) -> None:
        """Let go of all recordings."""
        self._forms.clear()
        self.reason = "the engine is closed"

    def run(self, script: Script, feed: Mapping[int, Microbatch], step: int) -> Tally:
        """Take microbatches forward and back; returns the tally of their losses. `step`: the number that they
        draw by."""
        self.enters_other_nodes, self._step = False, step
        self.numbers = self._measured = None
        if self.reason is not None or self._is_special():
            return self._run_as_is(script, feed)
        live = LiveFeed(feed)
        if live.foreign is not None:
            self._give_up(f"a batch holds a {live.foreign}")
        self._compare_constants()
        form = self._form_of(script, live)
        if form is None:
            return self._run_as_is(script, feed)
        if form.recording is None:
            return self._before_recording(form, script, feed, live)
        left_to_torch = self._around.draws()  # since an evaluation or another form, which drew otherwise
        if left_to_torch is not None:
            self._give_up(left_to_torch)
            return self._run_as_is(script, feed)
        return self._with_recording(form, script, feed, live)

    def start_step(self) -> None:
        """A step begins that is one batch and its update."""
        self._begin = self._recorder.now()

    def finish_step(self) -> None:
        """It is over, on the host."""
        if self._measured is not None:
            self._measured.times.steps.append(self._recorder.now() - self._begin)

    def _is_special(self) -> bool:
        """Return whether these passes are watched, add to gradients, or compute another loss."""
        if is_seen(self._around.observers) or self._around.loss() is not self._loss:
            return True
        return any(parameter.grad is not None for parameter in self._parameters)

    def _compare_constants(self) -> None:
        changed = None if self._constants is None else self._constants.changed()
        if changed is None:
            return
        self._constants, self._num_changes = None, self._num_changes + 1
        self._forms.clear()
        if self._num_changes > _MOST_CHANGES:
            self._give_up(f"{changed} changes between steps")

    def _form_of(self, script: Script, live: LiveFeed) -> _Form | None:
        if self.reason is not None:
            return None
        autocast = torch.is_autocast_enabled(self._around.device.type)
        key = (live.key(), script.sums, autocast, torch.is_grad_enabled())
        if key not in self._forms and len(self._forms) == _MOST_FORMS:
            self._give_up(f"batches have more than {_MOST_FORMS} forms")
            return None
        return self._forms.setdefault(key, _Form())

    def _give_up(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._forms.clear()
        self._constants = None
        if self._always and self._around.warns:
            warnings.warn(f"graphs=true: passes run as they are, since {self.reason}", stacklevel=2)

    # Before there is a recording.

    def _before_recording(
        self, form: _Form, script: Script, feed: Mapping[int, Microbatch], live: LiveFeed
    ) -> Tally:
        if form.is_declined:
            return self._run_as_is(script, feed)
        if len(form.times.as_is) < WARM_STEPS:
            tally, timing = self._recorder.timed(lambda: self._run_as_is(script, feed))
            form.times.as_is.append(timing)
            self._measured = form
            return tally
        if not form.is_probed:
            return self._probe(form, script, feed, live)
        is_wanted = True if self._always else form.times.is_host_bound()
        form.is_declined = is_wanted is False
        if not is_wanted or not self._record(form, script, feed, live):
            return self._run_as_is(script, feed)
        return self._compare(form, script, feed, live)

    def _probe(self, form: _Form, script: Script, feed: Mapping[int, Microbatch], live: LiveFeed) -> Tally:
        """Run passes as they would be recorded, and see what no replay would do."""
        form.is_probed = True
        known = self._around.draws()
        if known is not None:
            self._give_up(known)
            return self._run_as_is(script, feed)
        static = self._static(live, feed, is_watched=True)
        try:
            constants = self._constants or Constants(self._modules, [self._loss])
        except TooManyOwnersError:
            self._give_up("the model holds too many Python objects to compare in each step")
            return self._run_as_is(script, feed)
        draws = DrawWatch(self._around.device, self._modules)
        tally, waits = self._recorder.waits(lambda: self._run_as_is(script, static.microbatches))
        changed = constants.changed()
        sparse = any(p.grad is not None and p.grad.layout != torch.strided for p in self._parameters)
        reasons = (
            "the model or loss waits for the device (a number is read, or a shape depends on values)" * waits,
            f"the forward changes {changed}" if changed else "",
            self._around.draws() or draws.obstacle(),
            hook_obstacle(self._modules),
            "gradients are sparse" * sparse,
        )
        self._constants = constants
        found = next(filter(None, reasons), None)
        if found is not None:
            self._give_up(found)
        return tally

    def _record(self, form: _Form, script: Script, feed: Mapping[int, Microbatch], live: LiveFeed) -> bool:
        if not self._recorder.has_room():
            self._give_up("the device has no memory for a recording beside them")
            return False
        static, self.enters_other_nodes = self._static(live, feed), True
        try:
            with self._around.aside():
                passes = partial(self._run_as_is, script, static.microbatches)
                form.recording = self._recorder.record(passes, self._parameters, self._around.numbers_of)
        except Exception as error:
            self._give_up(f"they cannot be recorded: {str(error).partition(chr(10))[0]}")
        form.static = static
        self._start_again()
        return form.recording is not None

    def _static(
        self, live: LiveFeed, feed: Mapping[int, Microbatch], *, is_watched: bool = False
    ) -> StaticFeed:
        maker, device = self._around.feed, self._around.device
        return StaticFeed(live, feed, maker, self._step, device, is_watched=is_watched)

    def _start_again(self) -> None:
        """Passes begin as if none had run in this step."""
        for parameter in self._parameters:
            parameter.grad = None
        for stage in self._around.local.stages.values():
            stage.start_step()

    # With one.

    def _with_recording(
        self, form: _Form, script: Script, feed: Mapping[int, Microbatch], live: LiveFeed
    ) -> Tally:
        is_trusted = form.num_agreed >= _COMPARISONS
        if form.pending is not None and form.pending.is_ready:
            self._read_comparison(form, is_trusted=is_trusted)
            is_trusted = form.num_agreed >= _COMPARISONS
            if is_trusted and form.num_replays == 0 and not self._always and not form.times.is_faster():
                form.is_declined, form.recording, form.static = True, None, None
        if form.recording is None or (form.pending is not None and not is_trusted):
            return self._run_as_is(script, feed)
        form.num_replays += is_trusted
        if not is_trusted or (form.is_due and form.pending is None):
            return self._compare(form, script, feed, live)
        self._replay(form, live)
        for parameter, gradient in zip(self._parameters, form.recording.outputs.gradients, strict=True):
            parameter.grad = gradient
        self.enters_other_nodes = True
        if not sees_gradients(self._around.observers):
            self.numbers = form.recording.outputs.numbers
        self._around.start_spans()
        return form.recording.outputs.tally

    def _replay(self, form: _Form, live: LiveFeed) -> None:
        assert form.recording is not None
        assert form.static is not None
        form.static.load(live, self._step)
        form.recording.replay()

    def _compare(self, form: _Form, script: Script, feed: Mapping[int, Microbatch], live: LiveFeed) -> Tally:
        """Run passes both ways; the step gets what they make as they are."""
        assert form.recording is not None
        self._buffers.take()
        _, timing = self._recorder.timed(lambda: self._replay(form, live))
        form.times.replays.append(timing)
        self._buffers.restore(refused=True)
        self._start_again()
        tally = self._run_as_is(script, feed)
        outputs = Recorded(tally, [parameter.grad for parameter in self._parameters])
        form.pending = HostCopy(distance(form.recording.outputs, outputs))
        return tally

    def _read_comparison(self, form: _Form, *, is_trusted: bool) -> None:
        assert form.pending is not None
        error, size, of_loss = form.pending.wait()
        form.pending = None
        most = _TOLERANCES[self._around.plan.precision]
        if error <= most * size and of_loss <= most:
            form.num_agreed += 1
            return
        if error != error or size != size or size == float("inf"):  # an overflow tells nothing
            return
        found = f"their gradients differ by {error / size if size else error:.2g} of their norm"
        if of_loss > most:
            found = f"their losses differ by {of_loss:.2g} of the loss"
        if is_trusted:
            raise UserError(
                f"plan '{self._around.plan}': passes that were recorded as a CUDA graph no longer do what "
                f"model and loss do: {found}. Their code reads something else now, which replays do not see "
                "(a global of another file, the clock, a file); go back to earlier weights, with graphs=false"
            )
        self._give_up(f"a replay does not do what the model does: {found}")


def distance(recorded: Recorded, others: Recorded) -> Tensor:
    """Return the norm of the difference of gradients, their norm, and the relative difference of losses: on
    the device, in float64."""
    device = recorded.tally.row.device
    error, size = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    for one, other in zip(recorded.gradients, others.gradients, strict=True):
        if one is None and other is None:
            continue
        if one is None or other is None or one.dtype != other.dtype:
            error = error + torch.inf
            continue
        error = error + _square(one - other)
        size = size + _square(other)
    sums = others.tally.row
    of_loss = (recorded.tally.row - sums).abs().max() / sums.abs().max().clamp_min(1e-30)
    return torch.stack([error.sqrt(), size.sqrt(), of_loss.double()])


def _square(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm.double().square()

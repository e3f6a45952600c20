"""Balance: what the gates of a step have seen, over all microbatches, ranks and stages, and what follows.

An auxiliary loss is a function of sums over the global batch (`nn/experts/recording.py`). Its gradient must
be known when the first backward pass arrives at a gate:

    all forwards of a rank come first (gpipe, microbatches=1)   F F ── exchange ── B B … update ── after_step
    forwards and backwards take turns                           f f ── exchange ── F B F B … update ── …
    no gate has a loss                                          F B F B … exchange ── update ── after_step

f is a forward pass that only records: the statistics pass, which costs one forward pass per step.

One all-reduce over all ranks brings the statistics of every gate, and what all losses counted, to everyone.
Losses are divided by a normaliser n before the backward pass, and an update multiplies gradients by n / count
(update/numbers.py). So the gradient of an auxiliary loss is multiplied by count / n, with the count that the
forwards have found: it comes out as that of the loss itself, whatever was expected of the count, and with any
loss scale, which is a part of n.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.collectives.mesh import Mesh
from echelon.engine.step.gate_passes import TOLERANCES, GatePasses, NoPasses
from echelon.errors import UserError, raise_errors
from echelon.nn.experts import Gate, Recorder, recording
from echelon.nn.forward_state import BufferSnapshot
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.observer import ForwardPass, Observers, StepObserver
from echelon.parallel.stage import LocalStages
from echelon.plan import Plan
from echelon.update.numbers import GateNumbers

_LATE = (
    "{name}: its auxiliary loss was switched on after parallelize(), which decides by it when ranks exchange "
    "the statistics of gates; give it a weight above 0 before, however small, or call parallelize() again"
)


class ExpertLoad(NamedTuple):
    """The load of the experts of a gate in a step, over the global batch.

    `tokens`: slots routed to each expert, of which `dropped` were over its capacity. `entropy` of the gate's
    distribution, in nats, mean over tokens: ln(experts) where it does not choose, 0 where it always chooses
    the same.
    """

    tokens: tuple[float, ...]
    dropped: tuple[float, ...]
    entropy: float


class _Place(NamedTuple):
    """A gate, and where its statistics lie among those of all gates."""

    name: str
    gate: Gate
    begin: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.gate.rows), self.gate.num_experts

    @property
    def end(self) -> int:
        rows, experts = self.shape
        return self.begin + rows * experts

    def of(self, sums: Tensor) -> Tensor:
        return sums[self.begin : self.end].view(self.shape)


@final
class GateList:
    """All gates of a model, the same list on every rank. Made before the model is split."""

    def __init__(self, model: nn.Module) -> None:
        self.places: list[_Place] = []
        self.size = 0
        for name, module in model.named_modules():
            if isinstance(module, Gate):
                self.places.append(_Place(name, module, self.size))
                self.size = self.places[-1].end

    @classmethod
    def of(cls, model: nn.Module, plan: Plan) -> "GateList":
        gates = cls(model)
        gates.check(plan)
        return gates

    def check(self, plan: Plan) -> None:
        """Refuse gates that need sums over a global batch, where updates have none."""
        if plan.sync != "async" and plan.flushes:
            return
        choice = "sync=async" if plan.sync == "async" else f"schedule={plan.schedule}"
        whose = "each worker's own" if plan.sync == "async" else "each microbatch's own, at other weights"
        raise_errors(
            f"plan '{plan}'",
            [
                f"{name} ({type(gate).__name__}): {need} the statistics of the global batch, and updates of "
                f"{choice} are {whose}; use sync=all-reduce and a schedule that flushes (1f1b), or a gate "
                "without losses"
                for name, gate, _ in self.places
                if (need := _need(gate))
            ],
        )


def _need(gate: Gate) -> str:
    if gate.has_loss:
        return "its auxiliary loss is a function of"
    return "it balances itself by" if gate.balances_itself else ""


@final
class Balance(StepObserver):
    """Adds up the statistics of gates, one step after the other."""

    def __init__(self, gates: GateList, mesh: Mesh, local: LocalStages, layers: LayerSharding) -> None:
        self._mesh, self._group, self._places = mesh, mesh.group("all"), gates.places
        in_stages = {module for stage in local.modules for module in stage.modules()}
        self._here = {place.gate: place for place in gates.places if place.gate in in_stages}
        self._with_loss = [place for place in self._here.values() if place.gate.has_loss]
        self._losing = {place.gate for place in gates.places if place.gate.has_loss}
        self._balanced = [gate for gate in self._here if gate.balances_itself]
        self._buffers = BufferSnapshot(self._balanced)
        # Ranks along `tensor` see the same tokens, unless they share the sequence: then one of them counts.
        self._counted = {gate for gate in self._here if layers.counts_loss or layers.sees_part(gate)}
        self._owners = self._find_owners()
        self._shares = self._find_shares()
        has_loss = any(place.gate.has_loss for place in gates.places)
        self.has_loss = has_loss  # whether the sums must be known before the first backward pass
        self.needs_pass = has_loss and not local.program.forwards_first
        late = mesh.plan.update != "step" and not has_loss
        self._errors = [_error(place.name, late=late) for place in gates.places]
        self._passes: GatePasses | NoPasses = GatePasses()
        self.before_step()

    def _find_owners(self) -> Tensor:
        """For each number of the statistics, which gate it is of."""
        sizes = torch.tensor([place.end - place.begin for place in self._places])
        return torch.arange(len(sizes)).repeat_interleave(sizes).to(self._mesh.device)

    def _find_shares(self) -> list[float]:
        """The part of each auxiliary loss that is this rank's to count: as many ranks compute the same."""
        held = [float(place.gate in self._here) for place in self._places]
        holders = torch.tensor(held, dtype=torch.float64, device=self._mesh.device)
        with self._group.ledger.about("checks"):
            self._group.all_reduce(holders)
        return [own / max(count, 1.0) for own, count in zip(held, holders.tolist(), strict=True)]

    # One step.

    def before_step(self) -> None:
        self._check_losses()
        size = self._places[-1].end
        # Two more numbers: what all losses counted, and the same times what they were divided by.
        self._row = torch.zeros(size + 2, dtype=torch.float64, device=self._mesh.device)
        self._is_exchanged = False
        self._earlier: Tensor | None = None  # sums of batches of the same update
        self._broken: Tensor | None = None
        self._losses: dict[Gate, Tensor] = {}
        self._gradients: dict[Gate, Tensor] = {}
        self._passes.start_step()
        for gate in self._here:  # of passes that were not recorded
            gate.pending.clear()
            gate.seen, gate.ran_in_backward = None, False

    def _check_losses(self) -> None:
        late = [place for place in self._places if place.gate.has_loss and place.gate not in self._losing]
        raise_errors(f"plan '{self._mesh.plan}'", [_LATE.format(name=place.name) for place in late])

    def next_batch(self) -> None:
        """Another global batch of the same update follows, whose auxiliary losses are its own."""
        if self._is_exchanged:  # else no loss asks for the sums of each batch
            self._earlier = self._all_sums
            self._row, self._is_exchanged = torch.zeros_like(self._row), False

    @property
    def _sums(self) -> Tensor:
        return self._row[2:]

    @property
    def _all_sums(self) -> Tensor:
        """Those of all batches of the update."""
        return self._sums if self._earlier is None else self._earlier + self._sums

    def around_pass(self, forward: ForwardPass) -> AbstractContextManager[None] | None:
        """In training, gates tell what they have seen."""
        return recording(_MicrobatchRecorder(self, counts=forward.weight > 0)) if forward.trains else None

    def before_backwards(self, tally: Tensor) -> None:
        if self.has_loss:
            self.exchange(tally)

    def add(self, gate: Gate, statistics: Tensor) -> None:
        """A microbatch has passed the gate; after the exchange it has done so in the statistics pass."""
        if not self._is_exchanged:
            self._passes.recorded(gate, statistics)
            if gate in self._counted:
                self._here[gate].of(self._sums).add_(statistics)

    def exchange(self, tally: Tensor) -> None:
        """All forwards of this rank are done: sum over all ranks, once in a step. `tally`: of its losses."""
        if self._is_exchanged:
            return
        self._is_exchanged = True
        self._row[:2] = tally[1:3] if tally.dim() == 1 else tally[:, 1:3].sum(0)
        with self._group.ledger.about("gate statistics"):
            self._group.all_reduce(self._row)
        not_finite = (~self._sums.isfinite()).double()
        if self._broken is None:
            self._broken = not_finite.new_zeros(len(self._places))
        self._broken.index_add_(0, self._owners, not_finite)
        self._differentiate()

    def _differentiate(self) -> None:
        """Auxiliary losses, and their gradients as a backward pass needs them."""
        count, scaled = self._row[:2]
        factor = torch.where(scaled == 0, 0.0, count * count / scaled)
        for place in self._with_loss:
            with torch.enable_grad():
                statistics = place.of(self._sums).clone().requires_grad_()
                loss = place.gate.auxiliary_loss(statistics)
            gradient = self._passes.differentiate(place.gate, loss, statistics)
            is_used = statistics.detach()[0].sum() != 0
            loss, earlier = torch.where(is_used, loss.detach(), 0.0), self._losses.get(place.gate)
            self._losses[place.gate] = loss if earlier is None else earlier + loss
            self._gradients[place.gate] = torch.where(is_used, gradient * factor, 0.0)

    def see(self, gate: Gate) -> None:
        """A microbatch has passed the gate, whether it counts or not."""
        self._passes.see(gate)

    def attach(self, gate: Gate) -> None:
        self._passes.attached.add(gate)

    def gradient(self, gate: Gate, statistics: Tensor | None) -> Tensor:
        if statistics is not None:
            self._passes.asked(gate, statistics)
        return self._gradients[gate]

    def check_first_step(self) -> None:
        """After the passes of the first step: refuse gates whose loss has other gradients than a plain loop
        finds."""
        plan = self._mesh.plan
        raise_errors(
            f"plan '{plan}'", list(self._passes.errors(self._here.values(), TOLERANCES[plan.precision]))
        )
        self._passes = NoPasses()

    def is_broken(self) -> Tensor:
        """Return on the device whether statistics of a gate are known not to be finite."""
        if self._broken is None:
            return torch.zeros((), dtype=torch.bool, device=self._mesh.device)
        return self._broken.any()

    def numbers(self) -> GateNumbers:
        """After the exchange: what gates add to the numbers of the step."""
        assert self._broken is not None
        auxiliary = self._row.new_zeros(())
        for share, place in zip(self._shares, self._places, strict=True):
            if place.gate in self._losses:
                auxiliary = auxiliary + self._losses[place.gate] * share
        return GateNumbers(auxiliary, self._broken, self._errors)

    def after_update(self, skipped: bool | Tensor) -> None:
        """Gates balance themselves; after an update that was skipped they stay as they are."""
        if not self._balanced or skipped is True:
            return
        self._buffers.take()
        for gate in self._balanced:
            if gate.training:
                gate.after_step(self._here[gate].of(self._all_sums))
        self._buffers.restore(skipped)

    def load(self) -> "ExpertLoads":
        """Return the load of the last step, by the name of the gate."""
        return ExpertLoads(
            self._places, self._all_sums if self._is_exchanged else torch.zeros_like(self._sums)
        )


@final
class ExpertLoads(Mapping[str, ExpertLoad]):
    """The load of each gate. Waits for the device when it is read."""

    def __init__(self, places: Sequence[_Place], sums: Tensor) -> None:
        self._places, self._sums = places, sums

    @cached_property
    def _loads(self) -> dict[str, ExpertLoad]:
        sums = self._sums.cpu()
        return {place.name: load_of(place.gate, place.of(sums)) for place in self._places}

    def __getitem__(self, gate: str) -> ExpertLoad:
        return self._loads[gate]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loads)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return repr(self._loads)

    def __reduce__(self) -> tuple[Any, ...]:  # the numbers, and not the gates
        return dict, (self._loads,)


@final
class _MicrobatchRecorder(Recorder):
    def __init__(self, balance: Balance, *, counts: bool) -> None:
        self._balance, self._counts = balance, counts

    def add(self, gate: Gate, statistics: Tensor) -> None:
        self._balance.see(gate)
        if self._counts:
            self._balance.add(gate, statistics)

    def attach(self, gate: Gate) -> None:
        if self._counts:
            self._balance.attach(gate)

    def gradient(self, gate: Gate, statistics: Tensor | None) -> Tensor:
        gradient = self._balance.gradient(gate, statistics if self._counts else None)
        return gradient if self._counts else torch.zeros_like(gradient)


@final
class _Discard(Recorder):
    """For updates without a global batch: gates that need its statistics were refused."""

    def add(self, gate: Gate, statistics: Tensor) -> None:
        pass

    def attach(self, gate: Gate) -> None:
        pass

    def gradient(self, gate: Gate, statistics: Tensor | None) -> Tensor:  # noqa: ARG002
        raise UserError(_LATE.format(name=type(gate).__name__))


@final
class DiscardStatistics(StepObserver):
    """Discards the statistics of gates, where updates have no global batch to add them up over."""

    def around_pass(self, forward: ForwardPass) -> AbstractContextManager[None] | None:
        return recording(_Discard()) if forward.trains else None


def make_balance(
    gates: GateList, mesh: Mesh, local: LocalStages, layers: LayerSharding, observers: Observers
) -> Balance | None:
    """None where there is no gate, or no step of which all ranks could add up anything."""
    if not gates.places or mesh.plan.sync == "async" or not mesh.plan.flushes:
        observers.add(DiscardStatistics())  # a gate that the list has not found may still turn up
        return None
    balance = Balance(gates, mesh, local, layers)
    observers.add(balance)
    return balance


def load_of(gate: Gate, statistics: Tensor) -> ExpertLoad:
    rows: Mapping[str, Sequence[float]] = dict(zip(gate.rows, statistics.tolist(), strict=True))
    tokens = float(gate.num_tokens(statistics))
    entropy = sum(rows["entropy"]) / tokens if tokens else 0.0
    return ExpertLoad(tuple(rows["tokens"]), tuple(rows["dropped"]), entropy)


def _error(name: str, *, late: bool) -> str:
    after = (
        "units were updated in the backward pass before that was known: go back to the weights before this "
        "step, and use update=step"
        if late
        else "this step changed no weight"
    )
    return (
        f"{name}: the statistics of this gate are not finite: its scores of some token are NaN or infinite; "
        f"look at the gate's weights and at what the layers before it return (a lower learning rate, or "
        f"clip, keeps them finite); {after}"
    )

"""The samples of the global batch that a microbatch holds, and the scopes of draws, keyed by them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from echelon.collectives import Group
from echelon.collectives.mesh import Mesh
from echelon.nn.autograd.generators import torch_readers
from echelon.nn.batch import part_bounds
from echelon.nn.draws.sample_draws import EVALUATION, SampleDraws
from echelon.nn.dropout.mask import noises
from echelon.nn.dropout.modules import draw_masks_again, key_dropout, keyed_modules
from echelon.nn.dropout.training_position import Interception, scope
from echelon.nn.hashing import hash_of
from echelon.nn.wrapping import Wrapping
from echelon.update.numbers import HostCopy

_CALL_BITS = 40  # of a key: above the number of any step
Counts = Callable[[int], Sequence[int] | Tensor]  # from the samples of this replica to those of each


def samples_before(counts: Sequence[int] | Tensor, replica: int) -> int | Tensor:
    """Count the samples of the global batch before those of `replica`, where the counts are."""
    earlier = counts[:replica]
    return earlier.sum() if isinstance(earlier, Tensor) else sum(earlier)


def first_sample(before: int | Tensor, samples: int, microbatch: int, microbatches: int) -> int | Tensor:
    """The place in the global batch of a microbatch's first sample, of a replica with `samples` samples.

    first_sample(7, samples=6, microbatch=1, microbatches=3) == 7 + 2
    """
    return before + part_bounds(samples, microbatch, microbatches)[0]


def gather_counts(samples: int, group: Group, device: torch.device, replicas: int) -> Sequence[int] | Tensor:
    """Return how many samples each replica holds: one integer of each goes to all, and stays on the device.

    A stage of a pipeline may have several ranks of each replica in its group, one after the other.
    """
    if replicas == 1:
        return [samples]
    counts = torch.empty(group.size, dtype=torch.int64, device=device)
    with group.ledger.about("samples"):
        group.all_gather(counts, torch.full((1,), samples, device=device))
    return counts[:: group.size // replicas]


def assume_equal_counts(samples: int, group: Group) -> list[int]:
    """For workers that do not wait for each other: as if every one held as many as this one.

    Right where the batch divides evenly. Elsewhere samples of two workers may share a number and its masks.
    """
    return [samples] * group.size


def number_of(step: int, call: int) -> int:
    """Return the number by which a batch of a step draws, after so many others of the same step."""
    return step + (call << _CALL_BITS)


@final
class Scopes:
    """The place in the training of each forward pass of this replica, for all that its model draws.

    Whether a forward draws by functions of torch shows in the first steps, in which all calls are watched.
    Then replicas agree on it: where nothing is drawn, they do not talk, and calls are not watched.
    """

    def __init__(
        self,
        model: nn.Module,
        seed: int | None,
        counts: Counts,
        replica: int,
        microbatches: int,
        draws: "DrawAgreement | None" = None,
    ) -> None:
        self._modules = [] if seed is None else keyed_modules(model)
        self._has_noise = seed is not None and bool(noises(model))
        self.seed, self._counts = seed, counts
        self._replica, self._microbatches = replica, microbatches
        self._agreement = draws

    @property
    def foreign_draws(self) -> list[str]:
        """Draws of forwards that belong to no sample, as far as is known: each "numpy.random in encoder"."""
        return [] if self._agreement is None else list(self._agreement.draws.foreign)

    def drawn(self) -> str | None:
        """Return what draws random numbers in a forward that no replay could draw, as far as is known."""
        if self._has_noise:
            return "gates draw noise"
        foreign = self.foreign_draws
        return f"passes draw random numbers ({foreign[0]})" if foreign else None

    @property
    def drops(self) -> bool:
        """Return whether dropout modules drop, in the modes of now."""
        return any(module.training and module.p > 0 for module in self._modules)

    def of_step(
        self, step: int, samples: int, call: int = 0
    ) -> Callable[[int], AbstractContextManager[None]]:
        """Return a function that opens the scope of a microbatch. `call`: how many batches of the same step
        came before; each draws numbers of its own."""
        if self._agreement is not None and call == 0:
            self._agreement.start_step()
        return self._of_passes(number_of(step, call), samples)

    def of_recording(
        self, step: Tensor, samples: int, watched: int | None
    ) -> Callable[[int], AbstractContextManager[None]]:
        """The same for passes that are recorded, which read the number of their step on the device.
        `watched`: that number, where they run without a recording and are watched for draws as others are."""
        open_at = self.at_sample(step, samples)
        if watched is not None:
            return lambda microbatch: self._of_pass(watched, samples, microbatch, open_at)
        return lambda microbatch: open_at(part_bounds(samples, microbatch, self._microbatches)[0])

    def of_evaluation(self, samples: int) -> Callable[[int], AbstractContextManager[None]]:
        """The same in an evaluation, where each one draws the same numbers."""
        if self._agreement is None or not self._agreement.intercepts:
            return no_scope
        return self._of_passes(EVALUATION, samples)

    def _of_passes(self, step: int, samples: int) -> Callable[[int], AbstractContextManager[None]]:
        open_at, agreement = self.at_sample(step, samples), self._agreement
        if agreement is not None and agreement.draws_nothing and open_at is no_scope:
            return agreement.check_pass
        return lambda microbatch: self._of_pass(step, samples, microbatch, open_at)

    def _of_pass(
        self,
        step: int,
        samples: int,
        microbatch: int,
        open_at: Callable[[int], AbstractContextManager[None]],
    ) -> AbstractContextManager[None]:
        place = first_sample(0, samples, microbatch, self._microbatches)
        assert isinstance(place, int)
        if self._agreement is None:
            return open_at(place)
        number = partial(hash_of, self.seed or 0, step, self._replica, place)
        around = self._agreement.around(number)
        return around if open_at is no_scope else _both(around, open_at(place))

    def at_sample(self, step: int | Tensor, samples: int) -> Callable[[int], AbstractContextManager[None]]:
        """Return a function that opens the scope of samples from a place on, counted among the `samples` of
        this replica. It reaches to the last one, unless `CountedSamples` says how many are in the pass."""
        agreement = self._agreement
        is_keyed = self._has_noise or any(module.p > 0 for module in self._modules)
        draws: Interception | None = None
        if agreement is not None and agreement.intercepts:
            draws = agreement.draws.of_recording() if isinstance(step, Tensor) else agreement.draws
        if not is_keyed and draws is None:
            return no_scope
        before: int | Tensor = self._replica * samples  # of a draw before replicas have agreed
        if is_keyed or agreement is None or not agreement.is_late:
            before = samples_before(self._counts(samples), self._replica)
        return lambda place: scope(
            seed=self.seed or 0,
            step=step,
            first_sample=before + place,
            samples=samples - place,
            draws=draws,
        )

    def at_place(self, step: int, place: int, samples: int) -> AbstractContextManager[None]:
        """Around a forward of the plan's stages on so many samples from a place of a batch on, whichever
        replica has those before."""
        agreement = self._agreement
        draws = agreement.draws if agreement is not None and agreement.intercepts else None
        if draws is None and not self._has_noise and not any(module.p > 0 for module in self._modules):
            return nullcontext()
        return scope(seed=self.seed or 0, step=step, first_sample=place, samples=samples, draws=draws)

    def of_plain(
        self, model: nn.Module, step: int, first_sample: int, samples: int
    ) -> AbstractContextManager[None]:
        """Around a forward of a whole model by itself on some samples of the global batch: it draws what the
        plan draws for these. The model, or a copy, has the names of the whole one, and `key_dropout` has
        keyed its dropout."""
        if self.seed is None:
            return nullcontext()
        draws = SampleDraws(model, None if self._agreement is None else self._agreement.device)
        return scope(seed=self.seed, step=step, first_sample=first_sample, samples=samples, draws=draws)


@final
class DrawAgreement:
    """The knowledge that ranks share of the draws in their forwards."""

    def __init__(self, draws: SampleDraws, mesh: Mesh) -> None:
        self.draws, self.device, self._mesh = draws, mesh.device, mesh
        plan = mesh.plan
        # Steps until every stage has run twice: a model that draws otherwise is named at the second pass.
        # PipeDream fills its pipeline first.
        self._num_open = 2 + (0 if plan.flushes else len(plan.replicas))
        self._is_open, self.is_late = True, False
        self._is_agreed = True
        self._flag: HostCopy | None = None
        self._readers = torch_readers(mesh.device)

    @property
    def intercepts(self) -> bool:
        """True if echelon makes the draws of functions of torch."""
        return self._is_open or self._is_agreed or self.is_late

    @property
    def draws_nothing(self) -> bool:
        """True if ranks have agreed that no forward pass draws."""
        return not self.intercepts and not self.draws.foreign

    def start_step(self) -> None:
        """After the first steps, let replicas of the same stage agree."""
        self._num_open -= 1
        if self._num_open == -1:
            self._close()
        elif self._num_open == -3 and self._flag is not None:  # it has long been there
            self._is_agreed = self._flag.wait()[0] > 0

    def _close(self) -> None:
        """Stop watching; until all ranks know what the others found, echelon makes the draws."""
        self._is_open, self.draws.watches = False, False
        group = self._mesh.group("data")
        if self._mesh.plan.sync == "async" or group.size == 1:
            self._is_agreed = self.draws.is_used
            return
        flag = torch.full((1,), float(self.draws.is_used), device=self.device)
        with group.ledger.about("samples"):
            group.all_reduce(flag)
        self._flag = HostCopy(flag)

    def around(self, number: Callable[[], int]) -> AbstractContextManager[None]:
        """A forward pass. Generators of others are seeded by this number, where replicas must differ."""
        if self.intercepts and not (self._is_open or self.draws.foreign):
            return nullcontext()
        if self.intercepts or self.draws.foreign:
            states = self.draws.generators()
            return states.seeded(number()) if self._mesh.plan.data > 1 else nullcontext()
        return _NoDraw(self)

    def check_pass(self, _: int) -> AbstractContextManager[None]:
        """Around a forward pass that is to draw nothing."""
        return _NoDraw(self)

    def states(self) -> list[Tensor]:
        """Return the states of torch's generators."""
        return [read() for read in self._readers]

    def find_draw(self) -> None:
        """A forward has drawn after ranks agreed that none does."""
        if not self.is_late:
            self.is_late = True
            self.draws.say_late()


@final
class _NoDraw:
    """Around a forward pass that draws nothing, as ranks have agreed: a class, for the sake of its time."""

    def __init__(self, agreement: DrawAgreement) -> None:
        self._agreement = agreement

    def __enter__(self) -> None:
        self._states = self._agreement.states()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and not all(map(torch.equal, self._states, self._agreement.states())):
            self._agreement.find_draw()


def no_scope(_: object) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield


def make_scopes(model: nn.Module, mesh: Mesh, seed: int | None, wrapping: Wrapping) -> Scopes:
    """Key the model's dropout and noise, and say where in the training its forward passes are."""
    group, plan = mesh.group("data"), mesh.plan
    counts: Counts = partial(gather_counts, group=group, device=mesh.device, replicas=plan.data)
    if plan.sync == "async":
        counts = partial(assume_equal_counts, group=group)
    draws = None
    if seed is not None:
        key_dropout(model, wrapping)
        parts = plan.data * plan.microbatches * plan.tensor * plan.context
        warns = parts > 1 and mesh.position.data == mesh.position.tensor == mesh.position.context == 0
        whole = plan.context == 1 and not plan.sequence
        made = SampleDraws(model, mesh.device, warns=warns, has_whole_samples=whole)
        draws = DrawAgreement(made, mesh)
    if plan.recompute == "selective":
        draw_masks_again(model)
    return Scopes(model, seed, counts, mesh.position.replica, plan.microbatches, draws)

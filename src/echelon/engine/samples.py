"""Which samples of the global batch a microbatch holds, and dropout's scopes, which are keyed by them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from echelon.collectives import Group
from echelon.dropout import counted_samples, draw_masks_again, key_dropout, keyed_modules, noises, scope
from echelon.engine.batch import part_bounds
from echelon.mesh import Mesh
from echelon.wrapping import Wrapping

Counts = Callable[[int], Sequence[int] | Tensor]  # from the samples of this replica to those of each


def samples_before(counts: Sequence[int] | Tensor, replica: int) -> int | Tensor:
    """How many samples of the global batch precede those of `replica`. It stays where the counts are."""
    earlier = counts[:replica]
    return earlier.sum() if isinstance(earlier, Tensor) else sum(earlier)


def first_sample(before: int | Tensor, samples: int, microbatch: int, microbatches: int) -> int | Tensor:
    """The place in the global batch of a microbatch's first sample, of a replica with `samples` samples.

    first_sample(7, samples=6, microbatch=1, microbatches=3) == 7 + 2
    """
    return before + part_bounds(samples, microbatch, microbatches)[0]


def gather_counts(samples: int, group: Group, device: torch.device, replicas: int) -> Sequence[int] | Tensor:
    """How many samples each replica holds: one integer of each goes to all, and stays on the device.

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


@final
class Scopes:
    """Where in the training each forward pass of this replica is, for the dropout and noise of its model."""

    def __init__(
        self, model: nn.Module, seed: int | None, counts: Counts, replica: int, microbatches: int
    ) -> None:
        self._modules = [] if seed is None else keyed_modules(model)
        self._has_noise = seed is not None and bool(noises(model))
        self.seed, self._counts = seed, counts
        self._replica, self._microbatches = replica, microbatches

    def of_step(self, step: int, samples: int) -> Callable[[int], AbstractContextManager[None]]:
        """What opens the scope of a microbatch. Where nothing is drawn, replicas do not talk."""
        open_at = self.at_sample(step, samples)
        return lambda microbatch: open_at(first_sample(0, samples, microbatch, self._microbatches))

    def at_sample(self, step: int, samples: int) -> Callable[[int | Tensor], AbstractContextManager[None]]:
        """What opens the scope of samples from a place on, counted among the `samples` of this replica."""
        if not self._has_noise and not any(module.p > 0 for module in self._modules):
            return no_scope
        before = samples_before(self._counts(samples), self._replica)
        return lambda place: scope(seed=self.seed or 0, step=step, first_sample=before + place)

    def at_place(self, step: int, place: int) -> AbstractContextManager[None]:
        """The scope of samples from a place of the global batch on, whoever has those before."""
        if not self._has_noise and not any(module.p > 0 for module in self._modules):
            return nullcontext()
        return scope(seed=self.seed or 0, step=step, first_sample=place)


def no_scope(_: object) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def counting(samples: int, scope: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """A scope around a pass of so many samples."""
    with counted_samples(samples), scope():
        yield


def make_scopes(model: nn.Module, mesh: Mesh, seed: int | None, wrapping: Wrapping) -> Scopes:
    """Key the model's dropout and noise, and say where in the training its forward passes are."""
    group = mesh.group("data")
    counts: Counts = partial(gather_counts, group=group, device=mesh.device, replicas=mesh.plan.data)
    if mesh.plan.sync == "async":
        counts = partial(assume_equal_counts, group=group)
    if seed is not None:
        key_dropout(model, wrapping)
    if mesh.plan.recompute == "selective":
        draw_masks_again(model)
    return Scopes(model, seed, counts, mesh.position.replica, mesh.plan.microbatches)

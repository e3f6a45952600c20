"""The result of passes without an update, and outputs of the model: collected from the microbatches of a
batch, and brought to every rank of the replica."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_map_only, tree_unflatten

from echelon.collectives import Group
from echelon.collectives.agreement import gather_values
from echelon.collectives.mesh import Mesh
from echelon.engine.step.metrics import Measure, Measured, Measuring, agree_on_means
from echelon.engine.step.runtime.message import Spec
from echelon.errors import UserError
from echelon.nn.batch import tensors_of
from echelon.parallel.context import put_together
from echelon.parallel.observer import ForwardPass, LossPass, Observers, StepObserver
from echelon.program import Program
from echelon.update.numbers import HostCopy

Collect = Callable[[Any, Any], Any]  # from output and targets to what is handed back


@final
class PassResult:
    """The passes of one batch. `loss` is the mean over the global batch; reading it waits for the device.
    `measured`: the means of what was measured. `outputs`: those of this replica's samples, if asked for."""

    def __init__(self, sums: Tensor, measured: Measured = None, outputs: Any = None) -> None:
        self._sums = HostCopy(sums)
        self.measured, self.outputs = measured, outputs

    @property
    def loss(self) -> float:
        total, count = self._sums.wait()
        return total / count if count else float("nan")

    @property
    def tokens(self) -> int:
        return round(self._sums.wait()[1])

    def __repr__(self) -> str:
        return f"PassResult(loss={self.loss}, tokens={self.tokens}, measured={self.measured})"


@final
class Observed:
    """What is measured and collected in the passes of one batch, and put together over ranks after them."""

    def __init__(
        self, mesh: Mesh, program: Program, measure: Measure | None, collect: Collect | None
    ) -> None:
        self._mesh, self._program = mesh, program
        see = partial(_whole_pass, mesh) if mesh.plan.context > 1 else None
        self._measuring = None if measure is None else Measuring(measure, see)
        self._collecting = None if collect is None else Collecting(collect)

    @property
    def sees_output(self) -> bool:
        """Return whether functions of the user's are called with outputs."""
        return self._measuring is not None or self._collecting is not None

    @contextmanager
    def by(self, observers: Observers) -> Iterator["Observed"]:
        own = [each for each in (self._measuring, self._collecting) if each is not None]
        for each in own:
            observers.add(each)
        try:
            yield self
        finally:
            for each in own:
                observers.remove(each)

    def result(self, tally: Tensor) -> PassResult:
        """`tally`: of the losses of this rank."""
        sums, mesh = tally[:2].clone(), self._mesh
        if mesh.plan.sync != "async":  # whose workers do not wait for each other
            with mesh.ledger.about("metrics"):
                mesh.group("all").all_reduce(sums)
        return PassResult(sums, self.measured(), self.outputs())

    def measured(self) -> Measured:
        """Return the means over the global batch; all ranks must call this. Waits for the device."""
        if self._measuring is None:
            return None
        return agree_on_means(self._measuring.sums, self._mesh.group("all"), self._mesh.device)

    def outputs(self, *, of_all: bool = False) -> Any:
        """Return the outputs of this replica's samples, on all of its ranks; or of all replicas' samples."""
        if self._collecting is None:
            return None
        mesh = self._mesh
        own, samples = self._collecting.join(mesh, self._program, mesh.plan.microbatches)
        if not of_all or mesh.plan.data == 1:
            return own
        group = mesh.group("data")
        return join_rows([_share(own, samples, group, source, mesh.device) for source in range(group.size)])[
            0
        ]


def whole_output(output: Any, targets: Any) -> Any:  # noqa: ARG001
    return output


def no_loss(output: Any, targets: Any) -> Tensor:  # noqa: ARG001
    """The loss of a pass that is made for its outputs alone."""
    return torch.zeros(())


@final
class Collecting(StepObserver):
    """Keeps what `collect` makes of the outputs of microbatches, without their graph."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect
        self._number = 0
        self._outputs: dict[int, Any] = {}
        self._samples: dict[int, int] = {}
        self._length: int | None = None  # of this rank's part of sequences

    def around_pass(self, forward: ForwardPass) -> None:
        self._number = forward.slot[1]

    def after_loss(self, loss: LossPass) -> None:
        if loss.counts:  # else the microbatch only fills up
            self._length = _num_positions(loss.output)
            output = self._collect(loss.output, loss.targets)
            self._outputs[self._number] = tree_map_only(Tensor, torch.detach, output)
            self._samples[self._number] = loss.num_samples

    def join(self, mesh: Mesh, program: Program, number: int) -> tuple[Any, int]:
        """Return the outputs of a replica's `number` microbatches, in order, on all of its ranks, and the
        number of their samples."""
        pipeline, context = mesh.group("pipeline"), mesh.group("context")
        parts = []
        for microbatch in range(number):
            part, samples = self._outputs.get(microbatch), self._samples.get(microbatch, 0)
            if context.size > 1 and samples:
                part = tree_map_only(
                    Tensor, lambda leaf: _whole_sequence(leaf, self._length, context, mesh.device), part
                )
            if pipeline.size > 1:
                holder = program.holder(program.stages - 1, microbatch)
                part, samples = _share(part, samples, pipeline, holder, mesh.device)
            parts.append((part, samples))
        return join_rows(parts)


def _share(part: Any, samples: int, group: Group, source: int, device: torch.device) -> tuple[Any, int]:
    """Bring outputs, and the number of their samples, from one rank to all of a group."""
    is_here = group.rank == source
    spec, tensors = Spec.of(part) if is_here else (None, [])
    texts = gather_values([samples, spec.text] if spec is not None else None, group, device, "outputs")
    samples, text = texts[source]
    spec = Spec(text)
    if not is_here:
        tensors = [torch.empty(leaf.shape, dtype=leaf.dtype, device=device) for leaf in spec.leaves]
    tensors = [tensor.contiguous() for tensor in tensors]
    with group.ledger.about("outputs"):
        for tensor in tensors:
            group.broadcast(tensor, source)
    return spec.rebuild(tensors), samples


def _num_positions(output: Any) -> int | None:
    return next((tensor.shape[1] for tensor in tensors_of(output) if tensor.dim() > 1), None)


def _whole_pass(mesh: Mesh, loss: LossPass) -> tuple[Any, Any] | None:
    """The output and targets of whole sequences, on the first of the ranks that share them."""
    group, length = mesh.group("context"), _num_positions(loss.output)
    output, targets = tree_map_only(
        Tensor,
        lambda leaf: _whole_sequence(leaf.detach(), length, group, mesh.device),
        (loss.output, loss.targets),
    )
    return None if group.rank else (output, targets)


def _whole_sequence(leaf: Tensor, length: int | None, group: Group, device: torch.device) -> Tensor:
    """Put together what the ranks along `context` have of sequences."""
    if leaf.dim() < 2 or leaf.shape[1] != length:
        raise UserError(
            f"outputs with context={group.size}: {list(leaf.shape)} has no dim of {length} positions behind "
            "that of samples, and each rank has computed it of its own positions; collect values of "
            "positions, and sum them afterwards"
        )
    lengths = {tuple(shape) for shape in gather_values(list(leaf.shape), group, device, "outputs")}
    if len(lengths) > 1:
        raise UserError(
            f"outputs with context={group.size}: the sequences are padded, so that ranks have different "
            f"lengths {sorted(lengths)}; give sequences whose length divides by {2 * group.size}"
        )
    parts = torch.empty(group.size, *leaf.shape, dtype=leaf.dtype, device=leaf.device)
    with group.ledger.about("outputs"):
        group.all_gather(parts, leaf.contiguous())
    return put_together(list(parts))


def join_rows(groups: Iterable[tuple[Any, int]]) -> tuple[Any, int]:
    """Put the outputs of several groups of samples together, row by row; each has the number of its samples,
    and so has the result."""
    groups = [(part, samples) for part, samples in groups if samples]
    if len(groups) <= 1:
        return groups[0] if groups else (None, 0)
    sizes = [samples for _, samples in groups]
    flat = [tree_flatten_with_path(part) for part, _ in groups]
    (first, form), joined = flat[0], []
    for place, (path, leaf) in enumerate(first):
        leaves = [leaves[place][1] for leaves, _ in flat]
        if not isinstance(leaf, Tensor):
            joined.append(leaf)
        elif all(each.dim() and len(each) == size for each, size in zip(leaves, sizes, strict=True)):
            joined.append(torch.cat(leaves))
        else:
            name = "".join(map(str, path)) or "the output"
            raise UserError(
                f"outputs: {name} of {sizes[0]} samples is {list(leaf.shape)}: its first dim must count the "
                "samples, since those of several microbatches or replicas are put together; choose what to "
                "hand back, like collect=lambda output, targets: output.logits"
            )
    return tree_unflatten(joined, form), sum(sizes)

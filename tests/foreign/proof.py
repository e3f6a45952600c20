"""A model that nobody here wrote, trained by the engine and by a plain torch loop, in float64.

The plain loop knows nothing of echelon: the whole batch, `loss.backward()`, `optimizer.step()`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.engine import parallelize
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.verify.case import patch_float64
from tests.cases import adamw

STEPS = 3
TOLERANCE = 1e-9
ROUNDED = 1e-6  # a loss that transformers has computed in float32


class Foreign(NamedTuple):
    """A training: `batch` makes the global batch of a step; without a loss the model returns its own."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    table: Mapping[str, str] | None = None  # tensor_table
    # What the user does by hand after each step but the last, in both loops: (model, optimizer, number).
    between: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None
    options: Mapping[str, Any] | None = None  # further ones of parallelize
    steps: int = STEPS


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def make_model(case: Foreign) -> nn.Module:
    """The same in every process; no weight is left at zero or one, where it might hide a mistake. What
    transformers casts to float32 stays in float64: its rounding would hide everything below 1e-6."""
    torch.manual_seed(0)
    model = case.model().double()
    patch_float64(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                inputs = parameter[0].numel() if parameter.ndim > 1 else 1
                parameter.add_(0.1 / (1 + inputs) ** 0.5 * noise)
    return model


def plain_training(case: Foreign) -> Trained:
    """On one device, by hand."""
    model = make_model(case).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = case.optimizer(trained)
    losses, norms = [], []
    for step in range(case.steps):
        loss = plain_loss(case, model, case.batch(step))
        optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))
        optimizer.step()
        losses.append(loss.item())
        _touch(case, model, optimizer, step)
    return Trained(losses, norms, {name: value.detach() for name, value in model.state_dict().items()})


def plain_loss(case: Foreign, model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        if case.loss is None:
            return model(**batch).loss
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        result = case.loss(model(**inputs), batch["labels"])
    else:
        *inputs, targets = batch
        assert case.loss is not None
        result = case.loss(model(*inputs), targets)
    return result[0] / result[1] if isinstance(result, tuple) else result


def engine_training(case: Foreign, plan: str) -> Trained | str:
    """In each rank; the text of the refusal, if there is one."""
    try:
        model = make_model(case)
        engine = parallelize(
            model,
            f"{plan} precision=fp64",
            optimizer=case.optimizer,
            loss=case.loss,
            tensor_table=case.table,
            **(case.options or {}),
        )
        metrics = []
        for step in range(case.steps):
            metrics.append(engine.step(engine.local(case.batch(step))))
            _touch(case, model, engine.optimizer, step)
    except UserError as refusal:
        return str(refusal)
    losses = [each.loss for each in metrics]
    return Trained(losses, [each.grad_norm for each in metrics], engine.full_state_dict())


def _touch(case: Foreign, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if case.between is not None and step < case.steps - 1:
        case.between(model, optimizer, step)


def difference(one: Trained, other: Trained, *, loss_tolerance: float) -> tuple[float, str]:
    """The largest relative difference, and where it is; that of losses in units of their tolerance."""
    worst = (0.0, "nothing")
    for step, (loss, other_loss) in enumerate(zip(one.losses, other.losses, strict=True)):
        distance = abs(loss - other_loss) / abs(loss) * TOLERANCE / loss_tolerance
        worst = max(worst, (distance if distance == distance else float("inf"), f"loss of step {step}"))
    for step, (norm, other_norm) in enumerate(zip(one.norms, other.norms, strict=True)):
        worst = max(worst, (_distance(torch.tensor(norm), torch.tensor(other_norm)), f"norm of step {step}"))
    assert set(one.state) == set(other.state), set(one.state) ^ set(other.state)
    for name, tensor in one.state.items():
        worst = max(worst, (_distance(tensor, other.state[name]), name))
    return worst


def _distance(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    if one.numel() == 0:
        return 0.0
    kind = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.detach().to(kind), other.detach().to(kind)
    distance = float((one - other).abs().max() / max(1e-12, float(one.abs().max())))
    return distance if distance == distance else float("inf")  # NaN is far from everything


def prove(case: Foreign, plan: str, ranks: Ranks) -> str | None:
    """None if every rank's training is equal to the plain one, else why it was refused, on every rank."""
    return judge(case, ranks.run(engine_training, case, plan))


def judge(case: Foreign, results: Sequence[Trained | str]) -> str | None:
    """The same, of what ranks returned."""
    refusals = [result for result in results if isinstance(result, str)]
    assert len(refusals) in (0, len(results)), f"some ranks refuse, others train: {refusals[0]}"
    if refusals:
        return refusals[0]
    reference = plain_training(case)
    for rank, result in enumerate(results):
        tolerance = ROUNDED if case.loss is None else TOLERANCE
        worst, where = difference(reference, result, loss_tolerance=tolerance)
        assert worst <= TOLERANCE, f"rank {rank}: {where} differs by {worst:.1e}"
    return None

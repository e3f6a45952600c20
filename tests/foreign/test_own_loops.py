"""Loops of users' own on models that nobody here wrote: equal to the same loop in plain torch, in float64.

Each update has the gradients of two batches. Replicas have different numbers of tokens that count.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.engine import Engine, parallelize
from echelon.launching import Ranks
from echelon.plan import Plan
from tests.cases import sgd
from tests.engine.test_compiling import backend
from tests.foreign.language import LANGUAGE
from tests.foreign.proof import TOLERANCE, Foreign, Trained, difference, make_model
from tests.foreign.vision import TIMM, VISION, images

Warm = Callable[[int], Ranks]
Loop = Callable[[Foreign, str], Trained]
UPDATES, BATCHES = 2, 2  # batches of each update


def _relu_network() -> nn.Module:
    import tests.foreign.vision_packages  # noqa: F401, I001  (before timm and torchvision)
    import timm

    return timm.create_model("resnet10t", num_classes=5, stem_width=4, channels=(4, 8, 8, 16))


CASES = {
    # AdamW would divide gradients that are rounding by their own size.
    **{name: case._replace(optimizer=sgd) for name, case in TIMM.items() if name != "timm mixer"},
    "timm resnet": Foreign(_relu_network, partial(images, size=32), F.cross_entropy, sgd),
    "vit": VISION["vit"]._replace(optimizer=sgd),
    "mixtral": LANGUAGE["mixtral"]._replace(optimizer=sgd),
}


def parted(batch: Any) -> tuple[Any, Tensor]:
    """What the model is called with, and the targets. Of texts these are the next tokens."""
    if not isinstance(batch, Mapping):
        return batch
    inputs, labels = {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
    return inputs, F.pad(labels[:, 1:], (0, 1), value=-100) if labels.dim() == 2 else labels


def total_and_count(output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum"), (targets != -100).sum()


def call(model: Any, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def plain_loop(case: Foreign) -> Trained:
    model = make_model(case).train()
    optimizer, losses, norms = case.optimizer(model.parameters()), [], []
    for update in range(UPDATES):
        loss = torch.zeros((), dtype=torch.float64)
        for number in range(BATCHES):
            inputs, targets = parted(case.batch(BATCHES * update + number))
            total, count = total_and_count(call(model, inputs), targets)
            loss = loss + total / count
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack([each.norm() for each in gradients]).norm()))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: value.detach() for name, value in model.state_dict().items()})


def start(case: Foreign, plan: str) -> Engine:
    options = {"loss": total_and_count, "smallest_unit": 0}
    return parallelize(make_model(case), f"{plan} precision=fp64", optimizer=case.optimizer, **options)


def called_loop(case: Foreign, plan: str) -> Trained:
    """engine(x), engine.backward(loss), engine.update()."""
    engine, losses, norms = start(case, plan), [], []
    engine.module.train()
    for update in range(UPDATES):
        means = []
        for number in range(BATCHES):
            inputs, targets = engine.local(parted(case.batch(BATCHES * update + number)))
            total, count = total_and_count(call(engine, inputs), targets)
            means.append(engine.average(total / count, count))
            engine.backward(total / count, count=float(count))
        losses.append(sum(means))
        norms.append(engine.update().grad_norm)
    return Trained(losses, norms, engine.full_state_dict())


def parts_loop(case: Foreign, plan: str) -> Trained:
    """engine.forward_backward(batch, loss), engine.update()."""
    engine, losses, norms = start(case, plan), [], []
    for update in range(UPDATES):
        batches = [engine.local(parted(case.batch(BATCHES * update + number))) for number in range(BATCHES)]
        own = [total_and_count, lambda output, targets: total_and_count(output, targets)]
        losses.append(
            sum(engine.forward_backward(each, loss).loss for each, loss in zip(batches, own, strict=True))
        )
        norms.append(engine.update().grad_norm)
    return Trained(losses, norms, engine.full_state_dict())


def run(loop: Loop, case: Foreign, plan: str) -> Trained:
    """What is compiled runs as it was recorded: C++ takes a minute to make."""
    with backend("aot_eager"):
        return loop(case, plan)


@pytest.mark.parametrize(
    ("name", "loop", "plan"),
    [
        ("timm vit", called_loop, "data=2 zero=3"),
        ("timm vit", parts_loop, "data=2 zero=3 compile=true"),
        ("timm convnext", called_loop, "data=2 recompute=full"),
        ("timm resnet", parts_loop, "data=2 compress=gist"),
        ("timm resnet", called_loop, "data=2 zero=3"),
        ("vit", called_loop, "compile=true data=2"),
        ("vit", parts_loop, "data=2 zero=3"),
        ("mixtral", called_loop, "data=2 zero=3"),
        ("mixtral", parts_loop, "context=2"),
        ("mixtral", parts_loop, "pipeline=2 microbatches=2"),
    ],
)
def test_own_loops_are_equal_to_plain_ones(name: str, loop: Loop, plan: str, warm_ranks: Warm) -> None:
    case = CASES[name]
    reference = plain_loop(case)
    for rank, trained in enumerate(warm_ranks(Plan.parse(plan).ranks).run(run, loop, case, plan)):
        worst, where = difference(reference, trained, loss_tolerance=TOLERANCE)
        assert worst <= TOLERANCE, f"rank {rank}: {where} differs by {worst:.1e}"

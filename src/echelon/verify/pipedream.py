"""PipeDream's meaning: its formulas, replayed on one process in plain torch. With d stages, update t is

    pipedream             W(t+1) = W(t) − ν·∇f(W₀(t−d+1), W₁(t−d+2), …, W_{d−1}(t))     on microbatch t
    pipedream-vertical    W(t+1) = W(t) − ν·∇f(W₀(t−d+1), W₁(t−d+1), …, W_{d−1}(t−d+1)) on microbatch t
    pipedream-2bw         W(t+1) = W(t) − ν·∇f(W(t−1))                                  on batch t

where versions before the first are the first, and "−ν·" stands for the optimizer's step.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from echelon.dropout import key_dropout, scope
from echelon.engine.batch import num_samples, part_bounds, take_part, total_and_count
from echelon.pipeline_parallel import split
from echelon.plan import Plan
from echelon.verify.case import Case
from echelon.verify.reference import Trained, evaluate, state_by_name, weights_of
from echelon.wrapping import Wrapping

Part = tuple[Any, int]  # (inputs, targets), and the place of its first sample in the global batch


def train_by_formula(case: Case, plan: Plan, boundaries: list[int]) -> Trained:
    """What the pipeline of `plan` must come to, after all steps of `case` and a drain."""
    model = case.build()
    key_dropout(model, Wrapping())
    stages = split(model, boundaries).stages if boundaries else [model]
    stage_of = {p: number for number, stage in enumerate(stages) for p in stage.parameters()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = case.make_optimizer(parameters)
    versions = [_copy(parameters)]
    version_of = _version_rule(plan)
    batches = case.batches()
    losses = []
    for step, batch in enumerate(batches):
        total = count = 0.0
        for parts in _updates(batch, plan):
            update = len(versions) - 1
            used = [version_of(update, stage_of[p]) for p in parameters]
            _restore(parameters, [versions[version][place] for place, version in enumerate(used)])
            optimizer.zero_grad()
            its_total, its_count = _gradients(model, case, step, parts)
            _restore(parameters, versions[-1])
            if its_count:  # an update without samples changes nothing
                optimizer.step()
            versions.append(_copy(parameters))
            total, count = total + its_total, count + its_count
        losses.append(total / count)
    weights, state = weights_of(model), state_by_name(model, optimizer)
    evaluation = evaluate(model, case.loss, batches[-1])
    return Trained(weights, state, losses, [], evaluation)


def _version_rule(plan: Plan) -> Callable[[int, int], int]:
    """Which version a stage uses in an update; a list of versions counts from its first."""
    depth = plan.stages
    rules: dict[str, Callable[[int, int], int]] = {
        "pipedream": lambda update, stage: update - (depth - 1 - stage),
        "pipedream-vertical": lambda update, _: update - (depth - 1),
        "pipedream-2bw": lambda update, _: update - 1,
    }
    return lambda update, stage: max(0, rules[plan.schedule](update, stage))


def _updates(batch: Any, plan: Plan) -> Iterator[list[Part]]:
    """For each update of a step, the samples that it is the mean of: a part from every replica, or all."""
    if plan.schedule == "pipedream-2bw":
        yield [(batch, 0)]
        return
    samples = num_samples(batch)
    for number in range(plan.microbatches):
        parts: list[Part] = []
        for replica in range(plan.data):
            begin, end = part_bounds(samples, replica, plan.data)
            first, _ = part_bounds(end - begin, number, plan.microbatches)
            its = take_part(take_part(batch, replica, plan.data), number, plan.microbatches)
            parts += [(its, begin + first)] if num_samples(its) else []
        yield parts


def _gradients(model: nn.Module, case: Case, step: int, parts: list[Part]) -> tuple[float, float]:
    """Leave the gradient of the mean loss of `parts`; returns the loss total and count."""
    results = []
    for (inputs, targets), first_sample in parts:
        with scope(seed=case.seed, step=step, first_sample=first_sample):
            results.append(total_and_count(case.loss(model(inputs), targets), targets))
    count = sum(float(count) for _, count in results)
    if count == 0:
        return 0.0, 0.0
    torch.stack([total for total, _ in results]).sum().div(count).backward()
    return sum(float(total.detach()) for total, _ in results), count


def _copy(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in parameters]


@torch.no_grad()
def _restore(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)

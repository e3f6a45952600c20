"""Trainings that are saved, and go on in a new engine of the same plan: functions that ranks can import."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.engine import Engine
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.experts import Experts, MixtureOfExperts, SigmoidGate
from echelon.plan import Plan
from echelon.update.optim import SM3, Adafactor, CombinedOptimizer
from echelon.update.precision.loss_scaling import DynamicScale
from echelon.verify import Case
from echelon.verify.contract import make_engine
from tests.cases import random_tokens
from tests.engine.balance_models import CrowdedGate
from tests.state.checkpoint.trainings import state_of, train

SAVED, STEPS = 3, 5
WIDTH, VOCAB, SEQUENCE = 16, 16, 8


class Training(NamedTuple):
    """One training, by names: a plan, an optimizer and a kind of gate, if there are experts."""

    plan: str
    optimizer: str = "adamw"
    gate: str = ""


def crowded() -> nn.Module:
    return CrowdedGate(has_loss=True)


GATES: dict[str, Callable[[], Any]] = {
    "sigmoid": lambda: SigmoidGate(WIDTH, 4, 2, bias_rate=0.1),
    "crowded": crowded,
}


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    given = list(parameters)
    matrices, others = [p for p in given if p.dim() == 2], [p for p in given if p.dim() != 2]
    made = [torch.optim.Muon(matrices, lr=1e-2)] if matrices else []
    return CombinedOptimizer([*made, *([torch.optim.AdamW(others, lr=1e-2)] if others else [])])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "plain-sgd": partial(torch.optim.SGD, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "nadam": partial(torch.optim.NAdam, lr=1e-3),
    "radam": partial(torch.optim.RAdam, lr=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": partial(torch.optim.ASGD, lr=1e-2),
    "rprop": partial(torch.optim.Rprop, lr=1e-3),
    "adafactor": Adafactor,
    "sm3": partial(SM3, lr=1e-2, momentum=0.9),
    "muon": muon,
}


def make_model(gate: str) -> nn.Module:
    model = build(
        ModelConfig("llama", 2, WIDTH, 4, vocab=VOCAB, sequence=SEQUENCE, kv_heads=2, ffn=32, dropout=0.1)
    )
    for block in model.blocks if gate else ():
        block.mlp = MixtureOfExperts(GATES[gate](), Experts(4, WIDTH, 8))
    return model


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Targets of which other numbers count in each step."""
    inputs, targets = random_tokens(step, (4, SEQUENCE), VOCAB)
    targets[:, : step % 3] = -100
    return inputs, targets


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](parameters)


def case_of(training: Training) -> Case:
    options: dict[str, Any] = {"audit": "off"}
    if "precision=fp16" in training.plan:  # too large at first, so that steps are skipped
        options["loss_scale"] = DynamicScale(start=2.0**22, interval=2)
    if "pipedream" not in training.plan:
        options["schedule"] = factor
    return Case(
        partial(make_model, training.gate),
        make_batch,
        cross_entropy,
        partial(make_optimizer, training.optimizer),
        steps=STEPS,
        clip=None,
        options=options,
    )


def factor(step: int) -> float:
    """Of the learning rate: another one in every step."""
    return 1.0 / (1 + step)


def differences(trainings: list[Training], folder: str) -> dict[str, list[str]]:
    """By training, what is not the same in every bit: in the engine that saved, and in a new one."""
    return {str(each): _differences(each, f"{folder}/{number}") for number, each in enumerate(trainings)}


def _differences(training: Training, path: str) -> list[str]:
    case, plan = case_of(training), Plan.parse(training.plan)
    engine = make_engine(case, plan)
    train(engine, case, 0, SAVED)
    engine.save(path, extra={"position": SAVED})
    expected = end(engine, case)
    other = make_engine(case, plan)
    assert other.load(path) == {"position": SAVED}
    found = end(other, case)
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    return [key for key in expected if not same(expected[key], found[key])]


def end(engine: Engine, case: Case) -> dict[str, Any]:
    losses = train(engine, case, SAVED, STEPS)
    engine.synchronize()
    counters = {
        f"{each.slice.part} of {each.slice.name}": each.tensor.clone()
        for each in engine.owned()
        if each.slice.name.startswith("(") or each.slice.part == "master"
    }
    numbers = {"losses": torch.tensor(losses), "steps": engine.steps, "skipped": engine.skipped_steps}
    result = {**state_of(engine), **counters, **numbers, "rate": engine.learning_rate}
    engine.close(restore=False)
    return result


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    return bool(a == b)

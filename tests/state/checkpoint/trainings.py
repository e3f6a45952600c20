"""Trainings that are saved and go on, in functions that ranks can import."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from echelon.engine import Engine
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.batch import DTYPES
from echelon.nn.experts import Experts, MixtureOfExperts, SoftmaxGate
from echelon.plan import Plan
from echelon.update.optim import SM3, Adafactor
from echelon.verify import Case
from echelon.verify.contract import make_engine
from tests.cases import random_tokens

SAVED, STEPS = 3, 8  # saved after so many of all steps
WIDTH, VOCAB, SEQUENCE, LAYERS = 8, 16, 8, 6
State = dict[str, Tensor]  # by "name part"

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adafactor": partial(Adafactor, lr=1e-2, eps=(1e-6, 1e-3)),
    "sm3": partial(SM3, lr=1e-2, momentum=0.9, eps=1e-10),
}


def make_model(layers: int = LAYERS) -> nn.Module:
    """A Llama with experts in every second block, tied weights, and dropout."""
    config = ModelConfig(
        "llama", layers, WIDTH, 2, vocab=VOCAB, sequence=SEQUENCE, kv_heads=2, ffn=12, dropout=0.1
    )
    model = build(config)
    for block in list(model.blocks)[::2]:
        block.mlp = MixtureOfExperts(SoftmaxGate(WIDTH, 4, 2, balance=0.1), Experts(4, WIDTH, 8))
    return model


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    return random_tokens(step, (8, SEQUENCE), VOCAB)


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](parameters)


def case_of(optimizer: str) -> Case:
    return Case(
        make_model,
        make_batch,
        cross_entropy,
        partial(make_optimizer, optimizer),
        steps=STEPS,
        options={"audit": "off"},
    )


def train(engine: Engine, case: Case, begin: int, end: int) -> list[float]:
    batches = case.batches(DTYPES[engine.plan.precision])
    return [engine.step(engine.local(batch)).loss for batch in batches[begin:end]]


def state_of(engine: Engine) -> State:
    """All weights, buffers and optimizer state, whole."""
    weights = {f"{name} value": value for name, value in engine.full_state_dict().items()}
    state = {
        f"{name} {part}": value
        for name, parts in engine.full_optimizer_state().items()
        for part, value in parts.items()
    }
    return weights | state


def save_each(plan: str, paths: Mapping[str, str]) -> None:
    """Train the first steps with each optimizer, and save."""
    for optimizer, path in paths.items():
        case = case_of(optimizer)
        engine = make_engine(case, Plan.parse(plan))
        train(engine, case, 0, SAVED)
        engine.save(path)
        engine.close(restore=False)


def largest_gaps(
    plan: str, paths: Sequence[tuple[str, str, str]], references: Mapping[str, State]
) -> dict[str, float]:
    """Go on from checkpoints, each (source, optimizer, path); how far each ends from its reference."""
    gaps = {}
    for source, optimizer, path in paths:
        case = case_of(optimizer)
        engine = make_engine(case, Plan.parse(plan))
        engine.load(path)
        assert engine.steps == SAVED
        train(engine, case, SAVED, STEPS)
        gaps[f"{source} -> {plan}, {optimizer}"] = largest_gap(state_of(engine), references[optimizer])
        engine.close(restore=False)
    return gaps


def largest_gap(state: State, reference: State) -> float:
    """The largest difference, relative to the largest number of each tensor."""
    assert state.keys() == reference.keys(), state.keys() ^ reference.keys()
    return max(
        ((state[key] - reference[key]).abs().max() / reference[key].abs().max().clamp(min=1e-3)).item()
        for key in state
        if state[key].numel() and state[key].is_floating_point()
    )

"""The verification case of a random training: functions that ranks can import."""

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.experts import Experts, MixtureOfExperts, SoftmaxGate
from echelon.nn.initialization.initial_values import WeightSource, deferred
from echelon.parallel.data import grad_accumulation
from echelon.update.optim import SM3, Adafactor, CombinedOptimizer
from echelon.update.precision.loss_scaling import DynamicScale, LossScale
from echelon.verify import Case
from tests.contract_models import CASES, VOCAB
from tests.fuzz.model_rules import LOW_PRECISIONS, NUM_EXPERTS, OF_TOKENS, TRANSFORMERS
from tests.fuzz.pool import IMAGES, POOL, SEQUENCE, class_loss, make_pool_batch
from tests.fuzz.random_training import RandomTraining

_RATES = {"sgd": 0.1, "adam": 1e-2, "adamw": 1e-2, "adafactor": 1e-2, "sm3": 1e-2}
# Low enough for gradients to be far from an overflow, where one device and parts of a sum would differ.
_SCALES: tuple[LossScale, ...] = (256.0, DynamicScale(start=256.0, interval=2))
_IGNORED = -100
_SMALLEST = grad_accumulation.SMALLEST


def case_of(training: RandomTraining) -> Case:
    """What `verify` trains."""
    options: dict[str, Any] = {"prefetch": training.prefetch}
    if training.smallest_unit == 0:
        options["smallest_unit"] = 0
    if training.resident_bytes:
        options["resident_bytes"] = training.resident_bytes
    if training.plan.precision == "fp16":
        options["loss_scale"] = _SCALES[training.seed % len(_SCALES)]
    if training.rates == "falling":
        options["schedule"] = falling
    if training.boundaries == "early":
        options["boundaries"] = list(range(1, training.plan.stages))
    return Case(
        partial(make_model, training),
        partial(make_batch, training),
        _loss_of(training),
        partial(make_optimizer, training),
        steps=training.steps,
        clip=training.clip or None,
        seed=training.seed,
        options=options,
    )


def falling(step: int) -> float:
    return 1 / (1 + step)


def _loss_of(training: RandomTraining) -> Callable[[Any, Any], Any] | None:
    if training.model in POOL:
        given = class_loss if POOL[training.model].data == IMAGES else cross_entropy
        return None if training.batch == "own" else given
    return cross_entropy if training.model in TRANSFORMERS else CASES[training.model].loss


def make_model(training: RandomTraining) -> nn.Module:
    """The model; a deferred one is without memory in ranks, and whole for the plain loop."""
    if training.deferred:
        empty = deferred(partial(_build, training))
        if "RANK" in os.environ:
            return empty
        values, whole = WeightSource(empty, torch.device("cpu")), _build(training)
        whole.load_state_dict({name: values.tensor(name) for name in whole.state_dict()})
        return whole
    return _build(training)


def _build(training: RandomTraining) -> nn.Module:
    if training.plan.compile:
        _compile_without_inductor()
    grad_accumulation.SMALLEST = (
        0 if training.seed % 2 else _SMALLEST
    )  # no matrix here is large enough otherwise
    if training.model in POOL:
        return POOL[training.model].make(training)
    if training.model not in TRANSFORMERS:
        return CASES[training.model].make_model()
    config = ModelConfig(
        "llama" if training.model == "experts" else training.model,  # type: ignore[arg-type]
        training.layers,
        width=8,
        heads=training.heads,
        vocab=training.vocab,
        sequence=training.tokens,
        kv_heads=training.kv_heads or None,
        ffn=16 if training.model == "gpt" else 12,
        tied=training.tied,
        dropout=training.dropout,
    )
    model = build(config)
    if training.model == "experts":
        _mix_experts(model, training)
    return model


def _mix_experts(model: nn.Module, training: RandomTraining) -> None:
    """In every second block, or in all: feed-forward parts are mixtures of experts."""
    for block in list(model.blocks)[:: 1 + training.seed % 2]:  # type: ignore[arg-type]
        gate = SoftmaxGate(8, NUM_EXPERTS, 1 + training.seed % 3, normalize=training.seed % 3 > 0)
        block.mlp = MixtureOfExperts(gate, Experts(NUM_EXPERTS, 8, 8))


@cache
def _compile_without_inductor() -> None:
    """From now on, torch.compile in this process traces and differentiates layers, but does not generate C++:
    that takes minutes, and tests torch rather than this project."""
    torch.compile = partial(torch.compile, backend="aot_eager")


def make_batch(training: RandomTraining, step: int) -> Any:
    """Random tokens, images or vectors, with other targets that count in every step."""
    generator = torch.Generator().manual_seed(1000 * training.seed + step)
    if training.model in POOL:
        shape = (training.samples, SEQUENCE)
        ignored = _ignored(training, step, shape, generator) if training.model in OF_TOKENS else None
        return make_pool_batch(training, ignored, generator)
    if training.model not in OF_TOKENS:
        sizes = {"resnet": (3, 6, 6), "twice": (6,)}[training.model]
        inputs = torch.randn(training.samples, *sizes, generator=generator)
        return inputs, torch.randint(5, (training.samples,), generator=generator)
    is_transformer = training.model in TRANSFORMERS
    shape = (training.samples, training.tokens if is_transformer else SEQUENCE)
    vocab = training.vocab if is_transformer else VOCAB
    inputs = torch.randint(vocab, shape, generator=generator)
    targets = torch.randint(vocab, shape, generator=generator)
    return inputs, targets.masked_fill(_ignored(training, step, shape, generator), _IGNORED)


def _ignored(
    training: RandomTraining, step: int, shape: tuple[int, int], generator: torch.Generator
) -> Tensor:
    """Which targets do not count: none, some of every sample, or every target of most samples."""
    if training.targets == "all":
        return torch.zeros(shape, dtype=torch.bool)
    if training.targets == "some":
        ignored = torch.rand(shape, generator=generator) < 0.3
        ignored[:, step % shape[1]] = False
        return ignored
    ignored = torch.ones(shape, dtype=torch.bool)
    ignored[step % training.samples :: 3] = False
    return ignored


def make_optimizer(training: RandomTraining, parameters: Any) -> torch.optim.Optimizer:
    """Matrices may be decayed alone. Muon is for matrices; AdamW takes the rest."""
    parameters, decay = list(parameters), 0.0 if training.decay == "none" else 0.1
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0 if training.decay == "matrices" else decay},
    ]
    if training.optimizer == "muon":
        return _make_muon(training, parameters, decay)
    return _make(training, training.optimizer)(groups)  # type: ignore[no-any-return]


def _make_muon(training: RandomTraining, parameters: list[Any], decay: float) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    kinds = [(torch.optim.Muon, {"lr": 1e-2}, matrices), (_make(training, "adamw"), {}, others)]
    return CombinedOptimizer([kind(p, weight_decay=decay, **options) for kind, options, p in kinds if p])


def _make(training: RandomTraining, name: str) -> Any:
    # Adam divides by the size of gradients. That of an attention's key bias is nothing but rounding, which
    # decay inside the gradient would blow up within 3 steps: a larger eps keeps it small.
    kinds: dict[str, Any] = {
        "sgd": partial(torch.optim.SGD, momentum=0.9),
        "adam": partial(torch.optim.Adam, eps=1e-3),
        "adamw": torch.optim.AdamW,
        "adafactor": partial(Adafactor, eps=(1e-6, 1e-3)),
        "sm3": partial(SM3, momentum=0.9, eps=1e-10),
    }
    rate = _RATES[name]
    if (
        training.plan.precision in LOW_PRECISIONS
    ):  # where rounding is as large as many gradients, and drives them apart
        kinds["adamw"] = partial(torch.optim.AdamW, eps=1e-3)
        kinds["adafactor"] = partial(Adafactor, eps=(1e-2, 1e-3))
        kinds["sm3"] = partial(SM3, momentum=0.9, eps=1e-4)
        rate = rate if name == "sgd" else 1e-3
    return partial(kinds[name], lr=rate)

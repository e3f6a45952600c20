"""`engine.weights()`: whole tensors, one at a time, on every rank, in the memory of one."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import echelon
from echelon.engine import Engine, parallelize
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import ExpertsConfig, ModelConfig, build, cross_entropy, preset
from tests.cases import sgd
from tests.peak_memory import PeakMemory

GPT = ModelConfig("gpt", layers=2, width=16, heads=2, vocab=18, sequence=8, tied=True)
MIXTURE = dataclasses.replace(GPT, experts=ExpertsConfig(4, 1, 8, gate="switch", shared=12))


def tokens(engine: Engine) -> tuple[Tensor, Tensor]:
    numbers = torch.randint(0, 18, (8, 9), generator=torch.Generator().manual_seed(3))
    inputs: tuple[Tensor, Tensor] = engine.local((numbers[:, :-1], numbers[:, 1:]))
    return inputs


def start(plan: str, config: ModelConfig = GPT) -> Engine:
    torch.manual_seed(5)
    return parallelize(build(config), plan, optimizer=sgd, loss=cross_entropy)


def both_ways(plan: str, config: ModelConfig) -> tuple[list[str], list[str], bool, list[float]]:
    """The names of `weights` and of the state dict, whether values are the same, and the losses around."""
    with start(plan, config) as engine:
        losses = [engine.step(tokens(engine)).loss]
        expected = engine.full_state_dict()
        found = {name: tensor.clone() for name, tensor in engine.weights()}
        is_same = all(torch.equal(found[name], expected[name]) for name in expected)
        losses.append(engine.step(tokens(engine)).loss)
        return list(found), list(expected), is_same, losses


@pytest.mark.parametrize(
    ("plan", "ranks", "config"),
    [
        ("data=2", 2, GPT),
        ("data=2 zero=3 offload=parameters", 2, GPT),
        ("data=2 expert=2 pipeline=2 microbatches=2", 4, MIXTURE),
        ("data=2 zero=3 tensor=2 pipeline=2 microbatches=2", 8, GPT),
    ],
    ids=["replicas", "offload", "experts", "all"],
)
@pytest.mark.slow_cases("offload", "experts")
def test_weights_are_those_of_the_state_dict(
    plan: str, ranks: int, config: ModelConfig, warm_ranks: Callable[[int], Ranks]
) -> None:
    plan = f"{plan} precision=fp64"
    alone = warm_ranks(1).run(both_ways, "precision=fp64", config)[0]
    for found, expected, is_same, losses in warm_ranks(ranks).run(both_ways, plan, config):
        assert found == expected == list(build(config).state_dict())  # tied weights under both of their names
        assert is_same
        assert losses == pytest.approx(alone[3], abs=1e-12)


def read_late(plan: str, folder: Path) -> list[str]:
    """The errors of a tensor whose turn is over, and of loops that a step, a load or the end interrupts."""
    engine, errors = start(plan), []
    kept = dict(engine.weights())
    name = next(iter(kept))
    for read in (
        lambda: kept[name].sum(),
        lambda: kept[name] + 1,
        lambda: list(kept[name]),
        lambda: kept[name].numpy(),
    ):
        with pytest.raises(UserError) as error:
            read()
        errors.append(str(error.value))
    assert len({*errors}) == 1
    arrays = {name: tensor.numpy() for name, tensor in engine.weights()}  # share the memory: it stays
    assert all((arrays[name] == tensor.numpy()).all() for name, tensor in engine.full_state_dict().items())
    assert kept[name].shape == arrays[name].shape
    engine.save(folder)
    for change in (lambda: engine.step(tokens(engine)), lambda: engine.load(folder), engine.close):
        iterator = engine.weights()
        next(iterator)  # and the loop is left
        next(engine.weights())
        change()  # type: ignore[operator]
        with pytest.raises(UserError) as error:
            next(iterator)
        errors.append(str(error.value))
    return errors


def test_a_late_read_is_an_error(warm_ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    for errors in warm_ranks(2).run(read_late, "data=2 zero=3", tmp_path / "saved"):
        first, *_, of_step, of_load, of_end = errors
        assert first.endswith("returns all at once")
        assert of_step == of_load
        assert of_step.startswith("engine.weights() was begun before the last step or load")
        assert of_end.startswith("this engine is closed")


# Memory. The model has 140 MB, and its largest tensor 8 MB.

LARGE = dataclasses.replace(
    preset("gpt-tiny"), layers=40, width=256, heads=4, vocab=8192, sequence=8, tied=False
)
NOISE = 12 * 2**20  # of the allocator, of lists of what ranks own, and of links between ranks


class Peaks(NamedTuple):
    """Bytes above what the engine held: of tensors, and of resident memory of the process."""

    tensors: int
    resident: int
    largest: int
    total: int
    num_tensors: int


def read_all(plan: str) -> Peaks:
    torch.manual_seed(0)
    model = echelon.deferred(lambda: build(LARGE))
    engine = parallelize(model, plan, optimizer=sgd, loss=cross_entropy)
    sizes = []
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak so far is forgotten
    before = status("VmRSS")
    with PeakMemory() as memory:
        for _, tensor in engine.weights():
            sizes.append(tensor.nbytes)
    return Peaks(memory.peak, status("VmHWM") - before, max(sizes), sum(sizes), len(sizes))


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@pytest.mark.slow
def test_a_loop_takes_the_memory_of_the_largest_tensor(warm_ranks: Callable[[int], Ranks]) -> None:
    for peaks in warm_ranks(8).run(read_all, "data=2 zero=3 tensor=2 pipeline=2 microbatches=2"):
        assert peaks.total > 15 * peaks.largest
        assert peaks.tensors <= peaks.largest + 2**20
        assert peaks.resident <= peaks.largest + NOISE

"""offload=activations in training on one device: the same to the last bit, within bounds, or refused."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.collectives import mesh
from echelon.collectives.boundary import FETCH, STORE
from echelon.errors import UserError
from echelon.memory.activation_offload import offload
from echelon.memory.activation_offload.offload import ActivationOffload
from tests.cases import adamw
from tests.contract_models import class_loss
from tests.engine.test_compiling import backend as other_backend
from tests.memory.recompute.test_training import Make, Trained, gpt, resnet
from tests.nn.huggingface.models import make as make_transformer

CASES: dict[str, tuple[Make, str]] = {
    "gpt": (gpt, "microbatches=3"),
    "gpt, a pipeline of one stage": (gpt, "microbatches=3 schedule=gpipe"),
    "resnet": (resnet, ""),
    "gpt, recompute": (gpt, "recompute=full contiguous=true"),
    "gpt, selective": (gpt, "microbatches=2 recompute=selective"),
    "transformers' llama": (partial(make_transformer, "llama"), "microbatches=2"),
}


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("gpt, recompute", "transformers' llama")
@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_to_the_last_bit(name: str) -> None:
    make, plan = CASES[name]
    expected, found = Trained(make, plan), Trained(make, f"{plan} offload=activations")
    assert found.losses == expected.losses
    assert found.evaluation == expected.evaluation
    for key, tensor in expected.state.items():
        assert torch.equal(found.state[key], tensor), key
    assert found.peak < (0.95 if "recompute" in plan else 0.85) * expected.peak


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler hides those of its own
def test_what_compiled_layers_save_goes_too() -> None:
    with other_backend("aot_eager"):
        expected, found = Trained(gpt, "compile=true"), Trained(gpt, "compile=true offload=activations")
    for key, tensor in expected.state.items():
        assert torch.equal(found.state[key], tensor), key
    assert found.peak < 0.85 * expected.peak


ROWS, WIDTH = 16, 32
ONE = ROWS * WIDTH * 4  # bytes of a hidden state
SMALL = ROWS * 8 + 4  # those of targets, and of the mean


class Block(nn.Module):
    """Saves its input and the result of the tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def chain_engine(plan: str, layers: int) -> echelon.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(layers)))
    return echelon.parallelize(model, plan, optimizer=adamw, loss=class_loss, audit="off")


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(WIDTH, (rows,), generator=generator)


def peak(plan: str, layers: int) -> int:
    with chain_engine(plan, layers) as engine:
        engine.step(batch())
        return engine.memory().peak["activations"]


def test_the_device_holds_two_layers_however_many_there_are() -> None:
    layer = 2 * ONE
    few, many = peak("offload=activations", 4), peak("offload=activations", 24)
    assert few == many <= 2 * layer + 2 * ONE + SMALL, "two layers, the input, and the loss"
    assert peak("", 24) - peak("", 4) == 20 * layer


@pytest.mark.parametrize("microbatches", [1, 3])
def test_losses_of_microbatches_in_flight_go_too(microbatches: int) -> None:
    """With gpipe all forwards come before the first backward: what stays of each is the stage's own input."""
    plan = f"offload=activations schedule=gpipe microbatches={microbatches}"
    with chain_engine(plan, 6) as engine:
        engine.step(batch(ROWS * microbatches))
        found = engine.memory().peak["activations"]
    assert found <= 2 * 2 * ONE + (2 * ONE + SMALL) * microbatches


# All halves for weights come at the end. Two stages on one rank.
_HALVES = "stage 0: 0\nstage 1: 0\nrank 0: " + " ".join(
    [f"F{k}@0 F{k}@1 I{k}@1 I{k}@0" for k in range(3)] + [f"W{k}@1 W{k}@0" for k in range(3)]
)


def test_weight_halves_that_wait_take_no_memory(tmp_path: Path) -> None:
    """What stays of each microbatch is what its stages were called with. The second stage's layers are
    fetched for either half; the first has no gradients of inputs."""
    (tmp_path / "halves.txt").write_text(_HALVES)
    plan = f"microbatches=3 schedule={tmp_path / 'halves.txt'}"
    with chain_engine(f"{plan} offload=activations", 12) as engine:
        found = [engine.step(batch(3 * ROWS)).loss for _ in range(2)]
        assert engine.memory().peak["activations"] == 2 * 2 * ONE + 3 * (2 * ONE + SMALL)
        assert engine.ledger.total("host", STORE, "activations").sent == 2 * 3 * (11 + 12) * ONE
        assert engine.ledger.total("host", FETCH, "activations").received == 2 * 3 * (11 + 2 * 12) * ONE
    with chain_engine(plan, 12) as engine:
        assert found == [engine.step(batch(3 * ROWS)).loss for _ in range(2)]


def test_bytes_follow_a_formula() -> None:
    """Each block but the last moves its input and what it saves, each way; the first's input stays."""
    with chain_engine("offload=activations", 6) as engine:
        for step in range(1, 4):
            engine.step(batch())
            moved = 2 * 5 * ONE - ONE
            assert engine.ledger.total("host", STORE, "activations").sent == step * moved
            assert engine.ledger.total("host", FETCH, "activations").received == step * moved


def test_of_a_layer_that_is_listed_twice_the_last_call_stays() -> None:
    """The first block is the last one too: all blocks but the last call move what they save."""
    torch.manual_seed(0)
    first = Block()
    model = nn.Sequential(first, Block(), Block(), first)
    with echelon.parallelize(model, "offload=activations", optimizer=adamw, loss=class_loss) as engine:
        engine.step(batch())
        assert engine.ledger.total("host", STORE, "activations").sent == 2 * 3 * ONE - ONE


def test_host_memory_is_bounded_and_accounted() -> None:
    with chain_engine("offload=activations", 6) as engine:
        held = []
        for _ in range(3):
            engine.step(batch())
            (pieces,) = engine.mesh.boundary.storages().values()
            held.append(sum(piece.nbytes for piece in pieces))
    assert held == [5 * 4096] * 3
    with chain_engine("offload=activations", 6) as engine:
        for rows in (16, 15, 14, 16, 13):
            engine.step(batch(rows))
        (pieces,) = engine.mesh.boundary.storages().values()
    assert len(pieces) == 5, "pieces serve batches of other shapes"


def test_full_recompute_moves_one_input_per_layer() -> None:
    with chain_engine("offload=activations recompute=full", 6) as engine:
        engine.step(batch())
        assert engine.ledger.total("host", STORE).sent == 4 * ONE


def test_an_evaluation_moves_nothing() -> None:
    with chain_engine("offload=activations", 3) as engine:
        engine.evaluate(batch())
        assert engine.ledger.total("host").payload == 0


def test_a_step_that_fails_gives_host_memory_back() -> None:
    class Failing(nn.Module):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if Failing.fails:
                raise ValueError("broken")
            return x

    model = nn.Sequential(Block(), Block(), Failing(), Block())
    with echelon.parallelize(
        model, "offload=activations", optimizer=adamw, loss=class_loss, audit="off"
    ) as engine:
        engine.step(batch())
        Failing.fails = True
        with pytest.raises(ValueError, match="broken"):
            engine.step(batch())
        Failing.fails = False
        engine.step(batch())
        (pool,) = [each.pool for each in engine._setup.observers._all if isinstance(each, ActivationOffload)]
        assert sum(map(len, pool._idle.values())) == len(pool.pieces) == 2


def test_more_than_the_host_has_is_refused_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "available_memory", lambda: offload.total_memory() // 32 + 3000)
    with chain_engine("offload=activations", 6) as engine:
        before = engine.full_state_dict()
        with pytest.raises(
            UserError, match=r"activations of rank 0 do not fit.*2\.9 KiB left.*recompute=full"
        ):
            engine.step(batch())
        after = engine.full_state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)

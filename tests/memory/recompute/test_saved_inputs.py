"""SavedInputs in one preallocated memory: where they lie, when a slot is free, and the same training."""

import doctest
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.launching import Ranks
from echelon.memory.recompute import saved_inputs
from echelon.memory.recompute.saved_inputs import ArgumentName, ContiguousInputs, SavedInputs, Slots
from echelon.models import ModelConfig, build, cross_entropy
from echelon.verify import assert_equal
from tests.memory.recompute.chains import assert_same, recompute, settings, train, vectors
from tests.parallel.tensor.models import language_case

Warm = Callable[[int], Ranks]
ARGUMENT = ArgumentName("layer 0", 0)


def test_the_example_of_slots() -> None:
    result = doctest.testmod(saved_inputs)
    assert result.failed == 0
    assert result.attempted > 0


def test_slots_never_overlap_and_the_first_gap_is_used() -> None:
    taken: dict[int, int] = {}
    free = Slots()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        if taken and float(torch.rand((), generator=generator)) < 0.5:
            begin = sorted(taken)[int(torch.randint(len(taken), (), generator=generator))]
            del taken[begin]
            free.free(begin)
        size = int(torch.randint(1, 2000, (), generator=generator))
        begin = free.take(size)
        assert begin % 256 == 0
        assert all(begin + size <= other or other + length <= begin for other, length in taken.items())
        taken[begin] = size
    assert free.size <= 2 * sum(-(-size // 256) * 256 for size in taken.values()) + 300 * 256


def arena() -> ContiguousInputs:
    return ContiguousInputs(torch.device("cpu"), SavedInputs())


def hidden(value: float, samples: int = 4) -> Tensor:
    return torch.full((samples, 16), float(value), requires_grad=True)


def test_the_first_step_finds_the_size_and_later_ones_use_it() -> None:
    inputs = arena()
    places: list[list[int]] = []
    for _ in range(3):
        kept = [inputs.keep(hidden(value), None, ARGUMENT) for value in range(3)]
        assert [float(each.take()[0, 0]) for each in kept] == [0.0, 1.0, 2.0]
        places.append([each.take().data_ptr() - inputs.memory.data_ptr() for each in kept])
        del kept
        inputs.after_passes()
    assert len(inputs.memory) == 3 * 256
    assert places[1] == places[2] == [0, 256, 512]


def test_a_slot_is_taken_while_any_tensor_lies_in_it() -> None:
    inputs = arena()
    for _ in range(2):
        kept = inputs.keep(hidden(1.0), None, ARGUMENT)
        inside = kept.take().detach()[1:2]
        del kept
        other = inputs.keep(hidden(2.0), None, ARGUMENT)
        assert inside.tolist() == [[1.0] * 16], "the first one's slot is not free"
        del inside, other
        inputs.after_passes()
    before = inputs.keep(hidden(3.0), None, ARGUMENT).take().data_ptr()
    assert inputs.keep(hidden(4.0), None, ARGUMENT).take().data_ptr() == before, "now it is"


def test_larger_batches_take_other_memory_until_the_next_step() -> None:
    inputs = arena()
    for samples in (4, 4, 40, 40):
        kept = inputs.keep(hidden(1.0, samples), None, ARGUMENT)
        assert kept.take().shape == (samples, 16)
        del kept
        inputs.after_passes()
    assert len(inputs.memory) == 40 * 16 * 4
    place = inputs.keep(hidden(1.0, 40), None, ARGUMENT).take()
    assert place.data_ptr() == inputs.memory.data_ptr()


def test_strides_are_kept() -> None:
    transposed = hidden(1.0).t()
    assert arena().keep(transposed, None, ARGUMENT).take().stride() == transposed.stride()


def mlp() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(4)))


def test_gradients_are_the_same_to_the_last_bit() -> None:
    shared = settings()._replace(inputs=arena())
    assert_same(train(mlp, [1, 2, 1], shared=shared), train(mlp, []))


def test_a_microbatch_that_goes_forward_does_not_write_into_one_that_waits() -> None:
    inputs = arena()
    torch.manual_seed(0)
    model = mlp().double()
    recompute(list(model), [1, 1, 1, 1], settings()._replace(inputs=inputs))
    for _ in range(2):
        model.zero_grad()
        first, second = (model(vectors(number)).square().sum() for number in range(2))
        first.backward()
        third = model(vectors(2)).square().sum()
        second.backward()
        third.backward()
        inputs.after_passes()
    gradients = [p.grad for p in model.parameters()]
    torch.manual_seed(0)
    plain = mlp().double()
    for number in range(3):
        plain(vectors(number)).square().sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, plain.parameters(), strict=True))


def gradient_places(plan: str) -> list[set[int]]:
    """The memory of gradients on their way, after each step."""
    torch.manual_seed(0)
    model = build(ModelConfig("gpt", layers=3, width=16, heads=2, vocab=32, sequence=8))
    engine = echelon.parallelize(model, plan, optimizer=torch.optim.SGD, loss=cross_entropy)
    places = []
    for step in range(3):
        tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(step))
        engine.step(engine.local((tokens[:, :-1], tokens[:, 1:])))
        memory = engine._local.sharings[0]._reduced[0].gradient  # type: ignore[attr-defined]
        places.append({buffer.data_ptr() for buffer in memory.preallocated()})
    engine.close(restore=False)
    return places


@pytest.mark.parametrize("zero", [2, 3])
def test_steps_take_no_new_memory_for_gradients(warm_ranks: Warm, zero: int) -> None:
    for places in warm_ranks(2).run(gradient_places, f"data=2 zero={zero} microbatches=2 contiguous=true"):
        assert len(places[0]) >= 2
        assert places[0] == places[1] == places[2]


@pytest.mark.slow_cases("data=2 zero=2 recompute=full microbatches=2")
@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 zero=2 recompute=full microbatches=2",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in [
                "data=2 zero=3 recompute=sqrt",
                "pipeline=2 schedule=1f1b microbatches=4 recompute=full",
                "pipeline=2 schedule=zero-bubble microbatches=4 recompute=sqrt",
                "pipeline=2 schedule=pipedream microbatches=2 recompute=full",
                "data=2 zero=3 shard=2",
            ]
        ),
    ],
)
def test_training_is_equal_to_one_device(plan: str) -> None:
    is_slow = plan != "data=2 zero=2 recompute=full microbatches=2"
    clip = None if "pipedream" in plan else 1.0
    model = "llama" if "pipedream" in plan else "gpt"  # which has tied weights
    assert_equal(language_case(model, 20 if is_slow else 3, clip), f"{plan} contiguous=true")

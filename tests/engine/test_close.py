"""The end of an engine: nothing of it stays, and the model is whole and free for another."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from tests.cases import Perceptron, adamw, mean_loss, vectors
from tests.parallel.tensor.models import language_case

Warm = Callable[[int], Ranks]

# Each makes another kind of thing: groups, threads, hooks, split weights.
PLANS = [
    ("data=2 microbatches=2", 2),
    ("data=2 zero=1", 2),
    ("data=2 zero=3", 2),
    ("data=2 sync=parameter-server", 2),
    ("data=2 sync=async staleness=0", 2),
    ("tensor=2", 2),
    ("tensor=2 sequence=true", 2),
    ("context=2", 2),
    ("pipeline=2 microbatches=2", 2),
    ("pipeline=2 schedule=pipedream microbatches=2", 2),
    ("data=2 tensor=2 zero=1", 4),
    ("data=2 pipeline=2 zero=3 microbatches=2", 4),
]


def close_and_go_on(plan: str) -> tuple[bool, bool, bool, list[str]]:
    """After a close: whether weights are whole, tied and called as before; what a second engine leaves."""
    case = language_case("llama" if "pipedream" in plan else "gpt", steps=2)  # the first has no tied weights
    model = case.build()
    names = list(model.state_dict())
    modules = {module: dict(vars(module)) for module in model.modules()}
    engine = echelon.parallelize(model, f"{plan} precision=fp64", optimizer=adamw, loss=case.loss)
    engine.step(engine.local(case.batches()[0]))
    expected = engine.full_state_dict()
    engine.close()
    engine.close()  # a second time changes nothing
    state = model.state_dict()
    is_whole = list(state) == names and all(torch.equal(state[name], expected[name]) for name in names)
    shared = model.embedding.tokens.weight is model.head.projection.weight  # type: ignore[union-attr]
    is_tied = shared == ("pipedream" not in plan)
    is_clean = all(
        set(vars(module)) == set(before) and not module._forward_hooks and not module._forward_pre_hooks
        for module, before in modules.items()
    )
    world = torch.distributed.get_world_size()
    second = echelon.parallelize(model, f"data={world} precision=fp64", optimizer=adamw, loss=case.loss)
    with second:
        second.step(second.local(case.batches()[1]))
        after = second.full_state_dict()
    return is_whole, is_tied, is_clean, [name for name in names if not torch.isfinite(after[name]).all()]


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases(
    "context=2-2",
    "data=2 microbatches=2-2",
    "data=2 pipeline=2 zero=3 microbatches=2-4",
    "data=2 tensor=2 zero=1-4",
    "data=2 zero=1-2",
    "pipeline=2 microbatches=2-2",
    "tensor=2 sequence=true-2",
)
@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_a_closed_engine_leaves_the_model_whole_for_another(warm_ranks: Warm, plan: str, ranks: int) -> None:
    for is_whole, is_tied, is_clean, not_finite in warm_ranks(ranks).run(close_and_go_on, plan):
        assert (is_whole, is_tied, is_clean, not_finite) == (True, True, True, [])


def with_other_values(plan: str) -> list[str]:
    """The weights of a model with a frozen tie that an engine returns or leaves with other values."""
    case = language_case("gpt")
    model = case.build()
    model.embedding.requires_grad_(False)  # type: ignore[union-attr]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = echelon.parallelize(model, f"{plan} precision=fp64", optimizer=adamw, loss=case.loss)
    returned = engine.full_state_dict()
    engine.close(restore=True)
    states = (returned, model.state_dict())
    return [name for state in states for name in before if not torch.equal(state[name], before[name])]


def test_a_frozen_tied_weight_is_put_together_once(warm_ranks: Warm) -> None:
    """Stages once cut it at different places, since only what is trained was sharded by itself."""
    assert warm_ranks(4).run(with_other_values, "data=2 pipeline=2 zero=3") == [[]] * 4


def resources() -> tuple[int, int, int]:
    """Threads, file descriptors, and pieces of shared memory of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = sum("/dev/shm" in line or "memfd:" in line for line in maps)
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), shared


def make_many(plan: str, number: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    def once() -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        with echelon.parallelize(model, plan, optimizer=adamw, loss=mean_loss) as engine:
            engine.step(engine.local(vectors(0)))

    once()
    once()
    first = resources()
    for _ in range(number):
        once()
    return first, resources()


@pytest.mark.parametrize(
    ("plan", "ranks", "number"),
    [
        ("data=2", 2, 20),
        pytest.param("data=2", 2, 200, marks=pytest.mark.slow),
        pytest.param("data=2 zero=3", 2, 20, marks=pytest.mark.slow),
        pytest.param("data=2 sync=async staleness=1", 2, 20, marks=pytest.mark.slow),
        pytest.param("pipeline=2 microbatches=2", 2, 20, marks=pytest.mark.slow),
        pytest.param("data=2 pipeline=2 zero=1 microbatches=2", 4, 10, marks=pytest.mark.slow),
    ],
)
def test_many_engines_leave_no_threads_descriptors_or_shared_memory(
    plan: str, ranks: int, number: int
) -> None:
    """3,700 idle threads were seen after 1,000 random plans."""
    for first, last in echelon.launch(make_many, ranks, plan, number):
        assert all(after <= before for before, after in zip(first, last, strict=True)), (first, last)


def take_a_split_model(plan: str) -> list[str]:
    """What a second engine says while the first is open, and after it was closed without the weights."""
    model, answers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), []
    options = {"optimizer": adamw, "loss": mean_loss}
    engine = echelon.parallelize(model, plan, **options)
    for end in (lambda: None, lambda: engine.close(restore=False)):
        end()
        try:
            echelon.parallelize(model, plan, **options)
        except UserError as error:
            answers.append(str(error))
    return answers


@pytest.mark.parametrize("plan", ["data=2 zero=3", "pipeline=2"])
def test_a_model_in_parts_is_refused(warm_ranks: Warm, plan: str) -> None:
    """A second engine over it trained NaN, or failed deep inside."""
    for answers in warm_ranks(2).run(take_a_split_model, plan):
        assert len(answers) == 2
        assert all("split over ranks by another engine" in answer for answer in answers), answers
        assert all(f"plan '{plan}'" in answer for answer in answers), answers


def test_a_closed_engine_says_so() -> None:
    with echelon.parallelize(Perceptron(), "data=1", optimizer=adamw, loss=mean_loss) as engine:
        engine.step(vectors(0))
    for use in (engine.step, engine.evaluate):
        with pytest.raises(UserError, match="this engine is closed"):
            use(vectors(0))
    with pytest.raises(UserError, match="this engine is closed"):
        engine.full_state_dict()


def fail_inside() -> str:
    """An error inside `with` must not make ranks wait for each other: only rank 0 has it."""
    model = nn.Sequential(nn.Linear(6, 5))
    try:
        with echelon.parallelize(model, "data=2 zero=3", optimizer=adamw, loss=mean_loss):
            raise KeyError("on every rank")
    except KeyError as error:
        return str(error)


def test_an_error_inside_ends_the_engine_without_a_word_to_other_ranks(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(fail_inside) == ["'on every rank'"] * 2


def test_a_parameter_that_stays_whole_keeps_its_identity() -> None:
    model = Perceptron()
    before = list(model.parameters())
    with echelon.parallelize(model, "data=1", optimizer=adamw, loss=mean_loss) as engine:
        engine.step(vectors(0))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


class Tables(nn.Module):
    """A layer with a buffer that no state dict has, and a parameter with an attribute of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.linear.bias.no_decay = True  # type: ignore[union-attr]
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale  # type: ignore[no-any-return]


def what_comes_back(plan: str) -> list[tuple[bool, bool, bool]]:
    model = nn.Sequential(Tables(), Tables(), nn.Linear(6, 5))
    with echelon.parallelize(model, plan, optimizer=adamw, loss=mean_loss) as engine:
        for step in range(2):  # the first one lets go of its gradients by itself
            engine.step(engine.local(vectors(step)))
    assert all(parameter.grad is None for parameter in model.parameters())
    return [
        (
            bool((layer.scale == 2).all()),
            getattr(layer.linear.bias, "no_decay", False),
            layer.count is not None,
        )
        for layer in model[:2]
    ]


@pytest.mark.parametrize("plan", ["pipeline=2", "data=2 zero=3", "data=2"])
def test_temporary_buffers_and_attributes_of_parameters_come_back(warm_ranks: Warm, plan: str) -> None:
    for layers in warm_ranks(2).run(what_comes_back, plan):
        assert layers == [(True, True, True)] * 2


def fail_to_make(plan: str) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Resources after the second and after the sixth call that fails."""
    seen = []
    for _ in range(6):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        with pytest.raises(UserError, match="optimizer function returned a int"):
            echelon.parallelize(model, plan, optimizer=lambda _: 3, loss=mean_loss)  # type: ignore
        seen.append(resources())
    return seen[1], seen[-1]


@pytest.mark.parametrize("plan", ["data=2 zero=3", pytest.param("pipeline=2", marks=pytest.mark.slow)])
def test_a_call_that_fails_leaves_nothing_behind(warm_ranks: Warm, plan: str) -> None:
    for second, last in warm_ranks(2).run(fail_to_make, plan):
        assert all(after <= before for before, after in zip(second, last, strict=True)), (second, last)


def close_broken() -> tuple[bool, int]:
    """A step fails in the middle of the pipeline; closing must not wait for what is lost."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    plan = "pipeline=2 schedule=pipedream microbatches=2"
    engine = echelon.parallelize(model, plan, optimizer=adamw, loss=mean_loss)
    engine.step(vectors(0))
    engine._runner.is_broken = True  # as after a failed step
    engine.close()
    return engine._is_closed, len(engine.mesh._open_groups)


def test_a_broken_engine_closes(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(close_broken) == [(True, 0)] * 2


def adafactor_state() -> list[str]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    with echelon.parallelize(model, "pipeline=2", optimizer=torch.optim.Adafactor, loss=mean_loss) as engine:
        engine.step(engine.local(vectors(0)))
        state = engine.full_optimizer_state()
    return sorted(state["2.weight"])


def test_state_of_rows_and_columns_is_owned(warm_ranks: Warm) -> None:
    """It has another size than its parameter, and could not be listed."""
    expected = ["col_var", "row_var", "step"]
    assert warm_ranks(2).run(adafactor_state) == [expected] * 2

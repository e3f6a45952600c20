"""The contract can fail: it finds each known bug, with the plan that the page names for it."""

from collections.abc import Callable

import pytest

import echelon
from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.verify import inject_bug, verify
from echelon.verify.inject_bug import BUGS
from tests.cases import Perceptron, adamw, mean_loss, perceptron_case, vectors
from tests.injected_bugs import rows

# One of each kind of code that bugs break: losses, sums, rings, norms.
FAST = ("mean-of-microbatches", "tied-not-summed", "ring-gradients-lost", "norm-counts-copies")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[] if bug in FAST else pytest.mark.slow) for bug in BUGS]
)
def test_a_bug_is_found_with_its_plan_which_holds_without_it(
    bug: str, warm_ranks: Callable[[int], Ranks]
) -> None:
    row = rows()[bug]
    case, ranks = row.case(steps=3), warm_ranks(Plan.parse(row.plan).ranks)
    broken = verify(case, row.plan, inject_bug=bug, ranks=ranks)
    assert not broken.equal, str(broken)
    assert "DIFFERS" in str(broken)
    whole = verify(case, row.plan, ranks=ranks)
    assert whole.equal, str(whole)


@pytest.mark.parametrize(
    ("bug", "plan", "settings"),
    [
        ("norm-counts-copies", "pipeline=2", ()),  # the tied weight
        ("norm-not-summed", "data=2 zero=3", ()),
        ("norm-of-first-shard", "data=2 expert=2", ("model.preset=moe-tiny",)),
        ("auxiliary-loss-scaled", "data=2 microbatches=2", ("model.preset=moe-tiny",)),
        ("last-microbatch-only", "data=2 microbatches=2 zero=1", ()),
        ("mean-of-microbatches", "pipeline=2 microbatches=2", ()),
    ],
)
@pytest.mark.slow
def test_a_bug_is_found_with_other_plans_too(
    bug: str, plan: str, settings: tuple[str, ...], warm_ranks: Callable[[int], Ranks]
) -> None:
    case = rows()[bug]._replace(plan=plan, settings=settings).case(steps=3)
    verdict = verify(case, plan, inject_bug=bug, ranks=warm_ranks(Plan.parse(plan).ranks))
    assert not verdict.equal, str(verdict)


@pytest.mark.slow_cases(
    "data=2 zero=1-divide-twice",
    "data=2 zero=1-skip-bucket",
    "data=2 zero=3-divide-twice",
    "data=2 zero=3-skip-bucket",
    "data=2-divide-twice",
    "data=4-divide-twice",
    "data=4-skip-bucket",
)
@pytest.mark.parametrize("bug", ["divide-twice", "skip-bucket"])
@pytest.mark.parametrize("plan", ["data=2", "data=4", "data=2 zero=1", "data=2 zero=3"])
def test_an_injected_bug_is_found_and_its_parameter_named(bug: str, plan: str) -> None:
    verdict = verify(perceptron_case(steps=3), plan, inject_bug=bug)
    assert not verdict.equal
    names = {name for name, _ in perceptron_case().build().named_parameters(remove_duplicate=False)}
    assert verdict.worst_tensor[0].split()[0] in names
    assert verdict.worst_tensor[0] in str(verdict)
    assert verdict.worst[0] in str(verdict)
    assert "DIFFERS" in str(verdict)


def test_a_plan_that_cannot_have_the_bug_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no code of this plan could have the bug; it needs data=2 or more"):
        verify(perceptron_case(), "data=1", inject_bug="skip-bucket")
    with pytest.raises(ValueError, match="needs sync=all-reduce"):
        verify(perceptron_case(), "data=2 sync=parameter-server", inject_bug="divide-twice")


def test_a_model_that_cannot_have_the_bug_is_refused() -> None:
    """Else the verdict would say of a bug that was never there that it is no error."""
    with pytest.raises(ValueError, match=r"the model has nothing to break; it needs gates"):
        verify(perceptron_case(steps=1), "data=2", inject_bug="auxiliary-loss-local")


def test_an_unknown_bug_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="did you mean 'divide-twice'") as refusal:
        verify(perceptron_case(), "data=2", inject_bug="divide-twise")
    assert all(name in str(refusal.value) for name in BUGS)


def test_scaled_gradients_have_a_scaled_norm() -> None:
    model = Perceptron()
    whole = echelon.parallelize(model, "data=1", optimizer=adamw, loss=mean_loss)
    start = whole.full_state_dict()
    norm = whole.step(vectors(0)).grad_norm
    again = Perceptron()
    again.load_state_dict(start)
    broken = echelon.parallelize(again, "data=1", optimizer=adamw, loss=mean_loss, audit="off")
    assert inject_bug._scale(broken._local.sharings, 3.0)
    assert abs(broken.step(vectors(0)).grad_norm - 3 * norm) < 1e-5 * norm


def test_one_rank_without_experts_or_ties_has_nothing_to_break() -> None:
    engine = echelon.parallelize(Perceptron(), "data=1", optimizer=adamw, loss=mean_loss)
    assert not inject_bug.keep_experts_apart(engine)
    assert not inject_bug.multiply_experts(engine)
    assert not inject_bug.keep_ties_apart(engine)
    assert not inject_bug.skip_bucket(engine)

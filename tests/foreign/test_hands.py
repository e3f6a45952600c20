"""What a user does by hand, and what is tied by memory or by an optimizer: equal to the plain loop that does
the same, or refused by every rank; never something else in silence."""

from typing import Any

import pytest

from echelon.plan import Plan
from tests.foreign.hands import ALIASED, COUPLED, HANDS, KEPT, LATE
from tests.foreign.proof import prove

CASES = {**LATE, **COUPLED, **ALIASED, **HANDS, **KEPT}
PLANS = [
    "data=1",
    "data=1 offload=optimizer",
    "data=1 update=backward",
    "data=1 offload=parameters",
    "data=2",
    "data=2 zero=1",
    "data=2 zero=2",
    "data=2 zero=3",
    "data=2 zero=1 offload=optimizer",
    "pipeline=2 microbatches=2",
]

# (case, plan) → words of the refusal; what is not listed is equal. Of two lines the first is meant.
_NEW_MODEL = "make another engine with parallelize"
_HIDDEN = ("zero=3", "offload=parameters")


def expected(name: str, plan: str) -> str | None:
    is_one_call = plan == "data=1"
    hides = any(word in plan for word in _HIDDEN)
    if name in ("module swapped", "module dropped", "parameter replaced"):
        return _NEW_MODEL
    if name in ("hook added", "weight hook added", "forward replaced"):
        return None if is_one_call else _NEW_MODEL  # also of ranks that have no such weight
    if name == "part unfrozen":
        return "had requires_grad=False when parallelize was called"  # also where one stage alone has it
    if name in COUPLED:
        has_all = "zero" not in plan and "pipeline" not in plan
        if "backward" in plan or "offload=parameters" in plan:
            return "step()"
        return None if has_all else ("nobody knows" if name == "one rate" else "looks at")
    if name in ALIASED:
        moving = ("zero", "offload", "pipeline", "update")
        return "is memory of the weight" if any(word in plan for word in moving) else None
    if name in ("clamped", "clamped data", "data rebound", "state dict loaded"):
        if hides:
            return "during a step" if name == "state dict loaded" else "has no values on this rank"
        if "pipeline" in plan:
            return (
                "load_state_dict()"
                if name == "state dict loaded"
                else "this rank has the weights of its own stage"
            )
        return None
    if name == "moments by parameter":
        moved = "zero" in plan or "offload" in plan
        return "optimizer.state" if moved else None
    if name == "state replaced":
        return "optimizer.state was replaced" if "zero" in plan or "offload" in plan else None
    if name == "group added":
        return "the optimizer's groups"
    if name in KEPT:  # of which the audit may be the first to tell
        return "plan 'pipeline=2" if "pipeline" in plan else None
    return None


def check(name: str, plan: str, warm_ranks: Any) -> None:
    refusal = prove(CASES[name], plan, warm_ranks(Plan.parse(plan).ranks))
    words = expected(name, plan)
    assert (refusal is None) == (words is None), f"expected {words!r}, got {refusal!r}"
    assert words is None or words in str(refusal)


ALWAYS = [
    ("hook added", "data=2"),
    ("eval of a part", "pipeline=2 microbatches=2"),
    ("clips in a hook", "data=2 zero=1"),
    ("aliased parameter", "data=2 zero=1"),
    ("aliased buffer", "data=1 update=backward"),
    ("data rebound", "data=2 zero=2"),
    ("state replaced", "data=2 zero=1"),
    ("weight hook added", "pipeline=2 microbatches=2"),
    ("clamped data", "data=2 zero=1 offload=optimizer"),
    ("auxiliary none", "pipeline=2 microbatches=2"),
    ("part unfrozen", "pipeline=2 microbatches=2"),
]


@pytest.mark.parametrize(("name", "plan"), ALWAYS)
def test_some_of_them_are_equal_or_refused(name: str, plan: str, warm_ranks: Any) -> None:
    check(name, plan, warm_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), [(name, plan) for name in sorted(CASES) for plan in PLANS])
def test_all_of_them_are_equal_or_refused(name: str, plan: str, warm_ranks: Any) -> None:
    check(name, plan, warm_ranks)

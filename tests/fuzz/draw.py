"""From choices to a random training: the same code for hypothesis, which shrinks, and for a plain seed.

`draw(choose)` asks `choose` for one of some options after the other, the simplest first. It only
offers options that go with everything chosen before, so every training is valid and none is thrown away.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from echelon.plan import ASYNCHRONOUS_SCHEDULES, AUTO, Plan
from tests.fuzz.model_rules import LOW_PRECISIONS
from tests.fuzz.order import draw_order
from tests.fuzz.random_training import ORDER_FILE, RandomTraining
from tests.fuzz.values import FIELDS, PLAN_FIELDS, candidates, fits

Choose = Callable[[Sequence[Any]], Any]
Wish = Mapping[str, Any]

# Every value of a field is wished for once; of these fields, only the values listed here.
_SOME: dict[str, Sequence[Any]] = {
    "data": (2, 3, 8),
    "shard": (2,),
    "microbatches": (2, 3, 8),
    "layers": (2, 4),
    "seed": (),
}
# What a wish for such a field asks of another one.
_TOGETHER: dict[str, Wish] = {
    "staleness": {"sync": "async"},
    "gradients": {"precision": "bf16", "data": 2},  # ranks that sum them
    "shard": {"sync": "all-reduce", "data": 4},
    "prefetch": {"zero": 3},
    "chunks": {"schedule": "interleaved"},
    "workers": {"pipeline": AUTO},
    "sequence": {"tensor": 2},
    "attention": {"context": 2},
    "expert": {"model": "experts", "data": 4},
    "checkpoints": {"tensor": 2, "recompute": "full"},
    "contiguous": {"zero": 2, "data": 2},
    "delay": {"offload": ("optimizer",)},
    "batch": {"model": "hf-llama"},
    "boundaries": {"pipeline": 2},
    "resident_bytes": {"offload": ("optimizer", "parameters")},
    "compile": {"tensor": 2, "pipeline": 1, "layers": 1, "steps": 3},  # each size is compiled again
}


def draw(choose: Choose, wish: Wish | None = None) -> RandomTraining:
    """A training that `wish` is true of, and that is otherwise as `choose` chooses."""
    values: dict[str, Any] = dict(wish or {})
    for field in FIELDS:
        if field not in values:
            options = _options(field, values)
            assert options, f"nothing is left for {field} after {values}"
            values[field] = choose(options)
    order = draw_order(choose, values) if values["schedule"] == ORDER_FILE else ""
    plan = Plan(**{name: values[name] for name in PLAN_FIELDS})
    training = RandomTraining(
        plan, order, **{name: values[name] for name in FIELDS if name not in PLAN_FIELDS}
    )
    return _with_stop(choose, training, values) if _is_like_one_device(plan) else training


def _options(field: str, values: Wish) -> list[Any]:
    return [value for value in candidates(field, values) if fits({**values, field: value}, field)]


def _is_like_one_device(plan: Plan) -> bool:
    """Whether one device trains to the same weights, with a stop or without."""
    is_stale = plan.sync == "async" and plan.staleness > 0
    late = is_stale or plan.delay > 0 or not plan.flushes
    return not late and plan.precision not in LOW_PRECISIONS and not plan.compile


def _with_stop(choose: Choose, training: RandomTraining, values: Wish) -> RandomTraining:
    """The training, or one whose first steps have another plan, or the same one."""
    if not choose([False, False, False, True]):
        return training
    given = {name: value for name, value in values.items() if name not in PLAN_FIELDS}
    first: dict[str, Any] = {**given, "workers": 1, "prefetch": 1, "resident_bytes": 0, "boundaries": "even"}
    for field in FIELDS:
        if field not in first:
            options = [value for value in _options(field, first) if _keeps_meaning(field, value, first)]
            if not options:  # a few values go with few others
                return training
            first[field] = choose(options)
    before = Plan(**{name: first[name] for name in PLAN_FIELDS})
    return replace(training, before=str(before), stop=choose(range(1, training.steps)))


def _keeps_meaning(field: str, value: Any, first: Wish) -> bool:
    """Whether a first part with this value can be compared with one device."""
    kept = {
        "pipeline": value != AUTO,
        "schedule": value not in (*ASYNCHRONOUS_SCHEDULES, ORDER_FILE),
        "staleness": value == 0 or first.get("sync") != "async",
        "delay": value == 0,
        "compile": not value,
        "precision": value == "fp64",
    }
    return bool(kept.get(field, True))


def draw_random(seed: str, wish: Wish | None = None) -> RandomTraining:
    """The training of a seed."""
    return draw(random.Random(seed).choice, wish)


def wishes() -> Iterator[Wish]:
    """Each value of each field, but the simplest, which comes by itself."""
    for field in FIELDS:
        together = _TOGETHER.get(field, {})
        if field == "samples" or not all(value in candidates(other, {}) for other, value in together.items()):
            continue
        _, *more = dict.fromkeys(candidates(field, {}))
        yield from ({field: value, **together} for value in more if value in _SOME.get(field, more))


def values_to_cover() -> Iterator[tuple[str, Any]]:
    """What the random plans of a test must have: the simplest value of each field, and all wishes."""
    yield from ((field, candidates(field, {})[0]) for field in FIELDS if field != "samples")
    yield from (next(iter(wish.items())) for wish in wishes())


def field_values(training: RandomTraining) -> Iterator[tuple[str, Any]]:
    """The fields and values that a training has, as wishes name them."""
    for field in FIELDS:
        yield field, getattr(training.plan if field in PLAN_FIELDS else training, field)

"""Every habit is right or refused: nothing else happens in silence, and no error is a raw one."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from echelon.engine import parallelize
from echelon.errors import UserError
from echelon.plan import Plan
from tests.cases import sgd
from tests.foreign.habits import (
    AUDIT,
    HABITS,
    PAGE,
    PLANS,
    TABLE,
    Outcome,
    Plain,
    adamw,
    batch_of,
    loss_of,
    run_habits,
    run_plain,
    words,
)

COMPILED = ["compile the model", "compile in place"]  # seconds each
QUICK = [name for name in HABITS if name not in COMPILED]


@cache
def on_one_device(name: str) -> Outcome:
    return run_plain(HABITS[name].act)


@cache
def without_habits(*, step: bool) -> Outcome:
    """`step`: that which some habits make before they are refused."""
    return run_plain((lambda engine, _, batch: engine.step(batch)) if step else None)


def differences(one: Any, other: Any) -> list[float]:
    leaves, others = ([leaf for leaf in tree_leaves(each) if leaf is not None] for each in (one, other))
    pairs = [(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(leaves, others, strict=True)]
    assert [a.shape for a, _ in pairs] == [b.shape for _, b in pairs]
    return [float((a.detach().double() - b.detach().double()).abs().max()) for a, b in pairs]


def is_equal(one: Any, other: Any) -> bool:
    return all(difference <= 1e-9 for difference in differences(one, other))  # NaN is not


def problem(name: str, plan: str, outcomes: list[Outcome | str]) -> str | None:
    """What is wrong with the outcomes of a habit, on all ranks."""
    words = HABITS[name].refusals.get(plan)
    errors = [each for each in outcomes if isinstance(each, str)]
    if errors:
        return f"raises {errors}"
    refusals = [each.refusal for each in outcomes if isinstance(each, Outcome) and each.refusal]
    if words is None:
        if refusals:
            return f"is refused: {refusals[0]}"
        is_right = all(is_equal(on_one_device(name)[:2], each[:2]) for each in outcomes)
        return None if is_right else "is not what one device does"
    if not any(words in text for text in refusals):
        return f"expected {words!r}, got {refusals or 'no refusal'}"
    long = [text for text in refusals if len(re.findall(r"\. [A-Z]", text)) > 2 and words != AUDIT]
    if long or (words in PAGE and not all("docs/loops.md" in text for text in refusals if words in text)):
        return f"is refused in many sentences, or without the page: {refusals}"
    states = [each.state for each in outcomes if isinstance(each, Outcome) and each.refusal]
    for state in filter(None, states):  # a step after the refusal trains as if the habit were not
        if not any(is_equal(without_habits(step=step).state, state) for step in (False, True)):
            return f"is refused, and has changed the training: {refusals}"
    return None


def check(names: list[str], plan: str, warm_ranks: Any) -> None:
    ranks = Plan.parse(plan).ranks
    results = warm_ranks(ranks).run(run_habits, names, plan) if ranks > 1 else [run_habits(names, plan)]
    of_habits = zip(names, zip(*results, strict=True), strict=True)
    found = {name: problem(name, plan, list(outcomes)) for name, outcomes in of_habits}
    problems = [f"{name} {text}" for name, text in found.items() if text is not None]
    assert not problems, "\n".join(problems)


@pytest.mark.slow_cases(*(set(PLANS) - {"data=1", "data=2 zero=3"}))
@pytest.mark.parametrize("plan", PLANS)
def test_every_habit_is_right_or_refused(plan: str, warm_ranks: Any) -> None:
    check(QUICK, plan, warm_ranks)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.slow_cases(*(set(PLANS) - {"data=1"}))
def test_a_model_that_is_compiled_between_steps(plan: str, warm_ranks: Any) -> None:
    check(COMPILED, plan, warm_ranks)


# precision=fp16 scales gradients until the update.


def scaled_engine() -> Any:
    return parallelize(words().float(), "precision=fp16", optimizer=adamw, loss=loss_of)


def test_a_bare_backward_pass_beside_scaled_gradients_is_refused() -> None:
    with scaled_engine() as engine:
        tokens, targets = batch_of(0)
        engine.backward(loss_of(engine(tokens), targets))
        loss_of(engine.module(tokens), targets).backward()
        engine(tokens)  # which must not hide it
        with pytest.raises(UserError, match=r"changed by hand, as loss.backward\(\) does.*docs/loops.md"):
            engine.update()
        engine.step(batch_of(1))
        loss_of(engine.module(tokens), targets).backward()
        engine.step(batch_of(2))  # which clears gradients, as on one device
        weights = engine.full_state_dict()
    with scaled_engine() as engine:
        engine.step(batch_of(1))
        engine.step(batch_of(2))
        assert is_equal(weights, engine.full_state_dict())


def test_scaled_gradients_are_not_shown_and_not_replaced() -> None:
    with scaled_engine() as engine:
        tokens, targets = batch_of(0)
        engine.optimizer.zero_grad()
        engine.backward(loss_of(engine(tokens), targets))
        with pytest.raises(UserError, match=r"precision=fp16 scales it until engine\.update\(\)"):
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
        with pytest.raises(UserError, match=r"engine\.zero_grad\(\) drops it"):
            engine.module.zero_grad()
        with pytest.raises(UserError, match=r"in place of a weight: engine\.update\(\) brings it there"):
            engine.optimizer.zero_grad()
        engine.update()
        engine.optimizer.zero_grad()
        engine.step(batch_of(1))


# torch.autocast in the user's loop: what plain autocast gives on one device.


def autocast_by_steps(engine: Any, batch: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        engine.step(engine.local(batch))


def autocast_by_passes(engine: Any, batch: Any) -> None:
    tokens, targets = engine.local(batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(engine(tokens), targets)
    engine.backward(loss)
    engine.update()


def no_autocast(engine: Any, batch: Any) -> None:
    engine.step(engine.local(batch))


Loop = Callable[[Any, Any], None]


def train_with_autocast(plan: str, train: Loop) -> dict[str, Tensor]:
    options: Any = {"tensor_table": TABLE} if "tensor" in plan else {}
    with parallelize(words().float(), plan, optimizer=sgd, loss=loss_of, **options) as engine:
        for step in range(3):
            train(engine, batch_of(step))
        return engine.full_state_dict()


def plain_autocast(train: Loop) -> dict[str, Tensor]:
    plain = Plain(words().float())
    plain.optimizer = sgd(plain.module.parameters())
    for step in range(3):
        train(plain, batch_of(step))
    return {name: each.detach() for name, each in plain.module.state_dict().items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(differences(one, other))


LOOPS = [autocast_by_steps, autocast_by_passes]


@pytest.mark.parametrize("train", LOOPS)
def test_autocast_of_the_user_on_one_rank(train: Loop) -> None:
    expected = plain_autocast(train)
    assert distance(train_with_autocast("data=1", train), expected) <= 1e-6
    assert distance(expected, plain_autocast(no_autocast)) > 1e-4, "autocast rounds"


def check_autocast(plan: str) -> list[float]:
    loops = LOOPS[:1] if "pipeline" in plan else LOOPS
    return [distance(train_with_autocast(plan, train), plain_autocast(train)) for train in loops]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plan", PLANS[1:])
@pytest.mark.slow_cases("data=2", "data=2 zero=1", "data=2 zero=2")
def test_autocast_of_the_user_over_ranks(plan: str, warm_ranks: Any) -> None:
    rounding = distance(plain_autocast(autocast_by_steps), plain_autocast(no_autocast))
    for distances in warm_ranks(2).run(check_autocast, plan):
        assert max(distances) <= 2 * rounding, (distances, rounding)  # sums in another order round otherwise


def test_autocast_beside_bf16() -> None:
    plain, (tokens, targets) = words().bfloat16(), batch_of(0)
    with parallelize(words().float(), "precision=bf16", optimizer=sgd, loss=loss_of) as engine:
        with torch.autocast("cpu", torch.bfloat16):
            loss, expected = (loss_of(model(tokens), targets) for model in (engine, plain))
        assert loss.dtype == expected.dtype == torch.float32
        assert float(loss) == float(expected)
    trained = train_with_autocast("precision=bf16", autocast_by_passes)
    expected_weights = plain_autocast(autocast_by_passes)
    assert distance(trained, expected_weights) <= 2**-6, "the rounding of weights of up to 4"

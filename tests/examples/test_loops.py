"""Loops of many kinds equal their twins in plain torch, and need few lines more."""

import difflib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.launching import Ranks

Warm = Callable[[int], Ranks]
FOLDER = Path(__file__).parents[2] / "examples" / "loops"
# Lines that differ from plain torch: one and a half times what Accelerate needs for the same loop, if known.
MOST_LINES = {
    "images": 24,
    "gpt": 24,
    "vae": 10,
    "gan": 22,
    "siamese": 16,
    "lstm": 24,
    "actor_critic": 24,
    "diffusion": 24,
    "clip": 24,
    "classification": 24,
    "dpo": 10,
}
PLANS = ["data=2", "data=2 zero=3", "data=2 recompute=full"]


def flat(result: Any) -> list[torch.Tensor]:
    state, *others = result if isinstance(result, tuple) else (result,)
    floats = [value for value in state.values() if value.is_floating_point()]
    return [*floats, *(torch.tensor(other, dtype=torch.float64) for other in others)]


def check(name: str, plan: str) -> None:
    torch.manual_seed(0)
    plain = import_module(f"examples.loops.plain.{name}").train()
    torch.manual_seed(0)
    trained = import_module(f"examples.loops.{name}").train(f"{plan} precision=fp64")
    torch.testing.assert_close(flat(trained), flat(plain), rtol=0, atol=1e-9)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MOST_LINES)
def test_a_loop_equals_its_twin(warm_ranks: Warm, name: str, plan: str) -> None:
    warm_ranks(2).run(check, name, plan)


@pytest.mark.parametrize("name", MOST_LINES)
def test_few_lines_differ(name: str) -> None:
    plain, ours = (FOLDER / each / f"{name}.py" for each in ("plain", "."))
    lines = difflib.ndiff(plain.read_text().splitlines(), ours.read_text().splitlines())
    assert sum(line.startswith("+ ") and line.strip() != "+" for line in lines) <= MOST_LINES[name]

"""The example of ten lines that train a model of transformers, run as its text says."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from echelon.data import loader
from echelon.launching import Ranks

pytest.importorskip("transformers")

import transformers

from examples import transformers_dataloader as example

SCRIPT = Path(example.__file__)
PLANS = ["data=2", "data=2 zero=3", "pipeline=2 microbatches=2", "tensor=2"]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of a plain loop on one device."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(example.CONFIG).train()
    batches = loader(example.DATASET, batch_size=8, shuffle=True, collate_fn=example.collate)
    optimizer, losses = example.adamw(model.parameters()), []
    for batch in [batch for _ in range(3) for batch in batches]:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0], "it learns"
    return losses


def check_folder(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model(torch.arange(8)[None]).logits[0, -1].argmax() == 8


@pytest.mark.parametrize("plan", [pytest.param(plan, marks=pytest.mark.slow) for plan in PLANS])
def test_every_plan_trains_alike(
    plan: str, expected: list[float], tmp_path: Path, warm_ranks: Callable[[int], Ranks]
) -> None:
    losses, _ = warm_ranks(2).run(example.main, plan, str(tmp_path))
    assert losses == pytest.approx(expected, rel=1e-3)
    check_folder(tmp_path)


@pytest.mark.slow_cases("pipeline=2 microbatches=2")
@pytest.mark.parametrize(
    "plan", [PLANS[2], *(pytest.param(p, marks=pytest.mark.slow) for p in PLANS if p != PLANS[2])]
)
def test_it_runs_under_torchrun(plan: str, expected: list[float], tmp_path: Path) -> None:
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), plan]
    output = run("-m", *command, str(tmp_path))
    assert output.count("plan") == 1, "one rank speaks"
    first, last = map(float, re.findall(r"loss ([\d.]+) → ([\d.]+)", output)[0])
    assert (first, last) == pytest.approx((expected[0], expected[-1]), rel=1e-2)
    check_folder(tmp_path)


@pytest.mark.slow
def test_it_starts_ranks_itself(expected: list[float], tmp_path: Path) -> None:
    assert f"loss {expected[0]:.3f}" in run(str(SCRIPT), "data=2", str(tmp_path))


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=SCRIPT.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_ten_lines() -> None:
    definition, *lines = inspect.getsource(example.main).splitlines()
    assert definition.startswith("def main(plan")
    assert len(lines) == 10

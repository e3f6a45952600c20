"""The pairs of docs/migrate.md, theirs and ours, come to the same losses in float64 on two ranks. That of
DeepSpeed runs in a program of its own, in float32: tests/train/integrations."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.launching import Ranks
from echelon.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAIRS = {
    name: (dtype, code)
    for name, dtype, code in re.findall(
        r"<!-- pair: (\w+), (?:(\w+), )?run -->\n(.*?)(?=\n## |\Z)", PAGE, re.DOTALL
    )
}


def batches_of(rank: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """This rank's half of each of eight global batches."""
    torch.manual_seed(1)
    batches = [torch.randn(4 * 2, 6, dtype=dtype) for _ in range(8)]
    local = [batch[rank * 4 : rank * 4 + 4] for batch in batches]
    return [(inputs, inputs[:, :4].argmax(dim=1)) for inputs in local]


def run_pair(name: str) -> dict[str, list[float]]:
    """The losses of both functions of a pair on this rank, as its code is on the page."""
    (make,) = (code for code in CODE.findall(PAGE) if code.startswith("def make"))
    rank, losses = torch.distributed.get_rank(), {}
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(torch.distributed.get_world_size()),
    }
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }  # Accelerate asks for them, and joins none
    with patch.dict(os.environ, environment):
        dtype, text = PAIRS[name]
        precision = "" if dtype else "precision=fp64 "
        for code in CODE.findall(text):
            names: dict[str, Any] = {"torch": torch, "echelon": echelon}
            names["cross_entropy"] = nn.functional.cross_entropy
            exec(make + code.replace('(model, "', f'(model, "{precision}'), names)
            (function,) = names.keys() & {"theirs", "ours"}
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
            made = getattr(torch, dtype or "float64")
            losses[function] = names[function](model.to(made), batches_of(rank, made))
    return losses


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore")  # of theirs
@pytest.mark.parametrize("name", [name for name, (dtype, _) in PAIRS.items() if not dtype])
def test_theirs_and_ours_come_to_the_same_losses(name: str, warm_ranks: Callable[[int], Ranks]) -> None:
    if name == "accelerate":
        pytest.importorskip("accelerate")
    of_ranks = warm_ranks(2).run(run_pair, name)
    theirs = [sum(parts) / 2 for parts in zip(*(each["theirs"] for each in of_ranks), strict=True)]
    for each in of_ranks:
        assert each["ours"] == pytest.approx(theirs, abs=1e-12)
    assert theirs[-1] < theirs[0]


def test_the_pairs_are_of_the_systems_that_run_here() -> None:
    assert list(PAIRS) == ["ddp", "fsdp2", "accelerate", "deepspeed"]


WHICH = (ROOT / "docs" / "which-plan.md").read_text(encoding="utf-8")
WORDS = re.findall(r"`\+? ?([a-z]+=[^`]*)`", WHICH + PAGE)


# Fields that are only part of a plan, and what they are beside.
BESIDE = {
    "shard=8": "data=16 zero=3",
    "chunks=2": "schedule=interleaved pipeline=2 microbatches=4",
    "schedule=interleaved chunks=2": "pipeline=2 microbatches=4",
    "schedule=interleaved chunks=2 microbatches=8": "pipeline=2",
    "sequence=true": "tensor=2",
    "delay=1": "offload=optimizer",
    "expert=4": "data=4",
}
NOT_OURS = ("clip=", "stage=", "mixed_", "gradient_", "reshard_")  # arguments of functions


@pytest.mark.parametrize("line", [line for line in dict.fromkeys(WORDS) if not line.startswith(NOT_OURS)])
def test_the_plans_that_the_pages_name_are_plans(line: str) -> None:
    for name, value in {"4P": "8", "=P": "=2", "=N": "=8", "=…": "=2"}.items():
        line = line.replace(name, value)
    Plan.parse(f"{BESIDE.get(line, '')} {line}")

"""A loop of Lightning Fabric trains under a plan as plain Fabric does on one device."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.integrations import packages

STEPS = 6


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    packages.need("lightning_fabric")
    return packages.run_program("fabric.py", folder=tmp_path_factory.mktemp("plain"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["data=2 precision=fp64", "data=2 zero=3 precision=fp64", "tensor=2 precision=fp64"]
)
def test_a_plan_trains_as_plain_fabric_and_goes_on_under_another(
    plan: str, plain: Any, tmp_path: Path
) -> None:
    ours = packages.run_program("fabric.py", plan, ranks=2, folder=tmp_path)
    assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-9)
    for name, value in plain["weights"].items():
        torch.testing.assert_close(
            torch.tensor(ours["weights"][name]), torch.tensor(value), rtol=0, atol=1e-9
        )
    assert ours["resumed"] == pytest.approx(plain["losses"][STEPS:], abs=1e-9)


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class, where its package lies; the path is as before afterwards."""
    packages.need("lightning_fabric")
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages.FOLDER)])
    from echelon.integrations import FabricStrategy

    return FabricStrategy


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_no_loop_of_fabric_can_do_is_refused_with_what_to_write(strategy: Any) -> None:
    from echelon.errors import UserError

    with pytest.raises(UserError, match="no rank of a pipeline has it"):
        strategy("pipeline=2 microbatches=2")
    made, model = strategy("precision=fp64"), torch.nn.Linear(2, 2)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(UserError, match=r"model, optimizer = fabric\.setup"):
        made.setup_module(model)
    with pytest.raises(UserError, match="2 optimizers for one model"):
        made.setup_module_and_optimizers(model, [optimizer, other])
    with pytest.raises(UserError, match="parameters that are not the model's"):
        made.setup_module_and_optimizers(torch.nn.Linear(2, 2), [optimizer])
    with pytest.raises(UserError, match=r"FabricStrategy\(plan, clip=1.0\)"):
        made.clip_gradients_norm(model, optimizer, 1.0)
    with pytest.raises(UserError, match="the state has 0 models"):
        made.save_checkpoint("nowhere", {"step": 3})

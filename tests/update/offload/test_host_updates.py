"""More host memory than there is: refused before any of it is taken, on all ranks alike."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import echelon
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.update.offload.host_updates import check_host_memory, parameter_bytes


def offloading(plan: str = "offload=parameters") -> Mesh:
    return Mesh.pretend(Plan.parse(plan), rank=0)


def test_what_fits_is_accepted_and_what_does_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mesh, "free_host_memory", lambda _: 1000)
    check_host_memory({"parameters": 600, "optimizer": 400}, offloading())
    with pytest.raises(UserError) as caught:
        check_host_memory({"parameters": 600, "optimizer": 401, "activations": 0}, offloading())
    message = str(caught.value)
    assert "into host memory (parameters 600 B, optimizer 401 B), and 1000 B of it is available" in message
    assert "offload less" in message


def test_where_the_system_says_nothing_all_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mesh, "free_host_memory", lambda _: None)
    check_host_memory({"parameters": 2**50}, offloading())


def test_a_deferred_model_larger_than_the_host_is_refused_before_it_has_memory() -> None:
    model = echelon.deferred(lambda: nn.Sequential(*(nn.Linear(2**20, 2**20) for _ in range(4))))
    with pytest.raises(UserError, match=r"it puts 16\.0 TiB into host memory \(parameters 16\.0 TiB\)"):
        echelon.parallelize(
            model, "offload=parameters", optimizer=torch.optim.SGD, loss=nn.functional.mse_loss
        )


def test_what_the_optimizer_needs_on_the_host_is_asked_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Mesh, "free_host_memory", lambda _: 1000)
    with pytest.raises(UserError, match=r"into host memory \(optimizer .* and 1000 B of it is available"):
        echelon.parallelize(
            nn.Linear(10, 10),
            "offload=optimizer",
            optimizer=torch.optim.AdamW,
            loss=nn.functional.mse_loss,
        )


def test_weights_count_once_without_what_stays_on_the_device() -> None:
    model = nn.Linear(10, 10, device="meta")
    modules = {0: model, 1: model}
    assert parameter_bytes(modules, offloading(), 0) == 440
    assert parameter_bytes(modules, offloading(), 100) == 340
    assert parameter_bytes(modules, offloading(), 1000) == 0
    assert parameter_bytes(modules, offloading("data=2 zero=3 offload=parameters"), 0) == 220
    assert parameter_bytes(modules, offloading("data=1"), 0) == 0


def refusal() -> str:
    """Each rank alone would fit, and both together do not."""
    mesh = Mesh.join(Plan.parse("data=2 offload=parameters"))
    mesh.free_host_memory = lambda: 1000  # type: ignore[method-assign]
    try:
        check_host_memory({"parameters": 400 + 300 * mesh.rank}, mesh)
    except UserError as error:
        return str(error)
    finally:
        mesh.close()
    return ""


def test_the_ranks_of_a_machine_count_together(warm_ranks: Callable[[int], Ranks]) -> None:
    first, second = warm_ranks(2).run(refusal)
    assert first == second
    assert "the 2 ranks of a machine put 1.1 KiB into host memory" in first

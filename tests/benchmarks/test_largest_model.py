"""The bench of the largest model, small: all weights change, and some of them lie in host memory."""

import pytest
import torch
from torch import nn

from benchmarks import largest_model, run
from echelon.engine import parallelize
from tests.cases import adamw, mean_loss


@pytest.mark.slow
def test_small_models_train_with_weights_in_host_memory() -> None:
    result = run("largest-model", quick=True)
    assert [row.case for row in result.rows] == ["small", "small, half resident"]
    assert all("offload=parameters" in plan for plan in result.settings["plans"].values())
    assert result.settings["unchanged_weights"] == {"small": [], "small, half resident": []}
    whole, half = (row.extras for row in result.rows)
    weights = 2 * result.settings["parameters"]["small"]
    assert whole["resident_bytes"] == 0
    assert weights <= whole["host_bytes"] <= 1.2 * weights
    assert 0 < half["host_bytes"] < whole["host_bytes"]
    losses = result.settings["losses"]
    assert losses["small"] == losses["small, half resident"]
    assert losses["small"][-1] < losses["small"][0]


@pytest.mark.slow
def test_a_part_of_the_sizes_can_be_chosen() -> None:
    result = run("largest-model", quick=True, only="half")
    assert [row.case for row in result.rows] == ["small, half resident"]


def test_with_too_little_memory_fewer_samples_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = largest_model.Trained("", [2.0, 1.0], [1.0], 0.0, 0, 0, 0, [])

    def train(size: largest_model.Size) -> largest_model.Trained:
        if size.samples > 2:
            raise torch.OutOfMemoryError
        return trained

    monkeypatch.setattr(largest_model, "train", train)
    size = largest_model._small()[0]._replace(samples=8)
    assert largest_model._train_what_fits(size) == (size._replace(samples=2), trained)
    monkeypatch.setattr(largest_model, "_FEWEST_SAMPLES", 4)
    with pytest.raises(torch.OutOfMemoryError):
        largest_model._train_what_fits(size)


def test_it_tells_what_holds_the_memory_when_there_is_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    engine = parallelize(nn.Linear(64, 64, bias=False), "data=1", optimizer=adamw, loss=mean_loss)
    with engine, pytest.raises(torch.OutOfMemoryError), largest_model._memory_told(engine):
        raise torch.OutOfMemoryError
    told = capsys.readouterr().err
    assert "held: parameters 16.0 KiB, gradients 0 B" in told
    assert "in host memory: parameters 0 B" in told


def test_60_b_leaves_gibibytes_of_an_h200() -> None:
    """What a step needs is counted, and does not depend on the number of layers but for their inputs."""
    size = largest_model._sizes()[0]
    weights = 2 * size.config.num_parameters
    for samples in (4, 8):
        needed = largest_model.step_bytes(size.config, samples, offloaded=False)
        assert 110 * 2**30 < weights < weights + needed < 138 * 2**30
    offloaded = largest_model.step_bytes(size.config, 8, offloaded=True)
    assert offloaded > needed

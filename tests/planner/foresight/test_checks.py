"""What a plan asks of a model, a batch and a cluster."""

from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.checks import fit_errors
from echelon.planner.foresight.settings import Settings
from echelon.planner.shape.presets import preset_shape


def test_every_error_is_listed() -> None:
    settings = Settings(data=3, tensor=3, pipeline=100, context=7, expert=2, microbatches=2)
    errors = "\n".join(fit_errors(preset_shape("llama3-8b"), settings, read_cluster("h100:8"), 8))
    for part in (
        "6300 ranks",
        "batch=8",
        "32 heads",
        "8 key/value heads",
        "32 layers are too few",
        "context=7",
        "no experts",
    ):
        assert part in errors, part


def test_a_plan_that_fits_has_no_errors() -> None:
    settings = Settings(data=2, tensor=2, pipeline=2, microbatches=2)
    assert fit_errors(preset_shape("llama3-8b"), settings, read_cluster("h100:8"), 8) == []
    experts = Settings(data=8, expert=3)
    assert "8 experts" in "".join(
        fit_errors(preset_shape("mixtral-8x7b"), experts, read_cluster("h100:8"), 8)
    )

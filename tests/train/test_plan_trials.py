"""Trials of plans: dry runs, and a few steps on ranks of their own."""

import json
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.models import preset
from echelon.models.hf.config import config_to_hf
from echelon.train.plan_trials import Work, config_of_model, dry_run_of, try_plans

WORK = Work(preset("gpt-tiny"), 8, 32)


def test_models_are_presets_or_folders(tmp_path: Path) -> None:
    assert config_of_model("gpt-tiny") == preset("gpt-tiny")
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(preset("llama-tiny"), "bfloat16")))
    assert config_of_model(str(tmp_path)).layers == preset("llama-tiny").layers
    assert config_of_model(str(tmp_path / "config.json")) == config_of_model(str(tmp_path))
    with pytest.raises(UserError, match="'gpt-1t' is only a shape"):
        config_of_model("gpt-1t")


def test_a_dry_run_has_the_part_of_the_batch_of_its_replica() -> None:
    halves, whole = (dry_run_of(WORK, plan, 0).memory.peak["activations"] for plan in ("data=2", "data=1"))
    assert halves == pytest.approx(whole / 2, rel=0.05)


def test_plans_run_and_those_that_cannot_say_why() -> None:
    fine, wrong = try_plans(WORK, ["data=2 zero=1", "tensor=3"], steps=1)
    assert fine.seconds is not None
    assert fine.seconds > 0
    assert fine.peak is not None
    assert fine.peak > 3 * 4 * preset("gpt-tiny").num_parameters / 2
    assert (wrong.seconds, wrong.peak) == (None, None)
    assert wrong.error

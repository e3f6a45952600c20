"""Checkpoints that DeepSpeed itself has written are imported, and training goes on from them as there."""

from pathlib import Path

import pytest

from tests.train.integrations import packages


@pytest.mark.slow
def test_training_goes_on_from_what_each_stage_of_zero_has_saved(tmp_path: Path) -> None:
    packages.need("deepspeed", "hjson", "cpuinfo", "ninja")
    cases = ("zero1", "zero2", "zero3", "elastic")
    found = packages.run_program("deepspeed_checkpoints.py", *cases, ranks=2, folder=tmp_path)
    for case in cases:
        theirs = found[case].pop("theirs")
        assert found[case].keys() == ({"cut"} if case == "elastic" else {"cut", "universal"})
        for ours in found[case].values():
            assert ours["differ"] == []
            assert ours["losses"] == pytest.approx(theirs, abs=1e-6)
        assert len(set(theirs)) == 3


@pytest.mark.slow
def test_weights_of_16_bits_and_those_without_zero_are_read(tmp_path: Path) -> None:
    packages.need("deepspeed", "hjson", "cpuinfo", "ninja")
    found = packages.run_program("deepspeed_checkpoints.py", "bf16", "plain", ranks=2, folder=tmp_path)
    assert {case: each["cut"]["differ"] for case, each in found.items()} == {"bf16": [], "plain": []}
    assert found["bf16"]["cut"]["losses"] == pytest.approx(found["bf16"]["theirs"], abs=0.05)


@pytest.mark.slow
def test_the_pair_of_the_page_comes_to_the_same_losses() -> None:
    packages.need("deepspeed", "hjson", "cpuinfo", "ninja")
    found = packages.run_program("migrate_pair.py", "deepspeed", ranks=2)
    assert found["ours"] == pytest.approx(found["theirs"], abs=1e-6)
    assert found["theirs"][-1] < found["theirs"][0]

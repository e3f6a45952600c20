"""Workers of Ray Train train under a plan as one device does."""

from pathlib import Path

import pytest

from tests.train.integrations import packages


@pytest.mark.slow
def test_two_workers_train_as_one_device(tmp_path: Path) -> None:
    packages.need("ray", "msgpack")
    losses = packages.run_program("ray_workers.py", "data=2 zero=1", folder=tmp_path)
    assert losses["one device"][-1] < losses["one device"][0]
    for own in losses["workers"]:
        assert own == pytest.approx(losses["one device"], abs=1e-12)

"""Clusters of published runs."""

import pytest

from echelon.errors import UserError
from echelon.planner.validate.machines import cluster_of_row, device_of


@pytest.mark.parametrize(
    ("spelled", "device"),
    [
        ("DGX-GB200", "gb200"), ("GB300-NVL72", "gb300"), ("DGX-B200", "b200"), ("a100_80gb", "a100-80"),
        ("a100_40gb", "a100-40"), ("A100-80GB-SXM (Selene)", "a100-80"), ("H100-96GB-HBM2e 500W", "h100-96"),
        ("H200-141GB-SXM", "h200"), ("V100-16GB-SXM2", "v100"), ("MI355X-288GB", "mi355x"), ("h100", "h100"),
        ("A100-SXM4-40GB", "a100-40"),
        ("GH200-96GB", "gh200"),
        ("A800", "a800"),
        ("A100-80GB? (8/node, inter-node 800Gb/s per node)", "a100-80"),
    ],
)  # fmt: skip
def test_devices_as_tables_spell_them(spelled: str, device: str) -> None:
    assert device_of(spelled) == device


def test_a_device_without_calibration_is_refused() -> None:
    with pytest.raises(UserError, match="TPU"):
        device_of("TPU v4")


def test_the_network_that_a_row_states() -> None:
    row = {"source": "x", "gpu": "A100-80GB (inter-node 800Gb/s per node)", "n_gpus": "64", "note": ""}
    slow = cluster_of_row(row)
    fast = cluster_of_row(row | {"gpu": "A100-80GB with 1600 Gbps node-node interconnect"})
    assert fast.between.bandwidth == pytest.approx(2 * slow.between.bandwidth)
    assert slow.between.bandwidth <= 800e9 / 8 / 8
    assert cluster_of_row(row | {"gpu": "V100", "note": "2 nodes x 4 V100"}).per_node == 4
    assert cluster_of_row(row | {"gpu": "GB200-NVL72", "note": "18 nodes x 4"}).per_node == 72

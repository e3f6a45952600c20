"""Clusters by name, and from files."""

from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.planner.cluster.cluster import Link
from echelon.planner.cluster.read import calibration, device_names, read_cluster


@pytest.mark.parametrize("name", device_names())
def test_every_calibration_makes_a_cluster_within_its_wires(name: str) -> None:
    cluster = read_cluster(f"{name}:16")
    assert cluster.count == 16
    assert 0.3 < cluster.device.matrix < 0.95
    table = calibration(name)
    for link in ("inside", "between"):
        assert 0 < table[link]["bandwidth"] <= table[link]["wire"], link


def test_the_devices_of_the_issue_are_here() -> None:
    assert {"v100", "a100-40", "a100-80", "h100", "h200", "b200", "gb200"} <= set(device_names())


def test_a_name_and_a_number_that_are_wrong_are_one_error_each() -> None:
    with pytest.raises(UserError) as refusal:
        read_cluster("h10:0")
    assert len(refusal.value.errors) == 2
    assert "did you mean 'h100'" in str(refusal.value)


@pytest.mark.parametrize("digits", ["-1", "1e3", "99999999999", "٣", "8 "])
def test_a_number_of_devices_is_digits(digits: str) -> None:
    with pytest.raises(UserError, match="integer"):
        read_cluster(f"h100:{digits}")


def test_a_file_may_start_from_a_device(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text('like = "h100"\ncount = 64\nprice = 2.5\n[between]\nbandwidth = 25e9\nlatency = 1e-5\n')
    cluster = read_cluster(str(file))
    assert (cluster.device.name, cluster.count, cluster.price) == ("ours", 64, 2.5)
    assert cluster.between == Link(25e9, 1e-5)
    assert cluster.device.cores == read_cluster("h100").device.cores


def test_a_file_lists_all_of_its_errors(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('like = "h100"\nmemory = -1\ncolour = "red"\n[between]\nbandwidth = "fast"\n')
    with pytest.raises(UserError) as refusal:
        read_cluster(str(file))
    errors = "\n".join(refusal.value.errors)
    assert "memory=-1" in errors
    assert "colour" in errors
    assert "between.bandwidth='fast'" in errors


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("memory = = 1")
    for name in ("none.toml", "bad.toml"):
        with pytest.raises(UserError, match="cannot be read"):
            read_cluster(str(tmp_path / name))
    (tmp_path / "like.toml").write_text('like = "h1000"')
    with pytest.raises(UserError, match="is not a device"):
        read_cluster(str(tmp_path / "like.toml"))

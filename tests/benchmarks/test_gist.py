"""The benches of Gist work on a CPU too, where their times mean nothing."""

import pytest

from benchmarks import gist, gist_accuracy


@pytest.mark.slow
def test_a_network_is_compared_with_torch() -> None:
    settings, rows = gist.bench(quick=True, only="vgg16")
    formats = ["none", "gist", "gist-fp16", "gist-fp8"]
    replayed = [f"{each} graphs=auto" for each in formats]
    assert [row.contender for row in rows] == ["torch", *formats, *replayed]
    smaller = [row.extras["times_smaller"] for row in rows]
    assert smaller[5:] == smaller[1:5]
    smaller = smaller[:5]
    assert smaller[:2] == pytest.approx([1, 1], rel=0.02)  # the loss is counted alike
    assert smaller[2:] == sorted(smaller[2:])
    assert smaller[2] > 1.2
    assert settings["precision"]["vgg16"] == "fp32"


def test_a_transformer_is_compared_with_none() -> None:
    _, rows = gist.bench(quick=True, only="GPT-2 124M, gist-fp8")
    assert [row.contender for row in rows] == ["none", "gist-fp8"]
    assert rows[1].extras["times_smaller"] > 1.5


def test_accuracy_by_format() -> None:
    """What is kept without loss trains the weights of none: the bench would raise."""
    _, rows = gist_accuracy.bench(quick=True)
    assert [row.contender for row in rows] == ["none", "gist", "gist-fp16", "gist-fp8"]
    assert all(0 <= row.extras["lowest"] <= row.extras["accuracy"] <= 1 for row in rows)
    assert rows[1].extras["to_none_points"] == 0


def test_a_loss_where_none_may_be_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gist_accuracy, "_LOSSLESS", "gist-fp8")
    with pytest.raises(RuntimeError, match="compress=gist-fp8 trained other weights than compress=none"):
        gist_accuracy.bench(quick=True, only="gist-fp8")

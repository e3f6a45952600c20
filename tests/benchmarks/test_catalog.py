import pytest

from benchmarks import benches, run, runnable
from echelon.errors import UserError


def test_every_bench_says_what_it_measures() -> None:
    expected = [
        "launch",
        "collectives",
        "step",
        "data-parallel",
        "pipeline",
        "tensor",
        "start",
        "checkpoint",
        "memory",
        "one-gpu",
        "short-steps",
        "kernels",
        "recompute",
        "optimizer-step",
        "selective-costs",
        "charts",
        "moe-dense",
        "largest-model",
        "gist",
        "gist-accuracy",
        "offload-optimizer",
        "offload-activations",
        "moe-layer",
    ]
    assert list(benches()) == expected
    assert all(bench.__doc__ for bench in benches().values())


def test_an_unknown_bench_is_refused_with_a_hint() -> None:
    with pytest.raises(UserError, match="did you mean 'step'"):
        run("setp")


@pytest.mark.slow
def test_a_result_names_the_command_that_makes_it_again() -> None:
    result = run("collectives", quick=True)

    assert (result.name, result.command) == ("collectives", "python -m benchmarks collectives --quick")
    assert result.settings["rounds"] == 3
    assert "src/echelon/collectives" in result.sources
    assert len(result.rows) == 8


def test_a_bench_of_gpus_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "one-gpu" not in runnable(quick=False)
    assert "one-gpu" in runnable(quick=True)
    with pytest.raises(
        UserError, match="bench one-gpu measures a GPU, and torch sees none here; add --quick"
    ):
        run("one-gpu")

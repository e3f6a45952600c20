import os
import time
from collections.abc import Callable

import pytest
import torch
from benchmarks.harness import alternate, measuring_ranks, timed


def test_contenders_take_turns_and_each_round_starts_one_further() -> None:
    order: list[str] = []

    def contender(name: str) -> Callable[[], float]:
        return lambda: order.append(name) or 1.0  # type: ignore[func-returns-value]

    alternate({name: contender(name) for name in "abc"}, rounds=4, warmup=0)

    assert "".join(order) == "abcbcacababc"


def test_warm_up_rounds_run_and_do_not_count() -> None:
    seconds = iter([9.0, 8.0, 1.0, 2.0, 3.0])
    assert alternate({"a": lambda: next(seconds)}, rounds=3, warmup=2) == {"a": [1.0, 2.0, 3.0]}


def test_what_comes_before_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    contender = timed(lambda: pass_time(2.0), before=lambda: pass_time(100.0))

    assert contender() == 2.0
    assert now == 102.0


def gpus_shown() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.slow_cases("0-7", "8-7")
@pytest.mark.parametrize(("gpus", "shown"), [(0, "7"), (1, ""), (2, "7"), (8, "7")])
def test_ranks_do_not_share_a_gpu(gpus: int, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with measuring_ranks(2) as ranks:
        assert ranks.run(gpus_shown) == [shown] * 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"

"""The same plan goes on as if it had never stopped, in every bit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.launching import Ranks, launch
from tests.state.checkpoint.same_plan import OPTIMIZERS, Training, differences

WarmRanks = Callable[[int], Ranks]

FEW = [
    Training("data=2 zero=1 precision=bf16"),
    Training("data=2 precision=fp16 offload=optimizer"),
]
ONE_RANK = [
    *(Training("precision=fp32", name) for name in OPTIMIZERS),
    Training("precision=bf16"),
    Training("precision=fp16"),
    Training("precision=bf16 offload=optimizer"),
    Training("precision=bf16 offload=optimizer delay=1"),
    Training("precision=bf16 masters=false offload=optimizer"),
    Training("precision=bf16 offload=parameters"),
    Training("precision=bf16 offload=optimizer,parameters"),
    Training("precision=bf16 offload=optimizer,parameters,activations delay=1"),
    Training("precision=fp32 offload=optimizer", "adagrad"),
    Training("precision=fp32 update=backward"),
    Training("precision=bf16 update=backward offload=optimizer"),
]
TWO_RANKS = [
    Training("data=2 zero=2 precision=bf16 masters=false", "sgd"),
    Training("pipeline=2 microbatches=2 precision=fp32", "muon"),
    *(Training("data=2 zero=1 precision=fp32", name) for name in OPTIMIZERS),
    *(Training("data=2 zero=3 precision=bf16", name) for name in ("adamw", "adafactor", "sm3", "muon")),
    Training("data=2 zero=3 precision=bf16 masters=false"),
    Training("data=2 zero=2 precision=fp16"),
    Training("tensor=2 precision=bf16", "muon"),
    Training("tensor=2 sequence=true precision=bf16"),
    Training("data=2 zero=3 offload=optimizer,parameters precision=bf16"),
    Training("data=2 zero=1 offload=optimizer delay=1 precision=fp32"),
    Training("data=2 update=backward precision=bf16"),
    Training("data=2 zero=3 update=backward precision=fp32"),
    Training("data=2 sync=parameter-server precision=bf16"),
    Training("pipeline=2 schedule=pipedream microbatches=2 precision=fp32"),
    Training("pipeline=2 schedule=pipedream-2bw microbatches=2 precision=bf16"),
    Training("pipeline=2 schedule=pipedream-vertical microbatches=2 precision=fp32"),
    Training("pipeline=2 schedule=pipedream microbatches=2 precision=bf16 masters=false"),
    *(Training("data=2 expert=2 precision=fp32", gate=gate) for gate in ("sigmoid", "crowded")),
    Training("data=2 expert=2 zero=2 precision=fp32", "muon", "sigmoid"),
    Training("context=2 precision=bf16"),
]
FOUR_RANKS = [
    Training("data=4 precision=fp32"),
    Training("data=4 zero=2 shard=2 precision=bf16"),
    Training("data=4 zero=3 precision=bf16"),
    Training("data=2 tensor=2 precision=bf16"),
    Training("data=2 pipeline=2 microbatches=2 precision=bf16"),
    Training("pipeline=3-1 microbatches=3 precision=bf16"),
    Training("data=4 expert=2 precision=fp32", gate="crowded"),
]
ASYNC = [
    Training("data=2 sync=async staleness=0 precision=fp32"),
    Training("data=2 sync=async staleness=0 precision=bf16", "sgd"),
    Training("data=2 sync=async staleness=0 precision=fp16"),
]


def check(ranks: Ranks, trainings: list[Training], folder: Path) -> None:
    for found in ranks.run(differences, trainings, str(folder)):
        assert len(found) == len(trainings)
        assert not any(found.values()), {name: differing for name, differing in found.items() if differing}


def test_low_precisions_and_offload_go_on_in_every_bit(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    check(warm_ranks(2), FEW, tmp_path)


@pytest.mark.slow
def test_one_rank_goes_on_in_every_bit(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    check(warm_ranks(1), ONE_RANK, tmp_path)


@pytest.mark.slow
def test_two_ranks_go_on_in_every_bit(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    check(warm_ranks(2), TWO_RANKS, tmp_path)


@pytest.mark.slow
def test_four_ranks_go_on_in_every_bit(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    check(warm_ranks(4), FOUR_RANKS, tmp_path)


@pytest.mark.slow
def test_workers_that_update_in_rounds_go_on_in_every_bit(tmp_path: Path) -> None:
    for found in launch(differences, 2, ASYNC, str(tmp_path), deadline=300.0):
        assert not any(found.values()), found

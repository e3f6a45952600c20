from collections.abc import Callable

import pytest
import torch.distributed as dist
from benchmarks.replicas import Peer

from benchmarks import replicas
from echelon.launching import Ranks
from echelon.models import ModelConfig
from echelon.train.rehearsal import make_batch

CONFIG = ModelConfig("gpt", layers=2, width=16, heads=2, vocab=32, sequence=8, tied=True)
INSTALLED = [peer for peer in replicas.peers() if peer.installed]


def train(peer: Peer | None, level: int) -> list[float]:
    """Runs in a rank: losses of a peer, or of echelon."""
    batch = make_batch(CONFIG, 2, seed=dist.get_rank())
    if peer is None:
        with replicas.make_engine(CONFIG, level) as engine:
            return [engine.step(batch).loss for _ in range(5)]
    step = peer.make_step(CONFIG)
    return [step(batch) for _ in range(5)]


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("torch FSDP2, kept", "torch ZeRO-1")
@pytest.mark.parametrize("peer", INSTALLED, ids=lambda peer: peer.name)
def test_peers_do_the_same_training(peer: Peer, warm_ranks: Callable[[int], Ranks]) -> None:
    echelon_losses, same = warm_ranks(2).run(train, None, peer.level)
    peer_losses = zip(*warm_ranks(2).run(train, peer, peer.level), strict=True)

    assert echelon_losses == same
    assert echelon_losses == pytest.approx([sum(losses) / 2 for losses in peer_losses], rel=1e-4)
    assert echelon_losses == sorted(echelon_losses, reverse=True)


def train_alone() -> list[float]:
    """Runs in a rank."""
    step, batch = replicas.compute_only_step(CONFIG), make_batch(CONFIG, 2, seed=dist.get_rank())
    return [step(batch) for _ in range(5)]


def test_without_exchange_ranks_learn_only_their_own_samples(warm_ranks: Callable[[int], Ranks]) -> None:
    one, other = warm_ranks(2).run(train_alone)
    together, _ = warm_ranks(2).run(train, None, 0)

    assert one[0] != other[0]
    assert together[0] == pytest.approx((one[0] + other[0]) / 2, rel=1e-5)
    assert together[-1] > max(one[-1], other[-1])


def test_every_level_has_a_peer_of_torch_and_zero_one_of_deepspeed() -> None:
    levels = {(peer.package, peer.level) for peer in replicas.peers()}
    assert levels == {("torch", level) for level in range(4)} | {("deepspeed", level) for level in (1, 2, 3)}


def test_a_package_that_is_missing_is_not_installed() -> None:
    [ddp, *_] = replicas.peers()
    assert ddp.installed
    assert not ddp._replace(package="no_such_package").installed

"""Ranks of torchrun: two machines are two agents, on loopback or in two network namespaces."""

import copy
import operator
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from echelon.errors import UserError
from echelon.launching import Ranks, RemoteResult, join, launch
from echelon.launching import torchrun as torchrun_module
from tests.launching import tasks
from tests.ports import free_port

SCRIPT = Path(__file__).parent / "scripts" / "under_torchrun.py"
NODES = 2
RANKS = 4


def test_in_a_plain_script_there_is_nothing_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    join()
    assert not dist.is_initialized()


def test_an_environment_with_gaps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError) as caught:
        join()
    assert [error.split()[0] for error in caught.value.errors] == ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


def test_the_number_of_ranks_must_be_that_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"launch\(ranks=3\) runs under torchrun with WORLD_SIZE=4"):
        launch(tasks.rank, 3)


@pytest.mark.slow
def test_two_agents_on_loopback(tmp_path: Path) -> None:
    run_agents(tmp_path, "127.0.0.1", prefixes=[[], []], interface="lo")
    assert len(networks(tmp_path)) == 1


@pytest.mark.slow
def test_two_machines_with_networks_of_their_own(tmp_path: Path, two_networks: list[list[str]]) -> None:
    run_agents(tmp_path, "10.213.77.1", prefixes=two_networks, interface="veth0")
    assert len(networks(tmp_path)) == 2


def networks(folder: Path) -> set[str]:
    """Check which results of both launches each rank has; return the networks they ran in."""
    networks = set()
    for rank in range(RANKS):
        launches = torch.load(folder / f"results-{rank}.pt")
        for total, results in zip((10.0, 100.0), launches, strict=True):
            assert set(results) == (set(range(RANKS)) if rank == 0 else {0, rank})
            for source, (name, network, totals) in results.items():
                assert (name, totals.tolist()) == (source, [total] * (source + 1))
                networks.add(network)
    return networks


def test_rank_0_has_all_results_and_others_their_own_and_its(warm_ranks: Callable[[int], Ranks]) -> None:
    values = [{"loss": 0.5}, (1, 2), None]
    first, second, third = warm_ranks(3).run(tasks.share, values)
    assert first == values
    assert second[:2] == values[:2]
    assert [type(second[2]), second[2].rank] == [RemoteResult, 2]
    assert [third[0], third[2]] == [values[0], None]
    assert [type(third[1]), third[1].rank] == [RemoteResult, 1]


def test_a_result_that_cannot_be_sent_is_an_error_on_every_rank(warm_ranks: Callable[[int], Ranks]) -> None:
    """The others would wait for it forever."""
    first, second, third = warm_ranks(3).run(tasks.share_something_stubborn, 1)
    assert second.startswith(
        "TypeError: the result['runs'][2] is of type NotForSending, which cannot be sent"
    )
    reason = second.removeprefix("TypeError: ")
    assert first == third == f"UserError: 1 error in the results:\n  - rank 1: {reason}"


def test_an_answer_that_cannot_be_sent_is_an_error_on_every_rank(
    warm_ranks: Callable[[int], Ranks],
) -> None:
    """The others would wait for it, for 24 days."""
    first, second = warm_ranks(2).run(tasks.ask_something_stubborn)
    assert first.startswith("TypeError: the result is of type NotForSending, which cannot be sent")
    assert second == f"PeerLost: rank 0 raised {first}"


def test_the_environment_is_set_before_the_group_is_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("NCCL_HOSTID", "before")  # is restored after the test
    hosts = []
    monkeypatch.setattr(torchrun_module, "join", lambda *_: hosts.append(os.environ["NCCL_HOSTID"]))
    monkeypatch.setattr(torchrun_module, "share_results", lambda value: [value])
    assert launch(os.getpid, 2, environment=lambda rank: {"NCCL_HOSTID": f"host {rank}"}) == [os.getpid()]
    assert hosts == ["host 1"]


def run_agents(folder: Path, master: str, prefixes: Sequence[list[str]], interface: str) -> None:
    """One torchrun agent with 2 ranks on each machine; fails with what the agents printed."""
    port = free_port()
    agents = [
        subprocess.Popen(
            [*prefix, *torchrun(node, master, port), str(SCRIPT), str(RANKS), str(folder)],
            env=os.environ | {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, prefix in enumerate(prefixes)
    ]
    try:
        printed = [agent.communicate(timeout=300)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # an agent ends its ranks then
            agent.wait()
            assert agent.stdout is not None
            agent.stdout.close()  # open still after a timeout; a later test would be blamed
    assert [agent.returncode for agent in agents] == [0] * NODES, "\n".join(printed)
    assert "Warning" not in "".join(printed)


def torchrun(node: int, master: str, port: int) -> list[str]:
    options = {"nnodes": NODES, "nproc-per-node": RANKS // NODES, "node-rank": node}
    options |= {"master-addr": master, "master-port": port}
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "torch.distributed.run", *flags]


@pytest.fixture
def two_networks() -> Iterator[list[list[str]]]:
    """Two network namespaces joined by a virtual cable; gives the commands that run something in each."""
    names = [f"echelon-{os.getpid()}-{node}" for node in range(NODES)]
    if os.geteuid() != 0 or not ip("netns", "add", names[0]):
        pytest.skip("network namespaces need root and iproute2")
    try:
        is_connected = ip("netns", "add", names[1]) and ip(
            *("link", "add", "veth0", "netns", names[0], "type", "veth"),
            *("peer", "name", "veth0", "netns", names[1]),
        )
        for node, name in enumerate(names):
            is_connected = is_connected and ip(
                "-n", name, "addr", "add", f"10.213.77.{node + 1}/24", "dev", "veth0"
            )
            is_connected = is_connected and ip("-n", name, "link", "set", "veth0", "up")
            is_connected = is_connected and ip("-n", name, "link", "set", "lo", "up")
        if not is_connected:
            pytest.skip("this machine makes no virtual cables")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            ip("netns", "delete", name)


def ip(*words: str) -> bool:
    """Whether iproute2 could do it."""
    tool = shutil.which("ip")
    return (
        tool is not None and subprocess.run([tool, *words], capture_output=True, check=False).returncode == 0
    )


USES: dict[str, Callable[[Any], object]] = {
    "truth": bool,
    "equal": lambda remote: remote == RemoteResult(2),
    "not equal": lambda remote: remote != 1,
    "less": lambda remote: remote < 1.0,
    "the largest": lambda remote: max(0.5, remote),
    "index": lambda remote: remote[0],
    "key": lambda remote: remote["loss"],
    "as an index": lambda remote: [1, 2, 3][remote],
    "loop": list,
    "unpack": lambda remote: [*remote],
    "membership": lambda remote: 1 in remote,
    "in a list": lambda remote: remote in [1],
    "length": len,
    "hash": lambda remote: {remote: 1},
    "float": float,
    "int": int,
    "sum": lambda remote: sum([remote]),
    "product": lambda remote: remote * 2,
    "negative": operator.neg,
    "call": lambda remote: remote(),
    "format": lambda remote: f"{remote:.3f}",
    "numpy scalar": lambda remote: np.float64(1.0) + remote,
    "numpy array": lambda remote: np.ones(2) * remote,
    "to numpy": np.asarray,
    "tensor": lambda remote: torch.ones(2) + remote,
    "to a tensor": torch.tensor,
}


@pytest.mark.parametrize("use", USES)
def test_every_use_says_which_ranks_have_the_result(use: str) -> None:
    with pytest.raises(UserError, match=r"only rank 0 and rank 2 have it: use it on rank 0 \(if torch"):
        USES[use](RemoteResult(2))


def test_an_attribute_says_it_too() -> None:
    with pytest.raises(AttributeError, match=r"only rank 0 and rank 2 have it: .* \(asked for \.loss\)"):
        _ = RemoteResult(2).loss
    assert not hasattr(RemoteResult(2), "loss")


def test_it_can_be_printed_and_copied() -> None:
    text = "<the result of rank 2: not on this rank>"
    assert repr([RemoteResult(2)]) == f"[{text}]"
    for copied in (copy.copy(RemoteResult(2)), pickle.loads(pickle.dumps(RemoteResult(2)))):
        assert f"{copied}" == text

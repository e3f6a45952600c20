from collections.abc import Sequence

import pytest

from echelon.errors import UserError
from echelon.launching.placement import Placement, RankReport, check_devices, place


def report(host: str, gpus: str = "", local_rank: int | None = None) -> RankReport:
    """`gpus` names each visible GPU by a letter."""
    return RankReport(host, f"id of {host}", local_rank, tuple(gpus))


def host(name: str, ranks: int, gpus: str = "") -> list[RankReport]:
    return [report(name, gpus, local_rank) for local_rank in range(ranks)]


@pytest.mark.parametrize(
    ("reports", "backend", "devices"),
    [
        pytest.param(host("a", 2), "gloo", [None, None], id="no GPUs"),
        pytest.param(host("a", 2, "xy"), "nccl", [0, 1], id="a GPU for each rank"),
        pytest.param(host("a", 2, "xyz"), "nccl", [0, 1], id="more GPUs than ranks"),
        pytest.param(host("a", 1, "x"), "nccl", [0], id="one rank"),
        pytest.param(host("a", 2, "xy") + host("b", 2, "xy"), "nccl", [0, 1, 0, 1], id="two hosts"),
        pytest.param(
            [report("a", gpu, local_rank) for local_rank, gpu in enumerate("xyz")],
            "nccl",
            [0, 0, 0],
            id="one visible GPU per rank",
        ),
        pytest.param([report("a", "xy")] * 2, "nccl", [0, 1], id="no launcher numbers the ranks"),
        pytest.param(
            [report("a", "xy"), report("b", "xy"), report("a", "xy"), report("b", "xy")],
            "nccl",
            [0, 0, 1, 1],
            id="ranks of two hosts in turn, without numbers",
        ),
        pytest.param(
            [report("rank 0", "x", 0), report("rank 1", "x", 0)], "nccl", [0, 0], id="an NCCL_HOSTID per rank"
        ),
        pytest.param(host("a", 3, "xy"), "gloo", [0, 1, 0], id="ranks share GPUs"),
        pytest.param([report("a", "xy", 0)] * 2, "gloo", [0, 0], id="LOCAL_RANK is 0 everywhere"),
    ],
)
def test_nccl_only_if_every_rank_has_a_gpu_of_its_own(
    reports: Sequence[RankReport], backend: str, devices: list[int | None]
) -> None:
    placement = place(reports, None)
    assert (placement.backend, placement.devices) == (backend, devices)


def test_only_ranks_that_share_gpus_are_told_so() -> None:
    assert place(host("a", 2, "xy"), None).note == ""
    assert place(host("a", 2), None).note == ""
    assert place(host("a", 3, "xy"), None).note == (
        "3 ranks share 2 GPUs on host a, so they use Gloo, which is much slower than NCCL. "
        "Start one rank per GPU, or accept it with backend='gloo'."
    )
    assert "6 ranks share 3 GPUs on 2 hosts" in place(host("a", 2, "x") + host("b", 4, "xy"), None).note


def test_ranks_that_share_although_there_are_enough_gpus_are_told_why() -> None:
    reports = [report("a", "xy", 0)] * 2  # a launcher that sets LOCAL_RANK to 0 everywhere
    assert place(reports, None).note == (
        "2 ranks share 1 GPU on host a, so they use Gloo, which is much slower than NCCL. Number the ranks "
        "of a host from 0 (LOCAL_RANK) and let them see all its GPUs, or accept it with backend='gloo'."
    )
    with pytest.raises(UserError, match=r"Number the ranks of a host .*, or use backend='gloo'") as caught:
        place(reports, "nccl")
    assert caught.value.errors == ("host a (ranks 0, 1): 2 GPUs, of which the ranks use 1",)


@pytest.mark.parametrize(
    ("reports", "lines"),
    [
        pytest.param(
            host("a", 2, "xy") + host("b", 2),
            ["host a (ranks 0, 1): 2 GPUs, each rank has its own", "host b (ranks 2, 3): no GPU"],
            id="one host has none",
        ),
        pytest.param(
            host("a", 3, "xyz") + host("b", 3, "xy"),
            [
                "host a (ranks 0 to 2): 3 GPUs, each rank has its own",
                "host b (ranks 3 to 5): 2 GPUs, which ranks share",
            ],
            id="one host has too few",
        ),
    ],
)
def test_hosts_that_differ_are_refused(reports: list[RankReport], lines: list[str]) -> None:
    with pytest.raises(UserError, match=r"^The hosts of this job differ.* on every host.*'gloo':") as caught:
        place(reports, None)
    assert list(caught.value.errors) == lines
    assert place(reports, "gloo").backend == "gloo"


@pytest.mark.parametrize(
    ("gpus", "line"),
    [
        (["x", ""], "host a (ranks 0, 1): 1 GPU, which rank 1 does not see"),
        (["xy", "", "xy", ""], "host a (ranks 0 to 3): 2 GPUs, which ranks 1, 3 do not see"),
    ],
)
def test_on_one_host_it_is_the_ranks_that_differ(gpus: list[str], line: str) -> None:
    reports = [report("a", visible, local_rank) for local_rank, visible in enumerate(gpus)]
    with pytest.raises(UserError, match=r"^The ranks of a host differ: .* or use backend='gloo':") as caught:
        place(reports, None)
    assert "hosts" not in str(caught.value)
    assert caught.value.errors == (line,)
    assert place(reports, "gloo").backend == "gloo"


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_that_is_asked_for_needs_a_gpu_for_every_rank(backend: str) -> None:
    assert place(host("a", 2, "xy"), backend) == Placement(backend, [0, 1])
    for gpus in ("", "x"):
        with pytest.raises(UserError, match=f"backend='{backend}' needs a GPU for every rank"):
            place(host("a", 2, gpus), backend)
    with pytest.raises(UserError, match=r"Use backend='gloo', or let the ranks see GPUs"):
        place(host("a", 2), backend)


@pytest.mark.parametrize(
    "reports",
    [
        pytest.param([report("a", "x", 0), report("a", "", 1)], id="a rank of the host"),
        pytest.param(host("a", 2, "xy") + host("b", 2), id="a host"),
        pytest.param(host("a", 3, "xy") + host("b", 2), id="a host, and others share"),
    ],
)
def test_nccl_where_some_see_no_gpu_says_to_show_them_one(reports: list[RankReport]) -> None:
    """It said to start one rank per GPU, also if the host had as many GPUs as ranks."""
    with pytest.raises(UserError, match=r"Let every rank see a GPU of its own \(CUDA_VISIBLE_DEVICES\), or"):
        place(reports, "nccl")


def test_a_backend_that_is_asked_for_is_kept_without_a_word() -> None:
    assert place(host("a", 3, "xy"), "gloo") == Placement("gloo", [0, 1, 0])
    assert place(host("a", 2, "xy"), "gloo") == Placement("gloo", [0, 1])
    assert place(host("a", 2), "ucc") == Placement("ucc", [None, None])


def test_two_ranks_of_a_host_on_one_gpu_are_refused_in_a_group_of_the_user() -> None:
    check_devices([report("a", "x"), report("a", "y"), report("b", "x")])
    with pytest.raises(UserError, match=r"set_device\(int\(os.environ\[\"LOCAL_RANK\"\]\)\)") as caught:
        check_devices([report("a", "x"), report("a", "x"), report("b", "x")])
    assert caught.value.errors == (
        "host a (ranks 0, 1): 1 GPU, which ranks share",
        "host b (rank 2): 1 GPU, each rank has its own",
    )
    with pytest.raises(UserError, match="no GPU"):
        check_devices([report("a", "x"), report("b")])

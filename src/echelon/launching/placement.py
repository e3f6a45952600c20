"""Choose the GPU of each rank and how the ranks communicate: a pure function of what every rank reports.

`group.py` makes the reports, `store_agreement.py` brings them to rank 0 and the decision to every rank.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from echelon.errors import UserError
from echelon.quantities import counted


class RankReport(NamedTuple):
    """The facts that one rank knows of its host. They are sent as JSON."""

    host: str  # the name to show
    host_id: str  # ranks with the same one are on one host, as NCCL sees it
    local_rank: int | None  # the number that the launcher gave this rank on its host
    gpus: Sequence[str]  # identities of the GPUs that this rank sees, in CUDA's order


class Placement(NamedTuple):
    """The decision for all ranks. `devices[r]` is the CUDA device of rank r, or None."""

    backend: str
    devices: Sequence[int | None]
    note: str = ""  # what rank 0 tells the user

    @property
    def uses_nccl(self) -> bool:
        return "nccl" in self.backend  # also in 'cpu:gloo,cuda:nccl'


class _Host(NamedTuple):
    name: str
    ranks: list[int]
    num_gpus: int  # that any of its ranks sees
    used: list[str | None]  # the GPU of each rank

    @property
    def gpu_use(self) -> str:
        """'none': no rank has a GPU; 'own': each has its own; 'shared'; 'some': only some have one."""
        used = self.used
        if None in used:
            return "none" if set(used) == {None} else "some"
        return "own" if len(set(used)) == len(used) else "shared"

    @property
    def num_used(self) -> int:
        return len(set(self.used) - {None})

    @property
    def blind_ranks(self) -> list[int]:
        return [rank for rank, gpu in zip(self.ranks, self.used, strict=True) if gpu is None]


def place(reports: Sequence[RankReport], backend: str | None) -> Placement:
    """NCCL if every rank has a GPU of its own, else Gloo; a `backend` that is given is kept.

    Raises UserError where only some ranks have a GPU of their own; if NCCL is asked for, where not all have.
    """
    devices: list[int | None] = []
    counts: Counter[str] = Counter()
    for report in reports:  # numbered on its host by its launcher; else the ranks of a host are counted
        local_rank = counts[report.host_id] if report.local_rank is None else report.local_rank
        counts[report.host_id] += 1
        devices.append(local_rank % len(report.gpus) if report.gpus else None)
    hosts = _hosts(reports, devices)
    uses = {host.gpu_use for host in hosts}
    if backend is not None:
        placement = Placement(backend, devices)
        if placement.uses_nccl and uses != {"own"}:
            raise UserError(f"backend={backend!r} {_NCCL_RULE} {_nccl_fix(hosts)}:", _describe(hosts))
        return placement
    if uses == {"none"}:
        return Placement("gloo", devices)
    if uses == {"own"}:
        return Placement("nccl", devices)
    if uses == {"shared"}:
        ranks, gpus = len(reports), sum(host.num_used for host in hosts)
        where = f"host {hosts[0].name}" if len(hosts) == 1 else f"{len(hosts)} hosts"
        note = (
            f"{counted(ranks, 'rank')} share {counted(gpus, 'GPU')} on {where}, so they use Gloo, which is "
            f"much slower than NCCL. {_sharing_fix(hosts)}, or accept it with backend='gloo'."
        )
        return Placement("gloo", devices, note)
    raise UserError(f"{_difference(hosts)}, or use backend='gloo':", _describe(hosts))


def check_devices(reports: Sequence[RankReport]) -> None:
    """Check a group that the user initialised with NCCL; `gpus` holds the current device of each rank."""
    hosts = _hosts(reports, [0 if report.gpus else None for report in reports])
    if {host.gpu_use for host in hosts} != {"own"}:
        raise UserError(
            f"The process group uses NCCL, which {_NCCL_RULE} Call "
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group and start one '
            "rank per GPU, or initialise the group with backend='gloo':",
            _describe(hosts),
        )


def _hosts(reports: Sequence[RankReport], devices: Sequence[int | None]) -> list[_Host]:
    ranks_of: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        ranks_of.setdefault(report.host_id, []).append(rank)
    return [
        _Host(
            reports[ranks[0]].host,
            ranks,
            len({gpu for rank in ranks for gpu in reports[rank].gpus}),
            [None if (device := devices[rank]) is None else reports[rank].gpus[device] for rank in ranks],
        )
        for ranks in ranks_of.values()
    ]


_NCCL_RULE = "needs a GPU for every rank that no other rank uses."
_NUMBERING = "Number the ranks of a host from 0 (LOCAL_RANK) and let them see all its GPUs"


def _nccl_fix(hosts: Sequence[_Host]) -> str:
    if all(host.gpu_use == "none" for host in hosts):
        return "Use backend='gloo', or let the ranks see GPUs (CUDA_VISIBLE_DEVICES)"
    if any(None in host.used for host in hosts):
        return "Let every rank see a GPU of its own (CUDA_VISIBLE_DEVICES), or use backend='gloo'"
    return f"{_sharing_fix(hosts)}, or use backend='gloo'"


def _difference(hosts: Sequence[_Host]) -> str:
    """Return the rule that is broken where only some ranks have a GPU of their own, and the fix."""
    rule = "either every rank must have a GPU of its own, or no rank may have one."
    hide = "or hide the GPUs from all ranks (CUDA_VISIBLE_DEVICES='')"
    if any(host.gpu_use == "some" for host in hosts):
        return f"The ranks of a host differ: {rule} Let every rank see a GPU (CUDA_VISIBLE_DEVICES), {hide}"
    return f"The hosts of this job differ: {rule} Start one rank per GPU on every host, {hide}"


def _describe(hosts: Sequence[_Host]) -> list[str]:
    return [f"host {host.name} ({_name_ranks(host.ranks)}): {_describe_gpus(host)}" for host in hosts]


def _describe_gpus(host: _Host) -> str:
    gpus = counted(host.num_gpus, "GPU")
    match host.gpu_use:
        case "none":
            return "no GPU"
        case "own":
            return f"{gpus}, each rank has its own"
        case "some":
            do_not = "does not" if len(host.blind_ranks) == 1 else "do not"
            return f"{gpus}, which {_name_ranks(host.blind_ranks)} {do_not} see"
        case _ if host.num_used < host.num_gpus:
            return f"{gpus}, of which the ranks use {host.num_used}"
        case _:
            return f"{gpus}, which ranks share"


def _sharing_fix(hosts: Sequence[_Host]) -> str:
    """Return what gives every rank a GPU of its own."""
    sharing = [host for host in hosts if host.gpu_use == "shared"]
    if sharing and all(len(host.ranks) <= host.num_gpus for host in sharing):
        return _NUMBERING
    return "Start one rank per GPU"


def _name_ranks(ranks: Sequence[int]) -> str:
    """'rank 3', 'ranks 0 to 3' or 'ranks 0, 2, 5'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(str(rank) for rank in ranks)

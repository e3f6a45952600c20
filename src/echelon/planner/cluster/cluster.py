"""Devices, links and clusters as plain data. All rates are per device: bytes or operations per second.

A ring over several nodes crosses each boundary over the network cards of all its devices there, so a group
with g devices in a node has g times the rate of one card: see `Cluster.link`.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from echelon.errors import UserError, raise_errors


@dataclass(frozen=True)
class Device:
    """What a device can do: published figures, and the shares of them that kernels reach (fitted).

    flops            operations per second by type, dense
    matrix           share of `flops` that large products reach
    matrix_knee      length of each side at which a product reaches about half of that
    fp8, fp4         shares of these again, of narrow products
    attention        share of `flops` that fused attention reaches, forward; backward is slower
    stream           share of `bandwidth` that kernels reach which only read and write
    launch           seconds of a kernel that has nothing to do
    kernels          share of `stream` that kernels between products reach
    update           share of `stream` that the optimizer's update reaches
    host_pace        seconds in which its host issues kernels, as a multiple of those of an A100's host
    host_layer       seconds of a pass through a layer in which a processor issues kernels, and no more
    host_update      the same of a layer's update
    reserve          bytes that are always taken: a context, and what NCCL allocates
    """

    name: str
    memory: float
    bandwidth: float
    flops: dict[str, float]
    cores: int
    matrix: float = 0.75
    matrix_knee: float = 64.0
    fp8: float = 0.8
    fp4: float = 0.7
    attention: float = 0.5
    stream: float = 0.8
    launch: float = 5e-6
    kernels: float = 1.0
    update: float = 1.0
    host_pace: float = 1.0
    host_layer: float = 0.0
    host_update: float = 0.0
    reserve: float = 1.5e9

    def rate(self, precision: str) -> float:
        """Operations per second of this type; the widest that is there for a type that is not."""
        if precision not in self.flops:
            raise UserError(f"device '{self.name}' has no figure for precision={precision}")
        return self.flops[precision]

    def __hash__(self) -> int:
        return hash(self.name)


class Link(NamedTuple):
    """Bytes per second and direction that messages reach, and seconds before the first byte arrives."""

    bandwidth: float
    latency: float

    def seconds(self, size: float, messages: float = 1.0) -> float:
        return messages * self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """`count` devices in nodes of `per_node`. `host` is the link of a device to the memory of its host.

    stragglers: share by which a step takes longer each time the number of nodes doubles.
    """

    device: Device
    count: int
    per_node: int
    inside: Link
    between: Link
    host: Link
    host_memory: float = 0.0
    host_bandwidth: float = 50e9  # bytes per second of host memory, of one device's share
    stragglers: float = 0.0
    price: float = 0.0  # per device and hour, if somebody gave it

    def __post_init__(self) -> None:
        errors = []
        if self.count < 1:
            errors.append(f"{self.count} devices: a cluster has at least 1")
        if self.per_node < 1:
            errors.append(f"per_node={self.per_node}: a node has at least 1 device")
        raise_errors(f"the cluster of {self.device.name}", errors)

    @property
    def nodes(self) -> int:
        return -(-self.count // self.per_node)

    def members(self, ranks: int, stride: int) -> int:
        """How many of a group's ranks, which are `stride` apart, share a node."""
        return max(1, min(ranks, self.per_node // stride))

    def link(self, ranks: int, stride: int = 1) -> Link:
        """The link of a ring of ranks that are `stride` apart."""
        inside = self.members(ranks, stride)
        if inside >= ranks:
            return self.inside
        rate = min(self.inside.bandwidth, inside * self.between.bandwidth)
        return Link(rate, self.between.latency)

    def limited_to(self, memory: float) -> "Cluster":
        """The cluster with so many bytes for tensors on each device."""
        return replace(self, device=replace(self.device, memory=memory, reserve=0.0))

    def __hash__(self) -> int:
        return hash((self.device.name, self.count, self.per_node, self.between, self.inside))


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")

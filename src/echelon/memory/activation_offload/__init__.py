"""offload=activations: what autograd saves of a layer goes to host memory, and comes back for its backward.

carrier     of one rank: which copies are under way, and the trips of its microbatches
trip        what one forward pass through a stage saves, in one group for each layer
parcel      one piece of memory: on the device, in host memory, or on its way
order       the stream in whose order all of this happens
host_pool   host memory, which is used again from step to step
layer       says where one layer ends and the next begins
"""

from echelon.memory.activation_offload.carrier import Carrier
from echelon.memory.activation_offload.host_pool import HostPool
from echelon.memory.activation_offload.layer import OffloadedLayer

__all__ = ["Carrier", "HostPool", "OffloadedLayer"]

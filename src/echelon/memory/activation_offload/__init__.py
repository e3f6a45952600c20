"""offload=activations: tensors that autograd saves go to host memory, and come back for the backward pass.

offload             of one rank: which copies are under way; of a forward pass: a group of storages per layer
offloaded_storage   one storage: on the device, in host memory, which is used again, or being copied
"""

"""offload=activations: tensors that autograd saves go to host memory, and come back for the backward pass.

offload             of one rank: which copies are under way, and the passes of its microbatches
offloaded_pass      the storages that one forward pass through a stage saves, in a group per layer
offloaded_storage   one storage: on the device, in host memory, which is used again, or being copied
"""

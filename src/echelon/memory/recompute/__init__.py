"""Recompute: saved activations are dropped in the forward pass and computed again in the backward pass.

recompute           which layers form segments, as the plan says
segment             the heart: layers that drop what autograd saves, and run again when it is asked for
layer_call          one call of a layer: its arguments, and all that its second run must find again
saved_inputs        how inputs are kept: as they are, in one preallocated memory, in parts over tensor ranks
second_run          dropout, generators, autocast, modes, view; in the first step, the same outputs
budget              which layers form segments so that a budget suffices, from measured_layers
budget_stage        the layers of a stage under a budget, which the stages of a rank share
selective           another way: no layer runs again, only operations that are cheap and save much
"""

"""Dropout whose masks do not depend on the layout: a hash of each element's position in the training.

key_dropout(model, Wrapping())                     # once, on the whole model
with scope(seed=0, step=7, first_sample=16):       # around the forward pass of samples 16, 17, …
    output = model(inputs)
"""

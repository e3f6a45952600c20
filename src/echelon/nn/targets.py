"""The target that a loss leaves out: of padding, and of tokens that are not to be learned.

torch's `cross_entropy` ignores the same number by default, and so do the models of transformers.
"""

IGNORED_TARGET = -100

"""Expert parallelism: ranks hold different experts, and tokens go to them and come back by all-to-all.

split     which modules hold experts, and what a rank keeps of them
modules   what such a module does instead of its forward: send rows, compute, get them back
"""

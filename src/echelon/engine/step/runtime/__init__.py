"""The runtime: the interpreter that runs a program over stages, messages between them, versions of weights.

It runs every plan; a model in one stage is the smallest pipeline.
"""

"""Random inputs for everything that reads a file or text of a user: a UserError or success, nothing else.

mutate      valid inputs, changed: their bytes, or their structure
grammar     inputs made from the words of a language
targets     the parsers, each with valid inputs
runner      one input: its result, in bounded time and memory
"""

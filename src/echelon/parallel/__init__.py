"""Strategies that divide the work over ranks: data, tensor, context, expert, pipeline."""

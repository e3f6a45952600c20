"""Loops of users' own: the parts of a step, and passes that are called one by one."""

"""The planner: splits a model's layers into stages. Needs no process group, and here no torch."""

from echelon.planner.graph import Node, Profile, chain, make_profile
from echelon.planner.profile_file import profile_of, read_profile, to_dict, write_profile

__all__ = ["Node", "Profile", "chain", "make_profile", "profile_of", "read_profile", "to_dict", "write_profile"]

"""The positions of ranks: the pure layout of a plan, and the mesh of real groups over it."""

from echelon.collectives.mesh.layout import Layout, Position
from echelon.collectives.mesh.mesh import Mesh, this_device

__all__ = ["Layout", "Mesh", "Position", "this_device"]

"""Graphs of workers: named topologies, their schedules of rounds, spectra and pictures.

Nothing here imports torch; scipy, networkx and matplotlib are imported only by the functions that need them.
"""

from gossamer.topology.builder import build, describe, fits, names, resized, uses_nodes
from gossamer.topology.draw import draw
from gossamer.topology.schedules import Group
from gossamer.topology.spectra import Constants
from gossamer.topology.topology import Topology

__all__ = ["Constants", "Group", "Topology", "build", "describe", "draw", "fits", "names", "resized", "uses_nodes"]

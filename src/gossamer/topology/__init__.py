"""Graphs of workers, their round schedules and their spectra."""

from gossamer.topology.builder import build, describe, names
from gossamer.topology.draw import draw
from gossamer.topology.schedules import Group
from gossamer.topology.spectra import Constants
from gossamer.topology.topology import Topology

__all__ = ["Constants", "Group", "Topology", "build", "describe", "draw", "names"]

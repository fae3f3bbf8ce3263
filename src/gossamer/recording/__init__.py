"""What the workers of a run did, and when: aggregated during the run, in bounded memory."""

from __future__ import annotations

from gossamer.recording.recorder import Recorder
from gossamer.recording.timeline import KINDS, Timeline

__all__ = ["KINDS", "Recorder", "Timeline"]

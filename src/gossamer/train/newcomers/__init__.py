"""Workers of ``gossamer train`` that come to a run under way."""

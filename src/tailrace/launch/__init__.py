"""The composition root: from settings to a run of real processes, and what can be done with a run afterwards."""

"""The trainer: from groups of trajectories to the next version of the weights."""

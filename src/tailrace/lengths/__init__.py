"""How long trajectories are: laws of completion lengths, and the draw that simulated and emulated engines share."""

from tailrace.lengths.draw import LengthLaw, read_lengths

__all__ = ["LengthLaw", "read_lengths"]

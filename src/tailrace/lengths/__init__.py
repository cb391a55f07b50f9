"""Completion lengths: their distributions, and the sampling that simulated and emulated engines share."""

from tailrace.lengths.draw import LengthLaw, read_lengths

__all__ = ["LengthLaw", "read_lengths"]

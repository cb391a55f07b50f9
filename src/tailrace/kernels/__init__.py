"""Kernels of the native engine, one file each, imported late: Triton's for CUDA, and C for a CPU (`cpu.py`).

Nothing in those for CUDA waits for the device or reads from it: every launch has a grid that the shapes fix, so that
all of it can be captured in a CUDA graph. Constants are chosen for Hopper and fit the shared memory of Ampere.
"""

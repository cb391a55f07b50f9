"""Triton kernels of the native engine on CUDA, one file each; they need torch and triton alone and are imported late.

Nothing here waits for the device or reads from it: every launch has a grid that the shapes fix, so that all of it can
be captured in a CUDA graph. Constants are chosen for Hopper and fit the shared memory of Ampere.
"""

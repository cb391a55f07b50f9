"""Kernels of the native engine and the trainer, one file each, imported lazily: Triton for CUDA, C for CPUs (`cpu.py`).

The CUDA kernels never synchronize with the device: grids depend on shapes alone, so that all launches can be captured
in a CUDA graph. Constants are tuned for Hopper and fit the shared memory of Ampere.
"""

"""Which CPUs, and so which host memory, are near a GPU.

`device.survey` asks for every card; a component then stays on the CPUs near its own (`stay_near`), and what it touches
first, pinned memory included, lies in their memory. What a machine does not tell is not known: then nothing is done.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
ADDRESS_CHARACTERS = 32  # "0000:17:00.0", and its end


def pci_address(number: int) -> str:
    """Of the card that CUDA numbers so in this process; empty if the driver does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    text, device = ctypes.create_string_buffer(ADDRESS_CHARACTERS), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), number):
        return ""
    failed = driver.cuDeviceGetPCIBusId(text, ADDRESS_CHARACTERS, device)
    return "" if failed else text.value.decode("ascii", "replace").lower()


def numa_of(address: str, devices: Path = PCI_DEVICES) -> tuple[int, str]:
    """The NUMA node of a PCI device, -1 if there is none, and the CPUs near it."""
    if not address:
        return -1, ""
    try:
        node = int((devices / address / "numa_node").read_text())
        return node, (devices / address / "local_cpulist").read_text().strip()
    except (OSError, ValueError):
        return -1, ""


def cpu_numbers(cpus: str) -> set[int]:
    """`0-3,8` as numbers."""
    found: set[int] = set()
    for part in filter(None, cpus.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def stay_near(cpus: str) -> None:
    """This thread, and all that it will start. CPUs that a container does not grant are left out."""
    allowed = cpu_numbers(cpus) & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)

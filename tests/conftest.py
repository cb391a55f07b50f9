"""What holds for all tests.

Property tests draw the same examples every time, so that a run is red for a change only; `make soak` searches. Ctrl-C
reaches the programs that are tested, also where the tests were started in the background, which ignores it, and after
a command that was called in this very process (`train`, `fork`) has blocked it, which every process started later
inherits. Torch has one thread in every process: the tests fill the cores by themselves, and threads that wait for each
other on a full core take many times as long. Python keeps what it compiles, also where it is told not to, as in many
containers: tests start hundreds of processes, and each would compile all of torch anew.
"""

import os
import signal
import sys
from itertools import groupby

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here or by whomever a test starts
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = ("chaos", "cluster", "end_to_end")  # folders of tests with whole runs


def pytest_runtest_setup() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD})


@pytest.hookimpl(trylast=True)  # after others have left tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each of several workers is given an equal part of the list, and when it is done takes tests from the ends of the
    others' parts. So each part begins with a share of the long tests, whole files of them, and ends with short ones."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    files = [list(tests) for _, tests in groupby(items, lambda one: one.path)]
    long = [tests for tests in files if tests[0].path.parent.name in LONG]
    short = [one for tests in files if tests not in long for one in tests]
    size = -(-len(items) // workers)
    items.clear()
    for worker in range(workers):
        share = [one for tests in long[worker::workers] for one in tests]
        room = max(0, size - len(share))
        items += [*share, *short[:room]]
        short = short[room:]
    items += short

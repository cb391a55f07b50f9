"""The sandbox's process: put up the walls, run the program, watch over it, tell how it ended.

    starter    reads the program, enters the namespaces; waits
    supervisor     process 1 of the namespace: ends the program at its deadline, and all of it with itself
    program    limits, Landlock, the filter; then the policy's code, in this same interpreter

Without namespaces the starter keeps the program itself. ProgramRun by `sandbox.py` as `main()`, with an empty
environment and no descriptor but four: nothing, two for output, and one on which "walls are up" is said.
"""

from __future__ import annotations

import os
import resource
import select
import sys
import time

from . import filter, threads, walls
from .calls import call

TYPE_CHECKING = False  # as `typing` has it, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

THREADS = 64
LIMITS = {
    "AS": 512 << 20,  # bytes of address space
    "FSIZE": 1 << 20,  # bytes of the largest file
    "NOFILE": 64,
    "SIGPENDING": 64,
    **dict.fromkeys(("CORE", "MEMLOCK", "MSGQUEUE", "RTPRIO"), 0),
}
SET_DUMPABLE = 4

LATE = 124  # the status at the deadline
PROGRAM = "program.py"


def main() -> None:
    layers, seconds, report, box, *packages = sys.argv[1:]
    with open(0, encoding="utf-8", errors="replace") as file:
        source = file.read()
    os.open(os.devnull, os.O_RDONLY)  # as 0, which is free now
    if layers != "limits":
        _end_with_parent()
        _go_first_when_memory_runs_out()
    ProgramRun(source, named(layers), float(seconds), int(report), box, packages).start()


def named(layers: str) -> dict[str, str]:
    """`seccomp,landlock=3`: names, and after = an older version of the layer than the kernel has, for tests."""
    return {name: version for name, _, version in (word.partition("=") for word in layers.split(","))}


class ProgramRun:
    def __init__(
        self, source: str, layers: dict[str, str], seconds: float, report: int, box: str, packages: Sequence[str]
    ) -> None:
        self.source, self.layers, self.seconds, self.report, self.box = source, layers, seconds, report, box
        sys.path[:] = [os.path.realpath(path) for path in (*sys.path, *packages)]
        sys.path_importer_cache.clear()  # it has the other names
        self.shown = [os.path.realpath(os.path.join(sys.base_prefix, "lib")), *sys.path]

    def start(self) -> None:
        if "namespaces" in self.layers:
            self._enter()
        self._keep()

    def _enter(self) -> None:
        self.box = walls.BOX
        user = walls.enter_namespaces(self.shown)
        supervisor, lifeline = _fork()
        if supervisor:
            _end_as(os.waitpid(supervisor, 0)[1])
        os.setsid()  # a group of its own, or a signal to the group would reach those outside
        walls.drop_privileges(user)
        _end_with_parent(lifeline)
        os.close(lifeline)

    def _keep(self) -> None:
        """Ends with the program. As process 1 it takes along all that is left, and the kernel sees to that."""
        requests = threads.listen() if self._shares_its_user() else None
        program, lifeline = _fork()
        if program:
            self._watch(program, requests)
        if requests is not None:
            os.close(requests)
        self._be_the_program(lifeline)

    def _shares_its_user(self) -> bool:
        return "seccomp" in self.layers and "namespaces" not in self.layers

    def _watch(self, program: int, requests: int | None) -> None:
        os.close(self.report)
        if not _ended_within(self.seconds, program, requests):
            os.kill(program, 9)
            os.waitpid(program, 0)
            os._exit(LATE)
        _end_as(os.waitpid(program, 0)[1])

    def _be_the_program(self, lifeline: int) -> None:
        os.chdir(self.box)
        os.environ["HOME"] = self.box
        self._write_source()
        self._limit()
        self._wall_in(lifeline)
        os.close(lifeline)
        os.write(self.report, b"+")
        os.close(self.report)
        run(self.source)

    def _write_source(self) -> None:
        """For the lines in a traceback."""
        with open(PROGRAM, "w", encoding="utf-8", errors="replace") as file:
            file.write(self.source)

    def _limit(self) -> None:
        limits = LIMITS | {"CPU": int(self.seconds) + 1}
        if "namespaces" in self.layers:
            limits["NPROC"] = THREADS
        for kind, limit in limits.items():
            try:
                resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (limit, limit))
            except (AttributeError, ValueError):  # macOS has fewer, and some by name only
                if "limits" not in self.layers:
                    raise

    def _wall_in(self, lifeline: int) -> None:
        own_view = "namespaces" in self.layers
        if "seccomp" in self.layers or "landlock" in self.layers:
            walls.drop_capabilities()
            _end_with_parent(lifeline)
            call("prctl", SET_DUMPABLE, 0)  # no core: a limit of 0 does not keep it from a service that collects them
        if "landlock" in self.layers:
            version = int(self.layers["landlock"] or walls.landlock_version())
            walls.apply_landlock(self.shown, self.box, own_view, version)
        if "seccomp" in self.layers:
            filter.apply(own_view)


def run(source: str) -> None:
    """As `python program.py` would, except that the traceback begins in the program."""
    sys.argv = [PROGRAM]
    try:
        exec(compile(source, PROGRAM, "exec"), sys.modules["__main__"].__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.stdout.flush()
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _ended_within(seconds: float, process: int, requests: int | None) -> bool:
    """Meanwhile its requests for threads are answered."""
    try:
        watched = os.pidfd_open(process)
    except (AttributeError, OSError):  # then only who started us keeps the time
        return True
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    if requests is not None:
        poll.register(requests, select.POLLIN)
    while ready := dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000)):
        if requests is None or watched in ready:
            return True
        threads.answer(requests, process, THREADS)
    return False


def _fork() -> tuple[int, int]:
    """The child's number, or 0, and an end of a pipe: the child's is at its end once its parent is gone."""
    lifeline, held = os.pipe()
    child = os.fork()
    os.close(lifeline if child else held)
    return child, held if child else lifeline


def _end_with_parent(lifeline: int | None = None) -> None:
    """The kernel sees to that from here on, but not where the parent was gone before."""
    call("prctl", filter.SET_PDEATHSIG, 9)
    if lifeline is not None and select.select([lifeline], [], [], 0)[0]:
        os._exit(1)


def _go_first_when_memory_runs_out() -> None:
    """Page tables and the kernel's own records are not in the limit of memory."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:  # no /proc, or not to be written
        return


def _end_as(status: int) -> None:
    """With the status of a child, the signal that ended it included."""
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


# -------------------------------------------------------------------------------------------------------------- probing


def probe() -> None:
    """Print which walls can be put up here, each tried in a child of its own: `name` or `name: why not`."""
    for name, attempt in (("namespaces", _try_namespaces), ("landlock", _try_landlock), ("seccomp", _try_seccomp)):
        child = os.fork()
        if not child:
            try:
                print(name, attempt(), sep="=", flush=True)
            except Exception as error:  # the border: whatever it is, this wall is missing
                print(f"{name}: {error}", flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def _try_namespaces() -> str:
    user = walls.enter_namespaces([])
    child = os.fork()
    if not child:
        _end_by(lambda: walls.drop_privileges(user))
    if os.waitpid(child, 0)[1]:
        raise OSError("no process could be started in them")
    return "for a user" if user is None else "for an administrator"


def _end_by(act: Callable[[], None]) -> None:
    try:
        act()
    except OSError:
        os._exit(1)
    os._exit(0)


def _try_landlock() -> str:
    version = walls.landlock_version()
    if not version:
        raise OSError("the kernel has none, or does not allow it")
    walls.apply_landlock([], "/tmp", may_write=False, version=version)
    return f"version {version}"


def _try_seccomp() -> str:
    can_listen = threads.listen() is not None
    filter.apply(own_view=False)
    try:
        os.chmod("/dev/null", 0o666)
    except PermissionError:
        return "a list of allowed calls" + ("" if can_listen else "; threads only with namespaces")
    raise OSError("the filter does not hold")

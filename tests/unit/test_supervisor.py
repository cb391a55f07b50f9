"""The supervisor: a controller that is killed is replaced, one that ends by itself ends the run."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tailrace.launch import supervisor

DEADLINE_S = 60.0


def kept(control: str) -> tuple[int, str, str]:
    """What a supervisor comes to whose controllers run this; `again`: it is not the first."""
    program = f"""
    import os, signal, sys
    from tailrace.launch.supervisor import Supervisor

    def control(supervisor):
        again = supervisor.begun
        supervisor.begin()
        {control}

    sys.exit(Supervisor().keep(control))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("status", [0, 2, 130])
def test_its_own_ending_is_the_end(status):
    assert kept(f"print('once'); return {status}") == (status, "once\n", "")


def test_one_that_is_killed_is_followed_by_another_that_knows_of_it():
    status, out, err = kept("print(again, flush=True); return 0 if again else os.kill(os.getpid(), signal.SIGKILL)")
    assert (status, out) == (0, "False\nTrue\n")
    assert "killed by signal 9" in err


def test_controllers_that_die_at_once_are_given_up():
    status, out, err = kept("print('.', end='', flush=True); os.kill(os.getpid(), signal.SIGSEGV)")
    assert (status, len(out)) == (2, supervisor.IN_A_ROW + 1)
    assert "--resume" in err


def test_a_bug_is_told_and_not_repeated():
    status, out, err = kept("print('once'); raise KeyError('bug')")
    assert (status, out) == (1, "once\n")
    assert "KeyError: 'bug'" in err


def test_a_signal_for_the_keeper_reaches_the_controller_once():
    asked = "signal.sigwait({signal.SIGTERM}); return 7 if not signal.sigpending() else 8"
    status, _, _ = kept(f"signal.pthread_sigmask(0, {{15}}); os.kill(os.getppid(), signal.SIGTERM); {asked}")
    assert status == 7


def test_keeping_needs_nothing_large():
    program = "import sys, tailrace.cli, tailrace.launch.supervisor; print({'msgspec', 'asyncio'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out == "set()\n"


def test_the_board_is_seen_by_both_processes():
    board = supervisor.Supervisor()
    child = os.fork()
    if not child:
        board.begin()
        board.beat()
        os._exit(0)
    os.waitpid(child, 0)
    assert board.begun
    assert board._board[supervisor.BEATS] == 1

"""A fault stays where it happens: what `benchmarks/chaos.py` measures, in short and with facts in place of figures."""

from __future__ import annotations

import signal

from fleet import (
    FLEET,
    controller_recovery,
    in_full_swing,
    master_recovery,
    replica_recovery,
    store_recovery,
    taped,
    trainer_recovery,
)
from proof import prove
from victim import victim


def test_others_go_on_with_the_work_of_the_dead_and_nobody_waits_for_them(tmp_path):
    """The times are for people; that every wait in these functions came to its end is what is tested."""
    with victim(tmp_path, FLEET) as run:
        run.start()
        in_full_swing(run)
        with taped(run) as tape:
            table = [
                replica_recovery(run, tape, 0, signal.SIGKILL),
                replica_recovery(run, tape, 1, signal.SIGSTOP),
                master_recovery(run, tape, signal.SIGKILL),
                trainer_recovery(run, tape, signal.SIGKILL),
                store_recovery(run, tape, signal.SIGKILL),
            ]
        table.append(controller_recovery(run))
        print(*table, sep="\n")
        in_full_swing(run)
        assert run.interrupt()[0] == 130
        run.wait_until_gone()
        prove(run.folder)
    assert all(0 <= one.known <= one.again for one in table), table
    assert all(one.shows > 0 for one in table), table

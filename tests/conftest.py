"""What holds for all tests.

Property tests draw the same examples every time, so that a run is red for a change only; `make soak` searches. Ctrl-C
reaches the programs that are tested, also where the tests were started in the background, which ignores it.
"""

import os
import signal

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

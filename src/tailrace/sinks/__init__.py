"""Trackers of a run: each is fed from `run.db`, beside the run or afterwards, so none can hurt it."""

"""The control plane: one pure state machine that decides everything. See `plane.py`."""

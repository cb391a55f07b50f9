"""The wall-clock driver of the control plane: real processes, real sockets, real time."""

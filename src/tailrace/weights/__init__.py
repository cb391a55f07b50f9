"""Weight sync, from the trainer's parameters to an engine's: snapshot, relays, shared memory, loading in place."""

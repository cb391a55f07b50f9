"""Engines: what generates tokens. `base.py` is the contract; imports of torch happen in the engine that needs it."""

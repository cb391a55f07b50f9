"""Which release this is: a run notes by which it was written."""

__version__ = "0.1.0"

"""What `fuzz.py` attacks, and how: inputs, attacks, and the decoders, by what they decode."""

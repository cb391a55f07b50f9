"""transformers models: loading, device selection, and the packed attention of the trainer."""

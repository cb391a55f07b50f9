"""Models from transformers: loading them, and the attention that trainer and engine share."""

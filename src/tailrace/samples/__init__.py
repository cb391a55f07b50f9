"""The sample store: tokens and log-probs on their own path, beside the controller.

Replicas stream what they generate to a store process (`client`, `server`), which commits it to one SQLite file
(`file`) and only then acknowledges it. Trainer ranks read the samples that they train on from there, replicas the
prompts and prefixes that they continue. The controller sees ids and counts alone: it tells the store who may write
what, and what may be deleted (`worker`).
"""

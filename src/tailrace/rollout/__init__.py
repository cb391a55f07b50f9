"""Rollout workers: one engine, its episodes and its environments in one process."""

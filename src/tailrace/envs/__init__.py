"""Environments: where prompts come from, and what answers to the policy's turns."""

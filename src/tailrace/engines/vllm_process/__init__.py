"""What runs inside vLLM's own Python: it imports nothing of Tailrace, and only what vLLM brings along.

`vllm_server.py` is started as a script, so this folder is on its path; `vllm_messages.py` is what both sides read.
"""

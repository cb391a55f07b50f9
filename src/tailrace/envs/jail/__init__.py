"""What runs inside the sandbox's process, before the program of the policy and around it.

`envs/sandbox.py` starts a bare interpreter on `inside.main`. These files import nothing but the standard library, and
of that as little as possible: every millisecond here is paid for every call of the tool.
"""

"""`tailrace launch`: somebody else's cluster manager starts, watches and stops our controller and agents.

A placer decides where processes run, and nothing else. The controller is `tailrace train`, an agent is `tailrace
worker`; who is lost, what is trained and where weights go is decided by them, over their own links.
"""

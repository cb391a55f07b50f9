"""The relay tier: weights in host memory, handed on from host to host, mapped by every replica."""

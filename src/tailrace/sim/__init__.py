"""The virtual-time driver: the real control plane over modelled replicas, relays and a modelled trainer."""

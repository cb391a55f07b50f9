"""Where a trainer is told to send its weights, while relays start."""

from types import SimpleNamespace

from tailrace.runtime.components import Components


def test_a_relay_that_has_not_joined_yet_has_no_address(monkeypatch):
    """The trainer's own relay may come up after the one that is the master."""
    relays = {0: SimpleNamespace(address="", spec=SimpleNamespace(worker="")), 2: None}
    relays[1] = SimpleNamespace(address="127.0.0.1:4000", spec=SimpleNamespace(worker=""))
    trainer = SimpleNamespace(spec=SimpleNamespace(rank_hosts=(0, 2)))
    components = Components.__new__(Components)
    monkeypatch.setattr(components, "get", lambda role, id: trainer if role == "trainer" else relays[id])
    assert components.publish_addresses(1) == {1: "127.0.0.1:4000"}

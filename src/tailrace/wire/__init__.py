"""What processes say to each other, and the sockets over which they say it.

The controller has one `ControlServer`, which listens, and every component one `ControlClient`, which connects and
connects again; messages are tagged structs in msgpack over TCP, nothing is pickled. Order is kept within a connection.
Each component has a key of its own (`keys`), by which both ends prove themselves and sign every frame (`session`), and
which never travels there: names and ports are free for anybody to take once their owner is gone, keys are not. Whoever
has not proven itself has little time and few descriptors (`descriptors`).

What a component reports survives the controller. Reports are numbered, and the component keeps each until the
controller says that it is committed. A controller that hears somebody it does not know asks for an introduction and
says how far its journal goes: the component sends again what is missing there, in order, and then joins once more, with
a larger incarnation. So every report counts exactly once, whoever died in between. Orders are not kept: joining
compares what both sides believe, and what was ordered of an earlier incarnation is ignored.

Where other hosts may join, they come encrypted (`tls`).
"""

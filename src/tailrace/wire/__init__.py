"""What processes say to each other, and the sockets over which they say it.

The controller has one `Hub` (a ZeroMQ ROUTER), every part one `Link` (a DEALER); messages are tagged structs in
msgpack, nothing is pickled. Order is kept between two ends. Every message is signed with the token that the part was
started with, which itself never travels: names and ports are free for anybody to take once their owner is gone,
signatures are not. The hub does not even answer to others.

What a part reports survives the controller. Reports are numbered, and the part keeps each until the controller says
that it is committed. A controller that hears somebody it does not know asks for an introduction and says how far its
journal goes: the part sends again what is missing there, in order, and then joins once more, with a larger incarnation.
So every report counts exactly once, whoever died in between. Orders are not kept: joining compares what both sides
believe, and what was ordered of an earlier incarnation is ignored.

Where other hosts may join, everything is encrypted (see `door`), and who has no key is not heard at all.
"""

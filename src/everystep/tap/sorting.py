"""Streams of RDMA messages sorted into NCCL's connections, and those into rings and transfers.

A stream is one direction of a queue pair. It carries data, or the clear-to-send records for the
data that goes the other way. Both have the same UDP source port, which is how they are paired;
where a network card chooses ports otherwise, by the address that was cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from msgspec import Struct

from everystep.tap import cts, runs, writes
from everystep.tap.collectives import Expectations
from everystep.tap.connections import Connection
from everystep.tap.cutting import is_piece
from everystep.tap.pieces import TCP_STREAMS, WRITE, Messages, Table
from everystep.tap.ranks import Ranks
from everystep.tap.ring import Scattered
from everystep.tap.rings import Doubt, Place, Ring
from everystep.tap.sendrecv import MAX_MESSAGE_BYTES, Transfers
from everystep.tap.unpacking import RING_ROOM, Placer, Unpacker
from everystep.tap.writes import Write, write_of

_MAX_CONNECTIONS = 4096
_MAX_KEYS = 64
_MAX_HELD = 64
_LL_ROOM = 65536
_AT_A_TIME = 64  # messages, after which it is seen whether what comes next is plain now


class Options(Struct, frozen=True, kw_only=True):
    """What the wire does not tell."""

    ranks: int
    """k, length of the ring."""
    element_bytes: int
    """Of the gradients: 4 for float32 and int32, 2 for float16 and bfloat16."""
    ring: tuple[int, ...] | None = None
    """The ranks along the ring, beginning with rank 0; None: 0, 1, 2, and so on."""
    added_step: bool | None = None
    """Whether each rank also sends the reduced chunk that a ring does not send on; None: found out,
    which is impossible where all chunks are equally long (then: no)."""
    send_recv: bool = True
    """Whether a send that has the size of what an all-reduce left out is taken for that."""
    minor: int | None = None
    """Minor version of NCCL 2: tells how buffers are cut where no records do, as with sockets."""
    record: bool = False
    """Keep every message with what became of it: for files, not for live traffic."""


class Sorter:
    """The connections of one communicator."""

    def __init__(
        self,
        placer: Placer,
        options: Options,
        expected: Expectations,
        place: Place,
        on_doubt: Callable[[Doubt], None],
        hand_out: Callable[[Scattered], None],
    ) -> None:
        self.connections: list[Connection] = []
        """In the order of their first message."""
        self.rings: list[Ring] = []
        self.transfers: list[Transfers] = []
        self._ranks = Ranks(options.ring or tuple(range(options.ranks)))
        self.rank_of = self._ranks.of
        """By index into the table of addresses, as far as known."""
        self.writes: list[Write] = []
        """All data messages, where a record is kept."""
        self.records: list[tuple[Write, cts.ClearToSend]] = []
        """All clear-to-send records, likewise."""
        self.ignored = 0
        """Messages that NCCL does not send, or of more connections than are kept."""
        self.refused = 0
        """Messages that were cut over several queue pairs: none of that connection is used."""
        self._unpacker = Unpacker(placer)
        self._options = options
        self._expected = expected
        self._place = place
        self._on_doubt = on_doubt
        self._hand_out = hand_out
        self._layout: cts.Layout | None = None
        self.streams: dict[int, tuple[int, int, int, int]] = {}
        """By number: source, destination, queue pair, UDP source port."""
        self._data: dict[int, Connection] = {}
        self._cleared: dict[int, Connection] = {}
        self._pairs: dict[tuple[int, int, int], Connection] = {}
        self._owners: dict[int, Ring | Transfers] = {}
        self._held: dict[int, list[Write]] = {}

    def take(self, messages: Messages) -> Iterator[list[Write]]:
        """Put messages to their connections, some at a time; gives those of data."""
        for number, source, destination, qp, port, *_ in messages.opened.tolist():
            self.streams[number] = (source, destination, qp, port)
        left = messages.table
        while len(left):
            if not self._options.record:
                left = self._runs(left, messages)
            rows, left = left[:_AT_A_TIME], left[_AT_A_TIME:]
            taken = [self._message(row, messages) for row in rows.tolist()]
            yield [write for write in taken if write is not None]
        for number in () if self._options.record else messages.closed.tolist():
            for table in (self.streams, self._data, self._cleared):
                table.pop(number, None)

    def _runs(self, table: Table, messages: Messages) -> Table:
        """Take what is plain, stream by stream; the rows that are left."""
        left = np.ones(len(table), np.bool_)
        streams = table["stream"].copy()
        for number in sorted(set(streams.tolist())):
            connection = self._data.get(number)
            places = np.flatnonzero(streams == number)
            if number in self._cleared:
                left[places] = not self._records_of(number, table[places], messages)
            if connection is None or connection.role != "ring":
                continue
            rows = table[places]
            found = runs.run(connection, number, rows)
            if found is None:
                continue
            count, window = found
            rows, first = rows[:count], connection.courses[number].last + 1
            runs.move_on(connection, number, rows)
            window.collective.ran(int(rows["frame"].min()), int(rows["last_frame"].max()))
            self._expected.seen(window.collective)
            self._hand_out(Scattered(runs.pieces(window, first, number, rows), messages.data))
            left[places[:count]] = False
        return table[left]

    def _records_of(self, number: int, rows: Table, messages: Messages) -> bool:
        """Note the clear-to-send records of a stream, if all of its messages are plain ones."""
        connection, layout = self._cleared[number], self._layout
        is_known = connection.role is not None and self.streams[number][1] in self.rank_of
        if layout is None or not is_known or (connection.base is None and connection.floating):
            return False
        found = cts.parse_all(rows, messages.data, layout)
        if found is None:
            return False
        addresses = zip(found["addr"].tolist(), found["rkey"].tolist(), strict=True)
        records = zip(addresses, found["idx"].tolist(), rows["frame"].tolist(), strict=True)
        connection.told([*records], int(found["size"][-1]))
        return True

    def ring_of(self, connection: Connection) -> Ring | None:
        """The ring of a connection's sender."""
        for ring in self.rings:
            if any(self._ranks.same(c.sender, connection.sender) for c in ring.channels):
                return ring
        return None

    def connection(self, stream: int) -> Connection:
        """Of a stream of data."""
        return self._data[stream]

    def decide(self) -> None:
        """Nothing more will come: what could not be told apart before."""
        for connection in self.connections:
            if connection.role is None and connection.data_qp is not None:
                held = self._held.get(id(connection), [])
                has_ring = self.ring_of(connection) is not None and any(
                    write.protocol == "Simple" for write in held
                )
                self._assign(connection, "p2p" if has_ring else "ring")
            for write, window, place in connection.end():
                self._place(connection, write, window, place)

    # ------------------------------------------------------------ messages

    def _message(self, row: tuple[Any, ...], messages: Messages) -> Write | None:
        number = row[writes.STREAM]
        connection = self._data.get(number)
        if connection is None:
            stream = self.streams.get(number)
            if stream is None or row[writes.OPERATION] != WRITE:
                self.ignored += 1
                return None
            if number < TCP_STREAMS and self._clear(row, stream, messages):
                return None
            connection = self._open(row, stream)
            if connection is None:
                self.ignored += 1
                return None
        if row[writes.RKEY] not in connection.keys:
            self._note_key(connection, row[writes.RKEY])
        write = write_of(row, messages)
        for known in self._known(connection, write):
            self._unpacker.read(connection, known)
            connection.messages += known.has_head and not known.is_tail
            self._give(connection, known)
        while connection.floating and (after := connection.take_next(write.stream)) is not None:
            self._give(connection, after)
            if after in connection.floating:
                break
        if self._options.record:
            self.writes.append(write)
        return write

    def _known(self, connection: Connection, write: Write) -> list[Write]:
        """The writes that can be read now: pieces of messages wait until it is known which they
        are."""
        if connection.cut is None:
            if not self._is_piece(connection, write):
                return [write]
            earlier = [*self._held.pop(id(connection), []), *connection.be_cut()]
            return [known for one in (*earlier, write) for known in self._known(connection, one)]
        return connection.cut.know(write)

    def _give(self, connection: Connection, write: Write) -> None:
        if connection.is_refused:
            self.refused += 1
            return
        if connection.role is None:
            self._choose_role(connection, write)
        if connection.role is None:
            held = self._held.setdefault(id(connection), [])
            if len(held) < _MAX_HELD:
                held.append(write)
            return
        if not write.has_head:
            connection.add_headless(write)
            return
        owner = self._owners[id(connection)]
        for whole, window, place in connection.give(write, owner.walk):
            self._place(connection, whole, window, place)

    def _is_piece(self, connection: Connection, write: Write) -> bool:
        """Whether a write is part of a message.

        Since NCCL 2.29 the immediate may be a number of a request, so that it tells nothing where
        there is one queue pair only.
        """
        is_told = len(connection.courses) > 1 or self._layout not in cts.LAYOUTS[2:]
        return is_told and is_piece(write)

    # ------------------------------------------------------------ clear to send

    def _clear(
        self, row: tuple[Any, ...], stream: tuple[int, int, int, int], messages: Messages
    ) -> bool:
        """Whether a message is a clear-to-send record; if so, note it."""
        length = row[writes.LENGTH]
        if length > cts.MAX_WRITE_BYTES or not row[writes.COMPLETE] or row[writes.HAS_IMMEDIATE]:
            return False
        payload = messages.data[row[writes.AT] : row[writes.AT] + row[writes.NBYTES]].tobytes()
        found = cts.parse(payload, self._layout)
        if found is None:
            return False
        self._layout, records = found
        self._expected.contiguous = self._layout.nbytes != 32
        self._expected.is_fine = self._layout in cts.LAYOUTS[2:]
        source, destination, qp, port = stream
        connection = self._cleared.get(row[writes.STREAM])
        if connection is None:
            connection = self._pair(destination, source, port)
            connection.cts_qp = qp
            self._cleared[row[writes.STREAM]] = connection
        told = [((record.addr, record.rkey), record.idx, row[writes.FRAME]) for record in records]
        connection.told(told, records[-1].size)
        if self._options.record:
            copy = np.frombuffer(payload, np.uint8)
            self.records += [(Write(row, copy, [(0, length)]), record) for record in records]
        self._ranks.record(source, destination, records[0])
        self._index_rings()
        if connection.role is None and records[0].size != MAX_MESSAGE_BYTES:
            self._assign(connection, "ring")
        if connection.base is None and connection.floating:
            waiting, connection.floating = connection.floating, []
            for write in waiting:
                self._give(connection, write)
        return True

    def name(self, address: int, rank: int) -> None:
        """An address (index into the table of addresses) is of this rank."""
        self._ranks.of[address] = rank
        self._index_rings()

    def _index_rings(self) -> None:
        for ring in self.rings:
            if ring.rank_index is None:
                ring.rank_index = self._ring_index(ring.channels[0])

    def _ring_index(self, connection: Connection) -> int | None:
        return self._ranks.index(connection.sender, connection.receiver)

    # ------------------------------------------------------------ connections

    def _pair(self, sender: int, receiver: int, port: int) -> Connection:
        connection = self._pairs.get((sender, receiver, port))
        if connection is None:
            connection = self._pairs[sender, receiver, port] = self._new(sender, receiver, port)
        return connection

    def _new(self, sender: int, receiver: int, port: int) -> Connection:
        connection = Connection(sender, receiver, port)
        self.connections.append(connection)
        return connection

    def _open(self, row: tuple[Any, ...], stream: tuple[int, int, int, int]) -> Connection | None:
        """The connection of a stream of data."""
        if len(self.connections) >= _MAX_CONNECTIONS:
            return None
        source, destination, qp, port = stream
        rkey, va = row[writes.RKEY], row[writes.VA]
        connection = self._pairs.get((source, destination, port))
        if row[writes.STREAM] >= TCP_STREAMS:
            connection = self._new(source, destination, port)
        if connection is None or connection.data_qp not in (None, qp):
            beside = [
                c
                for c in self.connections
                if rkey
                and (c.sender, c.receiver) == (source, destination)
                and (c.owns(rkey) if c.data_qp is not None else c.rooms.cleared(va, rkey))
            ]
            connection = beside[0] if beside else self._pair(source, destination, port)
        if connection.data_qp is None:
            connection.data_qp = qp
            owner = self._owners.get(id(connection))
            if isinstance(owner, Ring):
                owner.sort()
                self._has_sent(owner)
        connection.open(row[writes.STREAM])
        self._pairs.setdefault((source, destination, port), connection)
        self._data[row[writes.STREAM]] = connection
        return connection

    def _note_key(self, connection: Connection, rkey: int) -> None:
        """Two connections with one key are queue pairs of one: neither can be read."""
        ends = (connection.sender, connection.receiver)
        found = [c for c in self.connections if (c.sender, c.receiver) == ends and rkey in c.keys]
        for one in (connection, *found) if found else ():
            _refuse(one)
        if rkey and len(connection.keys) < _MAX_KEYS:
            connection.keys.add(rkey)

    def _choose_role(self, connection: Connection, write: Write) -> None:
        """A ring, unless the room told or the framing is that of a send/recv. Of TCP connections
        nothing tells."""
        size = connection.size
        if write.flag or not write.length or connection.is_tcp:
            self._assign(connection, "ring")
        elif size is not None:
            is_transfer = _LL_ROOM < size <= RING_ROOM and write.protocol in (None, "Simple")
            self._assign(connection, "p2p" if is_transfer else "ring")
        elif write.protocol is None:
            return
        elif self.ring_of(connection) is not None:
            self._assign(connection, "p2p")
        elif write.length > MAX_MESSAGE_BYTES:
            self._assign(connection, "ring")

    def _assign(self, connection: Connection, role: str) -> None:
        connection.role = role
        owner: Ring | Transfers
        if role == "ring":
            found = self.ring_of(connection)
            if found is None:
                found = Ring(self._expected, self._place, self._on_doubt, self._options.record)
                self.rings.append(found)
            found.add_channel(connection)
            if found.rank_index is None:
                found.rank_index = self._ring_index(connection)
            owner = found
            if connection.data_qp is not None:
                self._has_sent(found)
        else:
            owner = self._transfers_of(connection)
            owner.add(connection)
        self._owners[id(connection)] = owner
        for write in self._held.pop(id(connection), []):
            self._give(connection, write)

    def _has_sent(self, ring: Ring) -> None:
        if ring not in self._expected.rings:
            self._expected.rings.append(ring)

    def _transfers_of(self, connection: Connection) -> Transfers:
        for transfers in self.transfers:
            if self._ranks.same(transfers.connections[0].sender, connection.sender):
                return transfers
        found = Transfers(self._expected, self._place, self._options.record)
        self.transfers.append(found)
        return found


def _refuse(connection: Connection) -> None:
    """Nothing of it is read."""
    connection.is_refused = True
    connection.pending.clear()
    connection.floating.clear()
    connection.headless.clear()

"""What a capture holds, in the words of `everystep tap decode --json`."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import ip_address
from pathlib import Path

import numpy as np

from everystep.cli.tap_record import Capture
from everystep.tap import capture, roce, sockets, writes
from everystep.tap.bpf import ROCE_PORT
from everystep.tap.collectives import Collective
from everystep.tap.connections import Connection
from everystep.tap.nccl import Decoder, Found, Options
from everystep.tap.packets import Parser
from everystep.tap.pieces import Messages, Packets, Reduced
from everystep.tap.reduced import Buffers
from everystep.tap.ring import Assembler
from everystep.tap.writes import Write
from everystep.types import Json

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4}
"""Names of element types and their bytes."""

KEPT = 64
"""Buffers in the making, and whole ones kept for their twins."""

_PACKET_KINDS = {
    "acknowledgements": "ACK",
    "requests": "WRITE",
    "READ responses": "READ_RESPONSE",
    "other transport": "UD_SEND_ONLY",
    "malformed": "malformed",
    "atomic": "ATOMIC",
}
"""What the tracker counts, in the words of the report."""

_NOT_ROCE = ("not RoCE", "wrong ICRC")


class Reader:
    """Reads one capture from beginning to end."""

    def __init__(
        self,
        options: Options,
        dtype: str,
        *,
        check_icrc: bool,
        check_tcp: bool = False,
        hosts: Sequence[str] = (),
    ) -> None:
        """`hosts`: IP addresses, that of rank 0 first.

        Raises UsageError for options that name no ring, Unsupported without compiled loops.
        """
        self.dtype = dtype
        self.buffers: dict[int, Reduced] = {}
        self._parser = Parser()
        self._tracker = roce.Tracker(check_icrc=check_icrc)
        self.sockets = sockets.Tracker(checksums=check_tcp)
        self._hosts = {str(ip_address(host)): rank for rank, host in enumerate(hosts)}
        self._named = 0
        self.decoder = Decoder(self._tracker, options)
        self._assembler = Assembler(behind=KEPT, finished=KEPT)
        self._made = Buffers(self._assembler)
        self._sums: dict[int, tuple[str | None, list[int]]] = {}
        self._summed = 0
        self._frames = 0
        self._roce_frames = 0
        self._ids: dict[int, int] = {}

    def read(self, path: Path) -> Capture:
        """Raises NotACapture where the file is none, or is damaged."""
        with capture.open(path) as file:
            for frames in file:
                self._frames += len(frames.table)
                packets = self._parser.parse(frames)
                self._roce_frames += _to_roce(packets)
                self._name_hosts()
                for tracker in (self._tracker, self.sockets):
                    for messages in tracker.feed(packets):
                        self._take(messages)
            self._take(self._tracker.flush())
            self._take(self.sockets.flush())
            self._put(self.decoder.finish())
        self._keep(self._made.give_up())
        return self._report(path)

    def _name_hosts(self) -> None:
        known, self._named = self._named, self._parser.address_count
        for address in range(known, self._named):
            rank = self._hosts.get(self._parser.address(address).ip)
            if rank is not None:
                self.decoder.name(address, rank)

    def _take(self, messages: Messages) -> None:
        found = self.decoder.feed(messages)
        for write in self.decoder.sorted.writes[self._summed :]:
            self._sums[id(write)] = write.protocol, list(_sums(write))
        self._summed = len(self.decoder.sorted.writes)
        self._put(found)

    def _put(self, events: Iterable[Found]) -> None:
        self._keep(self._made.take(events))

    def _keep(self, given: Iterable[Reduced]) -> None:
        for reduced in given:
            self.buffers.setdefault(reduced.collective, reduced)

    # ------------------------------------------------------------ the report

    def _report(self, path: Path) -> Capture:
        collectives = self._collectives()
        writes = self.decoder.sorted.writes
        return Capture(
            capture=path.name,
            frames=self._frames,
            roce_frames=self._roce_frames,
            packet_kinds=self._kinds(),
            path_mtu=max((write.mtu for write in writes), default=0),
            world_size=self.decoder.options.ranks,
            ranks=self._ranks(),
            directions=self._directions(),
            dtype=self.dtype,
            connections=[self._connection(c) for c in self._in_order()],
            messages=self._messages(),
            collectives=collectives,
            reduced=[self._reduced(number) for number in sorted(self.buffers)],
            doubts=[doubt.collective for doubt in self.decoder.doubts],
            mismatches=[
                {"index": m.collective, "at": m.at, "frames": list(m.frames)}
                for m in self._assembler.alarms
            ],
            sockets=self.sockets.counts(),
            contradicted=self.decoder.contradicted,
        )

    def _kinds(self) -> dict[str, int]:
        counts = self._tracker.counts()
        found = {name: counts[key] for key, name in _PACKET_KINDS.items() if counts[key]}
        noise = sum(counts[key] for key in _NOT_ROCE)
        if noise:
            found["not RoCE (ICRC/version)"] = noise
        return found

    def _mac(self, address: int) -> str:
        return self._parser.address(address).mac

    def _ranks(self) -> list[dict[str, Json]]:
        rank_of = self.decoder.sorted.rank_of
        return [
            {"rank": rank, "macs": sorted(self._mac(a) for a in rank_of if rank_of[a] == rank)}
            for rank in sorted(set(rank_of.values()))
        ]

    def _directions(self) -> list[str]:
        rank_of = self.decoder.sorted.rank_of
        ends = {
            (rank_of.get(c.sender), rank_of.get(c.receiver))
            for c in self.decoder.sorted.connections
            if c.messages
        }
        return sorted(f"rank {_known(a)} -> rank {_known(b)}" for a, b in ends)

    # ------------------------------------------------------------ connections

    def _in_order(self) -> list[Connection]:
        """By first message of data; then those of which only clear-to-send records were seen."""
        first: dict[int, int] = {}
        for write in self.decoder.sorted.writes:
            connection = id(self._connection_of(write))
            first[connection] = min(write.frame, first.get(connection, write.frame))
        known = self.decoder.sorted.connections
        seen = [c for c in known if id(c) in first]
        return [
            *sorted(seen, key=lambda c: first[id(c)]),
            *(c for c in known if id(c) not in first),
        ]

    def _connection_of(self, write: Write) -> Connection:
        return self.decoder.sorted.connection(write.stream)

    def _connection(self, connection: Connection) -> dict[str, Json]:
        role = connection.role or "unknown"
        if not connection.messages:
            role += " (only its CTS and acks are seen)"
        return {
            "sender": self._mac(connection.sender),
            "receiver": self._mac(connection.receiver),
            "sender_rank": self.decoder.sorted.rank_of.get(connection.sender),
            "data_qp": connection.data_qp,
            "cts_qp": connection.cts_qp,
            "udp_sport": connection.source_port,
            "role": role,
            "channel": self._channel(connection),
            "messages": connection.messages,
            "cts": connection.cts,
        }

    def _channel(self, connection: Connection) -> int | None:
        for ring in self.decoder.sorted.rings:
            if connection in ring.channels:
                return ring.channels.index(connection)
        return None

    # ------------------------------------------------------------ collectives

    def _collectives(self) -> list[dict[str, Json]]:
        """Those of rings in the order of their first frame, then transfers; fills `_ids`."""
        merged: dict[tuple[str, int, int], list[Collective]] = {}
        place = {id(c): i for i, c in enumerate(self._in_order())}
        for number, ring in enumerate(self.decoder.sorted.rings):
            for found in ring.collectives:
                key = (found.kind, found.number, number if found.kind == "other" else -1)
                merged.setdefault(key, []).append(found)
        in_rings = sorted(merged.values(), key=_first_frame)
        transfers = [[found] for one in self.decoder.sorted.transfers for found in one.collectives]
        reports: list[dict[str, Json]] = []
        for parts in [*in_rings, *sorted(transfers, key=_first_frame)]:
            writes = [write for part in parts for write in part.writes or []]
            if not writes:
                continue
            writes.sort(key=lambda w: (place[id(self._connection_of(w))], w.position or 0, w.frame))
            self._ids.update((id(part), len(reports)) for part in parts)
            report: dict[str, Json] = {"id": len(reports), "kind": parts[0].kind}
            if parts[0].what is not None:
                report["what"] = parts[0].what
            if parts[0].kind in ("allreduce", "p2p"):
                report["index"] = parts[0].number
            report["frames"] = [write.frame for write in writes]
            reports.append(report)
        return reports

    # ------------------------------------------------------------ messages

    def _messages(self) -> list[dict[str, Json]]:
        records: dict[int, dict[str, Json]] = {}
        for write, record in self.decoder.sorted.records:
            report = records.get(write.frame)
            if report is None:
                report = {**self._plain(write, "cts"), "crc32": zlib.crc32(write.data.data)}
                report["cts"] = {name: getattr(record, name) for name in record.__struct_fields__}
                records[write.frame] = report
        found = [*records.values(), *map(self._message, self.decoder.sorted.writes)]
        return sorted(found, key=lambda report: int(report["frame"]))

    def _plain(self, write: Write, kind: str) -> dict[str, Json]:
        source, _destination, qp, _port = self.decoder.sorted.streams[write.stream]
        return {
            "frame": write.frame,
            "last_frame": write.last_frame,
            "src": self._mac(source),
            "qp": qp,
            "kind": kind,
            "va": write.row[writes.VA] if write.has_head else None,
            "rkey": write.rkey if write.has_head else None,
            "length": write.length,
            "imm": write.immediate,
            "flag": write.flag or None,
            "psn": write.psn,
            "packets": write.packets,
            "complete": write.complete,
        }

    def _message(self, write: Write) -> dict[str, Json]:
        kind = {"LL": "LL", "LL128": "LL128"}.get(str(write.protocol), "raw")
        report = self._plain(write, kind if write.length else "empty")
        protocol, sums = self._sums[id(write)]
        if protocol != write.protocol:  # it became known later, and what it holds was copied
            sums = list(_sums(write))
        if write.complete:
            report["crc32"] = sums[0] if sums else 0
        else:
            report["crc32"] = None
            report["present"] = [
                {"start": start + write.offset, "stop": stop + write.offset, "crc32": crc}
                for (start, stop), crc in zip(write.ranges, sums, strict=True)
            ]
            report["lost_inside"] = write.lost_inside()
        if write.is_split:
            report |= {"adaptive_routing": True, "imm_frame": write.immediate_frame}
        connection = self._connection_of(write)
        if connection.role == "ring":
            report["channel"] = self._channel(connection)
            if write.position is not None and connection.lead is not None:
                report["step"] = write.position + connection.lead
        return report | self._place(write)

    def _place(self, write: Write) -> dict[str, Json]:
        collective, sent = write.collective, write.sent
        if collective is None:
            return {}
        report: dict[str, Json] = {"collective": self._ids.get(id(collective))}
        if sent is not None:
            if collective.kind == "allreduce":
                report |= {"ring_step": sent.ring_step, "chunk": sent.chunk}
            report |= {"start": sent.start, "stop": sent.stop}
            if collective.kind != "broadcast":
                report["reduced"] = sent.reduced
        return report

    # ------------------------------------------------------------ buffers

    def _reduced(self, number: int) -> dict[str, Json]:
        reduced = self.buffers[number]
        e = DTYPES[self.dtype]
        present: list[dict[str, Json]] = []
        missing, at = [], 0
        for start, stop in reduced.present:
            start, stop = -(-start // e) * e, stop // e * e  # whole elements
            if start >= stop:
                continue
            if start > at:
                missing.append({"start": at // e, "stop": start // e})
            at = stop
            data = reduced.data[start:stop].tobytes()
            present.append(
                {
                    "start": start // e,
                    "stop": stop // e,
                    "crc32": zlib.crc32(data),
                    "sha256": hashlib.sha256(data).hexdigest(),
                }
            )
        if at < len(reduced.data):
            missing.append({"start": at // e, "stop": len(reduced.data) // e})
        return {
            "index": number,
            "count": len(reduced.data) // e,
            "dtype": self.dtype,
            "present": present,
            "missing": missing,
            "sources": self._sources(number, e),
        }

    def _sources(self, number: int, e: int) -> list[dict[str, Json]]:
        found = []
        for write in self.decoder.sorted.writes:
            collective, sent = write.collective, write.sent
            if not write.is_used or collective is None or sent is None:
                continue
            if collective.number == number:
                rank = self.decoder.sorted.rank_of.get(self._connection_of(write).sender)
                source = "p2p"
                if collective.kind == "allreduce":
                    source = f"ring step {sent.ring_step} of rank {_known(rank)}"
                for a, b in write.data_ranges((sent.stop - sent.start) * e):
                    found.append((sent.start + a // e, sent.start + b // e, write.frame, source))
        return [
            {"start": start, "stop": stop, "frame": frame, "source": source}
            for start, stop, frame, source in sorted(found)
        ]


def _to_roce(packets: Packets) -> int:
    table = packets.table
    return int(((table["protocol"] == 17) & (table["destination_port"] == ROCE_PORT)).sum())


def _known(rank: int | None) -> str:
    return "?" if rank is None else str(rank)


def _first_frame(parts: list[Collective]) -> int:
    return min((write.frame for part in parts for write in part.writes or []), default=0)


def _sums(write: Write) -> Iterator[int]:
    """CRC of the data of each present range, flags left out; of the whole if it is complete."""
    if write.complete:
        yield zlib.crc32(np.ascontiguousarray(write.data).data)
        return
    for start, stop in write.ranges:
        yield zlib.crc32(np.ascontiguousarray(write.data_between(start, stop)).data)

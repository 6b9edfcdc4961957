"""What a journal holds: records, and the one form in which every journal keeps them.

A record is turned into a `Row` when it is handed over, in the caller's thread:
what cannot be kept is refused before anything is queued, and a mapping that the
caller changes afterwards changes nothing in the journal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from remit.core.errors import DuplicateTerminalEvent, InvalidArgument
from remit.core.events import EVENTS_VERSION

__all__ = [
    "JournalRecord",
    "Row",
    "StoredRecord",
    "StoredSnapshot",
    "decode_data",
    "decode_many",
    "duplicate_terminal",
    "encode_records",
]

Row: TypeAlias = tuple[int, str, str, str, int, str, bytes | None]
"""`at_unix_ms`, `kind`, `node_id`, `turn_id`, `terminal` as 0 or 1, `data` as JSON text, `payload`."""

_MAX_PAYLOAD_BYTES = 512 * 1024 * 1024
"""Half of what SQLite takes in one row by default (https://www.sqlite.org/limits.html)."""
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def _make_encoder() -> Callable[[Any], str]:
    """Return a function that writes a value as compact JSON text.

    `JSONEncoder.encode` makes a new encoder in C for each value, which takes as
    long as writing one of ours. Where the standard library has none in C, that is used.
    """
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return _JSON.encode
    # Arguments as `JSONEncoder.iterencode` gives them; without markers a cycle ends as RecursionError.
    encode = make(None, _JSON.default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, False)
    return lambda value: "".join(encode(value, 0))


_encode = _make_encoder()


class JournalRecord(NamedTuple):
    """One record to be written. The journal does not look at what it means.

    A named tuple, since thousands are made in a second: a third of a frozen dataclass's cost.
    """

    kind: str
    """What happened, as a stable word."""
    node_id: str
    """The turn or run it is about; the empty text for the coordinator itself."""
    turn_id: str
    """The turn whose tree that is in; the empty text for the coordinator itself."""
    at_unix_ms: int
    """When it happened, in milliseconds since 1970, by the clock of whoever wrote it."""
    data: Mapping[str, Any]
    """Everything else: values that JSON has, without NaN and infinities."""
    terminal: bool = False
    """Whether it ends its node; a journal holds at most one such record for each node."""
    payload: bytes | None = None
    """Bytes kept beside the record and read apart from it, such as a pickled result."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One record as it stands in a journal, without its payload."""

    seq: int
    """Place in the journal, from 1; written without gaps, which retention may make."""
    epoch: int
    """Life of the writer that wrote it, from 1."""
    kind: str
    """As in `JournalRecord`."""
    node_id: str
    """As in `JournalRecord`."""
    turn_id: str
    """As in `JournalRecord`."""
    at_unix_ms: int
    """As in `JournalRecord`."""
    data: Mapping[str, Any]
    """As in `JournalRecord`, read back from JSON: tuples have become lists."""
    terminal: bool = False
    """As in `JournalRecord`."""
    version: int = EVENTS_VERSION
    """Version of the events in which `data` was written."""

    @property
    def record(self) -> JournalRecord:
        """The record as it was written, without its payload."""
        return JournalRecord(
            kind=self.kind,
            node_id=self.node_id,
            turn_id=self.turn_id,
            at_unix_ms=self.at_unix_ms,
            data=self.data,
            terminal=self.terminal,
        )


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A state that was kept, so that what led to it need not be read."""

    seq: int
    """Place of the last record that is part of it."""
    at_unix_ms: int
    """When it was kept, in milliseconds since 1970."""
    data: bytes
    """What `Journal.save_snapshot` was given."""


def encode_records(records: Sequence[JournalRecord]) -> list[Row]:
    """Turn records into rows, all or none.

    Args:
        records: in the order in which they shall stand in the journal.

    Raises:
        InvalidArgument: a field has the wrong type, the data is not JSON, or the
            payload is larger than 512 MiB.
    """
    encode = _encode
    rows: list[Row] = []
    for record in records:
        at_unix_ms, kind, node_id, turn_id = record.at_unix_ms, record.kind, record.node_id, record.turn_id
        data, payload = record.data, record.payload
        # The hottest lines of the journal: one cheap test, and the reasons only when it fails.
        try:
            is_good = (kind + node_id + turn_id).isascii() and type(at_unix_ms) is int and at_unix_ms.bit_length() < 64
            if not is_good or (payload is not None and not _is_payload(payload)):
                raise _refusal(record)
            text = encode(data if type(data) is dict else dict(data))
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise _refusal(record, error) from error
        # A boolean would take SQLite's slow way for types that it does not know.
        rows.append((at_unix_ms, kind, node_id, turn_id, 1 if record.terminal else 0, text, payload))
    return rows


def decode_data(text: str) -> dict[str, Any]:
    """Read back the data of a row.

    Args:
        text: JSON text that `encode_records` made.
    """
    data: dict[str, Any] = json.loads(text)
    return data


def decode_many(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Read back the data of many rows: three times as fast as one by one.

    Args:
        texts: JSON texts that `encode_records` made.
    """
    data: list[dict[str, Any]] = json.loads(f"[{','.join(texts)}]")
    return data


def duplicate_terminal(node_id: str, kind: str) -> DuplicateTerminalEvent:
    """Return the error that a batch with a second end of one node gets.

    Args:
        node_id: the node that has ended already; also an attribute of the error.
        kind: kind of the record that was refused.
    """
    return DuplicateTerminalEvent(
        f"{node_id!r} already has its terminal event; a batch with a second one ({kind!r}) was refused",
        node_id=node_id,
    )


def _is_payload(payload: bytes) -> bool:
    return type(payload) is bytes and len(payload) <= _MAX_PAYLOAD_BYTES


def _refusal(record: JournalRecord, error: Exception | None = None) -> InvalidArgument:
    """Say what is wrong with a record that cannot be kept."""
    texts: tuple[Any, ...] = (record.kind, record.node_id, record.turn_id)
    if not all(isinstance(text, str) and text.isascii() for text in texts):
        return InvalidArgument(f"kind, node_id and turn_id must be ASCII texts, got {texts!r}")
    what = f"a {record.kind!r} record of {record.node_id!r}"
    if type(record.at_unix_ms) is not int or record.at_unix_ms.bit_length() >= 64:
        return InvalidArgument(f"at_unix_ms of {what} must be an integer of 64 bits, got {record.at_unix_ms!r}")
    if record.payload is not None and not _is_payload(record.payload):
        return InvalidArgument(f"the payload of {what} must be bytes, and {_MAX_PAYLOAD_BYTES} of them at most")
    return InvalidArgument(
        f"the data of {what} is not JSON: {error}; "
        "hand over texts, finite numbers, booleans, None, and lists and mappings of such"
    )

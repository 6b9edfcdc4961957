"""The decider's state as bytes, so that recovery need not fold everything that ever happened.

Two steps: `freeze` copies what can change, on the coordinator's loop, in about
two microseconds a node; `encode` turns the copy into bytes, in any thread.

What is kept is what a fold would have: the waiting rooms are left by events that
nobody writes (see `state.py`), so who is parked stands in the queue again, and
who resumes waits again.

Fields with their default value are left out, and every other one is kept by its
name. So a field can be added to the state without a thought for snapshots; a
snapshot of a newer version that has one which this version lacks is refused.
"""

from __future__ import annotations

import json
import operator
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, TypeGuard, cast

from remit.coordinator import conversation as conversation_module
from remit.coordinator import state as state_module
from remit.coordinator.state import Node, NodeState, Pool, WorkspaceState
from remit.core import records as records_module
from remit.core.cause import CauseKind
from remit.core.errors import InternalError, JournalError, JournalTooNew
from remit.locks import LockTable

__all__ = ["SNAPSHOT_VERSION", "FrozenState", "decode", "encode", "freeze"]

SNAPSHOT_VERSION = 1
"""Version of the encoding; a new field of the state is no step."""

_NODE_FIELDS = tuple(name for name in Node.__slots__ if name != "parked")
_READ_NODE: Callable[[Node], tuple[Any, ...]] = operator.attrgetter(*_NODE_FIELDS)
_NODE_DEFAULTS = _READ_NODE(Node("", "", "", 0.0))
_STATE_AT = _NODE_FIELDS.index("state")

_APART = frozenset({"nodes", "turns", "locks", "queues", "resuming", "parking", "refused"})
"""Attributes of the state that are kept in their own way, or are no part of the fold."""


def _is_kept(found: object) -> TypeGuard[type[Any]]:
    """Tell whether something is a class whose values snapshots hold by their fields."""
    if not isinstance(found, type):
        return False
    kind = cast("type[Any]", found)
    return is_dataclass(kind) or issubclass(kind, Enum) or hasattr(kind, "_fields")


_CLASSES: dict[str, type[Any]] = {
    found.__name__: found
    for module in (state_module, conversation_module, records_module)
    for found in (*vars(module).values(), CauseKind)
    if _is_kept(found)
}
"""What may stand in a snapshot beside plain data: the values of the state, by name."""

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class FrozenState:
    """A copy of a state that nothing changes any more."""

    nodes: list[tuple[Any, ...]]
    queues: dict[str, list[str]]
    locks: dict[str, Any]
    rest: dict[str, Any]


def freeze(state: WorkspaceState) -> FrozenState:
    """Return a copy of everything in a state that a fold of its events would give."""
    parked: dict[Pool, list[str]] = {pool: [] for pool in Pool}
    nodes: list[tuple[Any, ...]] = []
    for node in state.nodes.values():
        if node.parked:
            for name in node.parked:
                parked[state.nodes[name].pool].append(name)
        values = _READ_NODE(node)
        if node.live_children or node.processes or node.dependents:
            values = tuple(_copied(value) for value in values)
        nodes.append(values)
    return FrozenState(
        nodes=nodes,
        # Who is parked had come to the head of the queue.
        queues={pool.value: [*parked[pool], *state.queues[pool]] for pool in Pool},
        locks=state.locks.to_dict(),
        rest={name: _pack(value) for name, value in vars(state).items() if name not in _APART},
    )


def _copied(value: Any) -> Any:
    return value.copy() if value.__class__ in (dict, list) else value


def encode(frozen: FrozenState) -> bytes:
    """Return a frozen state as bytes.

    Raises:
        InternalError: a value in it is of a class that snapshots do not know.
    """
    document = {
        "version": SNAPSHOT_VERSION,
        "nodes": [_pack_node(values) for values in frozen.nodes],
        "queues": frozen.queues,
        "locks": frozen.locks,
        "rest": frozen.rest,
    }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True)
    return zlib.compress(text.encode("ascii"), 1)


def decode(data: bytes) -> WorkspaceState:
    """Return the state that was encoded.

    Raises:
        JournalTooNew: a newer version has written it.
        JournalError: it is damaged.
    """
    try:
        document = json.loads(zlib.decompress(data))
        version = document["version"]
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise JournalError(
            f"the snapshot in the journal is damaged: {error}; restore the journal from a copy"
        ) from error
    if version > SNAPSHOT_VERSION:
        raise JournalTooNew(
            f"the snapshot in the journal has version {version}, this version knows them up to {SNAPSHOT_VERSION}; "
            "install the newer remit that wrote it"
        )
    state = WorkspaceState()
    for values in document["nodes"]:
        node = Node("", "", "", 0.0)
        _fill(node, values, Node.__slots__)
        state.nodes[node.id] = node
        if node.is_turn:
            state.turns[node.id] = node
    for pool, names in document["queues"].items():
        state.queues[Pool(pool)] = dict.fromkeys(names)
    state.locks = LockTable.from_dict(document["locks"])
    _fill(state, document["rest"], vars(state))
    return state


def _fill(target: object, values: Mapping[str, Any], known: Any) -> None:
    for name, value in values.items():
        if name not in known:
            raise JournalTooNew(
                f"the snapshot in the journal has {name!r}, which this version does not know; "
                "install the newer remit that wrote it"
            )
        setattr(target, name, value if type(value) in _PLAIN else _unpack(value))


def _pack_node(values: tuple[Any, ...]) -> dict[str, Any]:
    packed: dict[str, Any] = {}
    for name, value, default in zip(_NODE_FIELDS, values, _NODE_DEFAULTS, strict=True):
        if value is default or value == default:
            continue
        packed[name] = value if type(value) in _PLAIN else _pack(value)
    if values[_STATE_AT] is NodeState.RESUMING:
        packed["state"] = _pack(NodeState.WAITING)
    return packed


def _pack(value: Any) -> Any:
    """Return a value as JSON has it; what JSON lacks becomes a mapping with one telling key."""
    kind = value.__class__
    if kind in _PLAIN:
        return value
    if isinstance(value, Enum):
        return {"$e": [_known(kind), value.value]}
    if kind is tuple or kind is list or kind is deque:
        items = [_pack(item) for item in value]
        return items if kind is list else {"$t" if kind is tuple else "$q": items}
    if _is_mapping(value):
        pairs = list(value.items())
        if all(item is None for _, item in pairs):
            return {"$k": [_pack(key) for key, _ in pairs]}
        return {"$m": [[_pack(key), _pack(item)] for key, item in pairs]}
    if isinstance(value, tuple):
        return {"$n": [_known(kind), *(_pack(item) for item in cast("tuple[object, ...]", value))]}
    return {"$o": [_known(kind), {each.name: _pack(getattr(value, each.name)) for each in fields(value)}]}


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _known(kind: type[Any]) -> str:
    if _CLASSES.get(kind.__name__) is not kind:
        raise InternalError(f"a snapshot cannot hold a {kind.__name__}; define it in remit.coordinator.state")
    return kind.__name__


def _unpack(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if value.__class__ is list:
        return [_unpack(item) for item in value]
    ((tag, body),) = value.items()
    if tag == "$n":
        return _CLASSES[body[0]](*(_unpack(item) for item in body[1:]))
    if tag == "$k":
        return dict.fromkeys(_unpack(key) for key in body)
    if tag == "$m":
        return {_unpack(key): _unpack(item) for key, item in body}
    if tag == "$t":
        return tuple(_unpack(item) for item in body)
    if tag == "$q":
        return deque(_unpack(item) for item in body)
    name, content = body
    if name not in _CLASSES:
        raise JournalTooNew(f"the snapshot in the journal holds a {name!r}, which this version does not know")
    if tag == "$e":
        return _CLASSES[name](content)
    try:
        return _CLASSES[name](**{key: _unpack(item) for key, item in content.items()})
    except TypeError as error:
        raise JournalTooNew(f"the snapshot in the journal holds a newer {name!r}: {error}") from error

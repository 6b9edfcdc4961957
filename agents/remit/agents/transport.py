"""Agents on their way to a host: by reference where an import gives the same, else by value."""

from __future__ import annotations

import hashlib
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from remit.agents.definition import AgentDefinition, load_agent
from remit.agents.payload import decode, encode_agent
from remit.core.errors import RemitError
from remit.core.limits import Limits
from remit.core.messages import dumps, loads
from remit.locks import Claim

__all__ = ["AgentBundle", "CodeChanged", "bundle", "unbundle"]


class CodeChanged(RemitError):
    """An agent's module was edited after the caller had loaded it."""

    code = "code_changed"


@dataclass(frozen=True, slots=True)
class AgentBundle:
    """An agent, packed."""

    key: str
    """Equal for equal agents."""
    name: str
    blob: bytes
    isolation: str
    resources_key: str
    limits: Limits | None
    claims: tuple[Claim, ...]
    check_arguments: Callable[[Mapping[str, Any]], None]


_packed: weakref.WeakKeyDictionary[Any, AgentBundle] = weakref.WeakKeyDictionary()


def bundle(agent: Any) -> AgentBundle:
    """Pack an agent; the same object is packed once.

    Raises:
        ArgumentNotPicklable: it refers to something that cannot be pickled.
    """
    found = _packed.get(agent)
    if found is not None:
        return found
    blob = _reference_blob(agent) or dumps(("value", encode_agent(agent, agent.name)))
    packed = AgentBundle(
        key=hashlib.sha256(blob).hexdigest()[:16],
        name=agent.name,
        blob=blob,
        isolation=agent.isolation,
        resources_key=agent.resources_key,
        limits=agent.limits,
        claims=agent.claims,
        check_arguments=agent.argument_check(),
    )
    _packed[agent] = packed
    return packed


def _reference_blob(agent: Any) -> bytes | None:
    if not isinstance(agent, AgentDefinition):
        return None
    reference = agent.reference()
    if reference is None:
        return None
    return dumps(("reference", *reference, _file_state(reference[0])))


def _file_state(module_name: str) -> tuple[int, int] | None:
    """Return (mtime in ns, size in bytes) of a module's file, or None if it has none."""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if not file:
        return None
    try:
        status = os.stat(file)
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size)


def unbundle(blob: bytes) -> Any:
    """Return the agent behind a bundle, importing its module if need be.

    Raises:
        UnknownAgent: its module or name is not there.
        CodeChanged: its module's file is not the one that the caller had loaded.
    """
    form, *rest = loads(blob)
    if form == "value":
        return decode(rest[0])
    module_name, qualname, expected = rest
    agent = load_agent(f"{module_name}:{qualname}")
    found = _file_state(module_name)
    if expected is not None and found is not None and found != expected:
        raise CodeChanged(
            f"module {module_name!r} was edited after the caller had loaded it; "
            "start the caller again to run the new version"
        )
    return agent

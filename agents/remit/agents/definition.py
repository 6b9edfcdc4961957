"""Agents: what a run executes, and how it wants to be hosted."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from remit.agents.wishes import checked_claims
from remit.core.errors import InvalidArgument, UnknownAgent
from remit.core.limits import Limits
from remit.locks import Claim

__all__ = ["AgentDefinition", "Isolation", "agent", "as_agent", "load_agent"]

Isolation = Literal["shared", "actor"]


@dataclass(frozen=True, eq=False)
class AgentDefinition:
    """An agent made of a Python function. Calling it calls the function, here and now."""

    fn: Callable[..., Any]
    """The body: `async def` or `def`, with the run context first."""
    name: str
    """Shown in trees and traces."""
    isolation: Isolation
    """`shared`: many runs in one host. `actor`: a host to itself, which can be killed."""
    is_async: bool
    """Whether the body is a coroutine function."""
    limits: Limits | None = None
    """For what it delegates in turn."""
    resources: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`num_cpus`, `num_gpus`, `runtime_env` for the host, as Ray takes them."""
    claims: tuple[Claim, ...] = ()
    """Paths that a run of it must hold before it takes a slot; with fields from its arguments."""

    def __post_init__(self) -> None:
        """Look like the function, so that editors and tracebacks name it."""
        for attribute in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(self.fn, attribute):
                object.__setattr__(self, attribute, getattr(self.fn, attribute))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, without delegating."""
        return self.fn(*args, **kwargs)

    @property
    def resources_key(self) -> str:
        """Return the resources as a text that is equal for equal needs."""
        return json.dumps(self.resources, sort_keys=True) if self.resources else ""

    def argument_check(self) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that refuses arguments which the body's signature does not take.

        It raises `InvalidArgument`, naming what is missing or unknown.
        """
        signature = inspect.signature(self.fn)
        exact = _exact_names(signature)

        def check(arguments: Mapping[str, Any]) -> None:
            # Binding costs as much as a run; plain signatures need only their names.
            if exact is not None and exact[0] <= arguments.keys() <= exact[1]:
                return
            try:
                signature.bind(None, **arguments)
            except TypeError as error:
                given = ", ".join(arguments) or "no arguments"
                raise InvalidArgument(f"agent {self.name!r} cannot be called with ({given}): {error}") from None

        return check

    def reference(self) -> tuple[str, str] | None:
        """Return (module, name) if importing that gives this very agent, else None."""
        module_name = getattr(self.fn, "__module__", None)
        qualname = getattr(self.fn, "__qualname__", "")
        if not module_name or module_name == "__main__" or "<" in qualname:
            return None
        found: Any = sys.modules.get(module_name)
        for part in qualname.split("."):
            found = getattr(found, part, None)
        return (module_name, qualname) if found is self or found is self.fn else None


def _exact_names(signature: inspect.Signature) -> tuple[frozenset[str], frozenset[str]] | None:
    """Return (required, allowed) names behind the context, or None if names alone do not decide."""
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(signature.parameters.values())
    first_is_context = bool(parameters) and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    if not first_is_context or any(parameter.kind not in plain for parameter in parameters):
        return None
    rest = parameters[1:]
    required = frozenset(p.name for p in rest if p.default is inspect.Parameter.empty)
    return required, frozenset(p.name for p in rest)


@overload
def agent(fn: Callable[..., Any], /) -> AgentDefinition: ...


@overload
def agent(
    *,
    name: str | None = None,
    isolation: Isolation | None = None,
    limits: Limits | None = None,
    claims: Claim | Sequence[Claim] = (),
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], AgentDefinition]: ...


def agent(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    isolation: Isolation | None = None,
    limits: Limits | None = None,
    claims: Claim | Sequence[Claim] = (),
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> AgentDefinition | Callable[[Callable[..., Any]], AgentDefinition]:
    """Make an agent of a function: `@agent` or `@agent(name=..., isolation=...)`.

    The function's first parameter is the run context. An `async def` body is
    cancelled at its awaits; a plain `def` body runs in a thread of a host of its
    own, must look at `ctx.signal`, and is killed with the host if it does not.

    Args:
        fn: the function.
        name: shown in trees and traces; the function's name by default.
        isolation: `shared` (default for `async def`) or `actor` (default for `def`,
            and whenever resources are asked for).
        limits: for what the agent delegates in turn.
        claims: paths that a run holds from before it takes a slot until it has ended;
            `write("{path}")` is filled from its arguments.
        num_cpus: CPUs that Ray reserves for its host; None for none.
        num_gpus: GPUs that Ray reserves for its host; None for none.
        runtime_env: Ray runtime environment for its host.

    Raises:
        InvalidArgument: not a function, a generator, or a contradiction.
    """
    if fn is None:

        def decorate(body: Callable[..., Any]) -> AgentDefinition:
            return agent_of(
                body,
                name=name,
                isolation=isolation,
                limits=limits,
                claims=claims,
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                runtime_env=runtime_env,
            )

        return decorate
    return agent_of(fn)


def agent_of(
    fn: Callable[..., Any],
    *,
    name: str | None = None,
    isolation: Isolation | None = None,
    limits: Limits | None = None,
    claims: Claim | Sequence[Claim] = (),
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> AgentDefinition:
    """Check a function and wrap it; see `agent`."""
    if isinstance(fn, AgentDefinition):
        fn = fn.fn
    if inspect.isclass(fn) or not hasattr(fn, "__call__"):  # noqa: B004 - a caller may pass anything at all
        raise InvalidArgument(f"an agent is made of a function, not of {fn!r}")
    label = name or str(getattr(fn, "__name__", type(fn).__name__))
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise InvalidArgument(f"agent {label!r} is a generator; return a value, and use ctx.partial() on the way")
    if isolation not in (None, "shared", "actor"):
        raise InvalidArgument(f"isolation of {label!r} must be 'shared' or 'actor', not {isolation!r}")
    is_async = inspect.iscoroutinefunction(fn)
    wanted = {"num_cpus": num_cpus, "num_gpus": num_gpus, "runtime_env": runtime_env}
    resources = {key: value for key, value in wanted.items() if value is not None}
    if isolation == "shared" and (resources or not is_async):
        what = "resources" if resources else "a plain function"
        raise InvalidArgument(
            f"agent {label!r}: {what} and isolation='shared' exclude each other; "
            "only a host of its own can be killed or sized"
        )
    alone = isolation == "actor" or bool(resources) or not is_async
    return AgentDefinition(
        fn=fn,
        name=label,
        isolation="actor" if alone else "shared",
        is_async=is_async,
        limits=limits,
        resources=resources,
        claims=checked_claims(claims),
    )


def load_agent(place: str) -> AgentDefinition:
    """Import an agent from `module:function`; an undecorated function is made one.

    Raises:
        UnknownAgent: no such module, or nothing callable of that name in it.
    """
    module_name, _, qualname = place.partition(":")
    if not module_name or not qualname:
        raise UnknownAgent(f"{place!r} is not of the form module:function")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise UnknownAgent(f"cannot import {module_name!r} for agent {place!r}: {error}") from error
    for part in qualname.split("."):
        if not hasattr(found, part):
            raise UnknownAgent(f"module {module_name!r} has no {qualname!r} for agent {place!r}")
        found = getattr(found, part)
    if isinstance(found, AgentDefinition):
        return found
    if not callable(found):
        raise UnknownAgent(f"{place!r} is a {type(found).__name__}, not a function")
    return agent_of(found)


def as_agent(candidate: object) -> Any:
    """Return an agent for whatever a caller handed to `delegate`.

    Raises:
        InvalidArgument: it is neither an agent nor the place of one.
        UnknownAgent: a `module:function` text that leads nowhere.
    """
    if isinstance(candidate, str):
        return load_agent(candidate)
    if isinstance(candidate, AgentDefinition) or hasattr(candidate, "run_command_agent"):
        return candidate
    raise InvalidArgument(
        f"{candidate!r} is not an agent: decorate the function with @agent, "
        "make a CommandAgent, or pass 'module:function'"
    )

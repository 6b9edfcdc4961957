"""Everything that touches Ray: the two actors, their links, and connecting.

Measured with Ray 2.60, and why this looks as it does: each concurrency group of an
async actor has its own thread and event loop, so `control` is heard while bodies
block the main one; `ray.cancel` is never used, since async actors lose cancels
that come too early; a dead actor is noticed by a call that is parked in it. A call
to an actor that is being restarted fails with `ActorUnavailableError`, to one that
is gone for good with `ActorDiedError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any, Self

import ray as _ray
from ray.exceptions import ActorDiedError, RayError

from remit.agents.collector import tune_collector
from remit.coordinator.engine import ClusterNode, Swept
from remit.coordinator.life import Life, LoopScheduler
from remit.coordinator.programs import Programs
from remit.coordinator.service import ServiceOptions
from remit.coordinator.transaction import Settings
from remit.core.errors import CoordinatorUnavailable
from remit.core.limits import Limits
from remit.core.messages import HostInventory
from remit.locks import Area
from remit.telemetry.settings import TelemetrySettings, forwarded

__all__ = ["RayLink", "connect", "coordinator_name", "disconnect", "find_coordinator"]

# Ray's own annotations are incomplete, and wrong in places.
ray: Any = _ray

logger = logging.getLogger("remit.ray")

NAMESPACE = "remit"
_MANY = 100_000
"""Parked calls an actor may hold: one poll a client, one watch a host."""
_SWEEP_S = 60.0
_SPAWN_TIMEOUT_S = 120.0
_TERMINATED_S = 4.0
"""Seconds that everything has to end in once a coordinator was sent SIGTERM; `ray stop` kills after sixteen."""
_END_S = 5.0
"""Seconds that the bodies of a host have that ends itself."""


def coordinator_name(workspace: str) -> str:
    """Return the name of a workspace's coordinator actor."""
    return "coordinator-" + _workspace_key(workspace)


def _workspace_key(workspace: str) -> str:
    return hashlib.sha256(workspace.encode()).hexdigest()[:16]


def host_name(workspace: str, host_id: str) -> str:
    """Return the name of an agent host's actor; its id is in the journal, so any life finds it again."""
    return f"host-{_workspace_key(workspace)}-{host_id}"


class RayLink:
    """A link to a coordinator actor; see `remit.agents.link.Link`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def point_to(self, actor: Any) -> None:
        """Send to another actor from now on: the coordinator was begun anew under its name."""
        self._actor = actor

    def submit(self, method: str, blob: bytes) -> Future[bytes]:
        """Send a request and return a future of its answer."""
        outer: Future[bytes] = Future()
        try:
            inner: Future[bytes] = self._actor.call.remote(method, blob).future()
        except RayError as error:
            outer.set_exception(_unavailable(error))
            return outer

        def done(future: Future[bytes]) -> None:
            if outer.cancelled():
                return
            error = future.exception()
            if error is None:
                outer.set_result(future.result())
            else:
                outer.set_exception(_unavailable(error))

        # A waiter that goes away must not cancel the request behind it.
        outer.set_running_or_notify_cancel()
        inner.add_done_callback(done)
        return outer

    def call_blocking(self, method: str, blob: bytes, timeout_s: float) -> bytes:
        """Send a request and wait for its answer in this thread."""
        try:
            answer: bytes = ray.get(self._actor.call.remote(method, blob), timeout=timeout_s)
        except Exception as error:  # Ray raises many kinds, and all mean the same here
            raise _unavailable(error) from error
        return answer


def _unavailable(error: BaseException) -> CoordinatorUnavailable:
    text = str(error).strip().splitlines()
    return CoordinatorUnavailable(
        f"the coordinator cannot be reached ({type(error).__name__}" + (f": {text[0]}" if text else "") + ")",
        for_good=isinstance(error, ActorDiedError),
    )


# -- the actors: shells around plain objects --------------------------------------------


class HostShell:
    """The actor around an `AgentHost`."""

    def __init__(
        self, host_id: str, coordinator: Any, workspace: str, max_result_bytes: int, environment: Mapping[str, str]
    ) -> None:
        from remit.agents.host import AgentHost
        from remit.agents.lifeline import Lifeline

        os.environ.update(environment)
        tune_collector()
        self._link = RayLink(coordinator)
        self._host = AgentHost(
            host_id,
            self._link,
            workspace=Path(workspace),
            max_result_bytes=max_result_bytes,
            node=ray.get_runtime_context().get_node_id(),
        )
        self._lifeline = Lifeline(host_id, self._link, self._left_alone)
        self._host.lease_left = self._lifeline.left
        self._lifeline.start()

    def _left_alone(self, reason: str) -> None:
        """End this process and its work: nobody will ever ask for it."""
        self._host.end(reason, _END_S)
        # Not by a call to Ray: whatever has taken the coordinator away may have taken that too.
        os._exit(0)

    async def hello(self) -> tuple[int, str, str]:
        """Say that this host is up: its process id, machine and node."""
        return self._host.pid, self._host.machine, self._host.node

    async def start(self, blob: bytes) -> None:
        """Begin attempts, in the loop that their bodies run in."""
        self._host.start(blob)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator,unused-ignore]
    async def control(self, blob: bytes) -> None:
        """Take orders, in a thread of their own."""
        self._host.control(blob)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator,unused-ignore]
    async def inventory(self, epoch: int, coordinator: Any) -> HostInventory:
        """Say what is here and serve this life of the coordinator, in a thread of their own."""
        found = self._host.inventory(epoch)
        self._link.point_to(coordinator)
        self._lifeline.renew()
        return found

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator,unused-ignore]
    async def forever(self) -> None:
        """Stay until this process is gone: whoever waits for this hears of its death."""
        await asyncio.Event().wait()


class RayHostLink:
    """The coordinator's way to one host."""

    def __init__(self, actor: Any, coordinator: Any, pid: int = 0, machine: str = "", node: str = "") -> None:
        self._actor = actor
        self._coordinator = coordinator
        self.pid = pid
        self.machine = machine
        self.node = node

    async def inventory(self, epoch: int) -> HostInventory:
        """Ask what is there; the host answers to this coordinator from then on."""
        found: HostInventory = await _get(self._actor.inventory.remote(epoch, self._coordinator))
        return found

    def start(self, batch: bytes) -> None:
        """Send a batch of attempts."""
        self._actor.start.remote(batch)

    def control(self, orders: bytes) -> None:
        """Send orders."""
        self._actor.control.remote(orders)

    async def flush(self, orders: bytes) -> None:
        """Send orders to hand on spans that have ended; returns when that is done, or the host is gone."""
        with contextlib.suppress(RayError):
            await _get(self._actor.control.remote(orders))


class RayEngine:
    """Hosts as named, detached Ray actors: they outlive this process, and their lease ends them."""

    def __init__(self, workspace: str, max_result_bytes: int) -> None:
        self._workspace = workspace
        self._max_result_bytes = max_result_bytes
        self._hosts: dict[str, Any] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._me = ray.get_runtime_context().current_actor
        self._machine = socket.gethostname()
        self._programs = Programs(workspace)

    async def spawn(
        self,
        host_id: str,
        resources: Mapping[str, Any],
        on_gone: Callable[[str], None],
        *,
        avoid: Collection[str] = (),
    ) -> RayHostLink:
        """Start a host actor and wait until it answers."""
        _check_feasible(resources)
        options = {"num_cpus": 0, **resources}
        if avoid:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(avoid)})"}
        actor = (
            ray.remote(concurrency_groups={"control": 64, "watch": 8})(HostShell)
            .options(
                name=host_name(self._workspace, host_id),
                namespace=NAMESPACE,
                lifetime="detached",
                max_concurrency=_MANY,
                max_restarts=0,
                max_task_retries=0,
                **options,
            )
            .remote(host_id, self._me, self._workspace, self._max_result_bytes, forwarded(os.environ))
        )
        self._hosts[host_id] = actor
        try:
            pid, machine, node = await asyncio.wait_for(_get(actor.hello.remote()), _SPAWN_TIMEOUT_S)
        except Exception as error:  # Ray raises many kinds; the host is not there, whatever it was
            self._hosts.pop(host_id, None)
            ray.kill(actor)
            raise CoordinatorUnavailable(f"agent host did not start: {error}") from error
        self._begin_watch(host_id, actor, on_gone)
        return RayHostLink(actor, self._me, pid, machine, node)

    async def find(self, host_id: str, on_gone: Callable[[str], None]) -> RayHostLink | None:
        """Return the link to a host actor of an earlier life, by its name."""
        name = host_name(self._workspace, host_id)
        try:
            # It asks the head of the cluster and blocks meanwhile.
            actor = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)
        except ValueError:
            return None
        self._hosts[host_id] = actor
        self._begin_watch(host_id, actor, on_gone)
        return RayHostLink(actor, self._me)

    async def nodes(self) -> tuple[ClusterNode, ...]:
        """Return the living nodes of the cluster."""
        found: list[dict[str, Any]] = await asyncio.to_thread(ray.nodes)
        return tuple(
            ClusterNode(node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"])
            for node in found
            if node["Alive"]
        )

    def _begin_watch(self, host_id: str, actor: Any, on_gone: Callable[[str], None]) -> None:
        watch = asyncio.get_running_loop().create_task(self._watch(host_id, actor, on_gone))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _watch(self, host_id: str, actor: Any, on_gone: Callable[[str], None]) -> None:
        """Wait for a host's death and tell of it once."""
        reason = "its process ended"
        try:
            await _get(actor.forever.remote())
        except RayError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else reason
            if not isinstance(error, ActorDiedError):
                # Out of reach is not dead: what is settled without it must not go on.
                ray.kill(actor, no_restart=True)
        self._hosts.pop(host_id, None)
        on_gone(reason)

    async def kill(self, host_id: str) -> None:
        """Kill a host's process; its watch tells of the death."""
        actor = self._hosts.get(host_id)
        if actor is not None:
            ray.kill(actor, no_restart=True)

    def sweep(
        self,
        run_id: str,
        pid: int,
        start_time: float,
        machine: str,
        on_done: Callable[[Swept], None],
        claimed: Sequence[Area] = (),
    ) -> None:
        """End the programs of a run or turn, on this machine or on another one of the cluster."""
        if machine in ("", self._machine):

            def end() -> None:
                on_done(self._programs.end(run_id, claimed))

            threading.Thread(target=end, name="remit-sweep", daemon=True).start()
            return
        task = asyncio.get_running_loop().create_task(self._end_there(run_id, machine, on_done, claimed))
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def _end_there(
        self, run_id: str, machine: str, on_done: Callable[[Swept], None], claimed: Sequence[Area]
    ) -> None:
        """End the programs of a run where they are; a node that is gone proves nothing."""
        there = next((node for node in await self.nodes() if node.name == machine), None)
        swept = Swept(gone=False)
        if there is not None:
            try:
                ending = _end_programs_on(there.id, self._workspace, run_id, claimed)
                swept = await asyncio.wait_for(_get(ending), _SWEEP_S)
            except Exception as error:  # Ray raises many kinds; nothing is proven, whatever it was
                logger.warning("programs of %s on %s are out of reach: %s", run_id, machine, error)
        on_done(swept)

    async def programs_gone(self, runs: Collection[str]) -> Mapping[str, frozenset[int]]:
        """Ask the daemon of this machine."""
        return await asyncio.to_thread(self._programs.gone, runs)

    async def program_owners(self) -> frozenset[str]:
        """Ask the daemon of this machine."""
        return await asyncio.to_thread(self._programs.owners)

    def vouch(self) -> None:
        """Tell the daemon of this machine that the coordinator is there."""
        self._programs.vouch()

    def release_programs(self) -> None:
        """End what foreground programs are left on this machine."""
        self._programs.release()

    def exit(self) -> None:
        """End this coordinator's process for good."""
        ray.kill(self._me, no_restart=True)

    def abort(self) -> None:
        """End this coordinator's process; Ray begins it again, and the journal is read from the disk."""
        os._exit(1)


def _check_feasible(resources: Mapping[str, Any]) -> None:
    """Refuse what no machine of the cluster has: Ray would wait for it for ever."""
    total = ray.cluster_resources()
    for option, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        wanted, there = resources.get(option, 0), total.get(resource, 0.0)
        if wanted > there:
            raise CoordinatorUnavailable(f"an agent asks for {option}={wanted} and the cluster has {there:g} in all")


def _end_programs_on(node_id: str, workspace: str, run_id: str, claimed: Sequence[Area]) -> Any:
    """Begin to end the programs of a run on another node; return the reference of a `Swept`."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def end() -> Swept:
        return Programs(workspace).end(run_id, claimed)

    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(end).options(scheduling_strategy=strategy).remote()


async def _get(ref: Any) -> Any:
    """Await an object reference inside a plain coroutine."""
    return await ref


class CoordinatorShell:
    """The actor around a `CoordinatorService`; begun by its first call."""

    _life: Life | None = None

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make the object, and let it hear SIGTERM, which Ray would take for a reason to exit at once.

        Ray does this in the main thread, the only one that may; it calls `__init__` in another.
        """
        shell = super().__new__(cls)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, shell._end_in_order)
        return shell

    def __init__(self, workspace: str, settings: Settings, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._workspace = workspace
        self._settings = settings
        self._beginning: asyncio.Lock | None = None

    def _end_in_order(self, number: int, frame: FrameType | None) -> None:
        """Close the workspace: everything ends, its holders are told, and what is kept is kept whole."""
        if self._life is None:
            os._exit(0)
        self._life.service.close_soon("SIGTERM", _TERMINATED_S)
        # The last step is a call to Ray, which may be on its way down itself.
        last = threading.Timer(2 * _TERMINATED_S, os._exit, (0,))
        last.daemon = True
        last.start()

    async def call(self, method: str, blob: bytes) -> bytes:
        """Carry out one request."""
        life = self._life or await self._begin()
        return await life.service.call(method, blob)

    def options(self) -> ServiceOptions:
        """Return how this coordinator behaves."""
        return ServiceOptions(workspace=self._workspace, idle_exit_s=_idle_exit_s())

    async def _begin(self) -> Life:
        if self._beginning is None:
            self._beginning = asyncio.Lock()
            tune_collector()
        async with self._beginning:
            if self._life is None:
                options = self.options()
                engine = RayEngine(self._workspace, self._settings.max_result_bytes)
                self._life = await Life.begin(
                    options,
                    engine=engine,
                    settings=self._settings,
                    scheduler=LoopScheduler(),
                    on_busy=_touch_node,
                    telemetry=TelemetrySettings.from_env(os.environ),
                )
            return self._life


def _idle_exit_s() -> float:
    return float(os.environ.get("REMIT_COORDINATOR_IDLE_S", "600"))


def _touch_node() -> None:
    """Tell the local node that somebody needs it; nothing happens on a foreign cluster."""
    if not os.environ.get("REMIT_STATE_DIR"):
        return
    from remit.coordinator.node import LocalNode

    LocalNode().touch()


# -- connecting -------------------------------------------------------------------------

_connections = 0
_ours = False
_connections_lock = threading.Lock()


def connect(address: str) -> None:
    """Connect this process to Ray, unless it is connected already.

    Raises:
        CoordinatorUnavailable: no Ray answers there.
    """
    global _connections, _ours  # Ray itself is one connection a process
    with _connections_lock:
        if not ray.is_initialized():
            # It warns that it cannot handle SIGTERM in this thread, which is what we want.
            logging.getLogger("ray").setLevel(logging.ERROR)
            _reread_environment()
            try:
                ray.init(
                    address=address,
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                )
            except Exception as error:  # Ray raises ConnectionError, RuntimeError and more
                first = str(error).strip().splitlines()
                raise CoordinatorUnavailable(
                    f"cannot connect to Ray at {address}: {first[0] if first else error!r}"
                ) from error
            _ours = True
        _connections += 1


def _reread_environment() -> None:
    """Make Ray heed the environment as it is now, even if the caller imported Ray earlier.

    It reads these at its import. Without this it would look for the local node at the
    address of the network card, for minutes, and without the token.

    Source:
        `_enable_token_auth` and `resolve_ip_for_localhost` below ray/_private (2.60).
    """
    if os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == "0":
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = False
    if os.environ.get("RAY_AUTH_MODE") == "token":
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def disconnect() -> None:
    """Undo one `connect`; the last one closes the connection if we had opened it."""
    global _connections, _ours
    with _connections_lock:
        _connections -= 1
        if _connections == 0 and _ours:
            ray.shutdown()
            _ours = False


def is_connected() -> bool:
    """Tell whether this process has a Ray connection, ours or the user's."""
    return bool(ray.is_initialized())


def find_coordinator(
    workspace: str,
    limits: Limits | None = None,
    *,
    create: bool = True,
    shell: type[CoordinatorShell] = CoordinatorShell,
) -> RayLink | None:
    """Return a link to a workspace's coordinator, started if need be on this machine.

    Args:
        workspace: absolute path.
        limits: bounds for a coordinator that is started; one that runs keeps its own.
        create: whether one is started.
        shell: the actor's class; for tests.

    Returns:
        The link, or None if there is no coordinator and none was asked for.
    """
    name = coordinator_name(workspace)
    if not create:
        try:
            return RayLink(ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:
            return None
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    actor = (
        ray.remote(shell)
        .options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=_MANY,
            max_restarts=-1,
            max_task_retries=0,
            # The journal is in the workspace's folder, which this machine has.
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        .remote(workspace, workspace_settings(limits), forwarded(os.environ))
    )
    return RayLink(actor)


def workspace_settings(limits: Limits | None = None) -> Settings:
    """Return the settings that fit this cluster, with what the caller set in `limits`."""
    cpus = int(ray.cluster_resources().get("CPU", 1)) or 1
    defaults = Settings(max_dedicated=2 * cpus, max_shared_hosts=cpus)
    return defaults if limits is None else defaults.bounded(limits)


def running_workspaces() -> list[str]:
    """Return the actor names of all coordinators on this cluster."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [
        entry["name"] for entry in found if entry["namespace"] == NAMESPACE and entry["name"].startswith("coordinator-")
    ]

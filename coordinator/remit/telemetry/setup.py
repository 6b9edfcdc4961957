"""Builds the recorder of a coordinator from its settings."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from remit.telemetry.files import FileSink, traces_folder
from remit.telemetry.recorder import Recorder, Sink
from remit.telemetry.settings import TelemetrySettings

__all__ = ["open_recorder"]

logger = logging.getLogger("remit.telemetry")


def open_recorder(
    settings: TelemetrySettings,
    workspace: str | Path,
    *,
    now: Callable[[], float] = time.time,
    extra: Sequence[Sink] = (),
) -> Recorder | None:
    """Return a recorder, or None where nothing is to be made.

    Args:
        settings: what is made.
        workspace: the workspace's folder.
        now: seconds since 1970, by the coordinator's clock.
        extra: further places to send to.

    What cannot be set up is left out and told of in the log: telemetry never keeps
    a coordinator from starting.
    """
    sinks: list[Sink] = list(extra)
    resource = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", "remit"),
        "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
        "remit.workspace": str(workspace),
    }
    if settings.files:
        sinks.append(FileSink(traces_folder(workspace), max_bytes=settings.max_bytes, resource=resource))
    if settings.exports:
        try:
            from remit.telemetry.collectors import CollectorSink

            sinks.append(CollectorSink(settings, resource=resource))
        except Exception:
            # A broken SDK, or a variable that it cannot read.
            logger.warning("nothing is sent to collectors", exc_info=True)
    if not sinks:
        return None
    return Recorder(sinks, now=now, keeps_arguments=settings.arguments)

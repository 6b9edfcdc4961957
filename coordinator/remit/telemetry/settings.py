"""What telemetry one of our own processes makes: from the standard variables and three of ours.

| variable | meaning |
|---|---|
| `OTEL_SDK_DISABLED` | `true`: nothing is made, also no files |
| `OTEL_TRACES_EXPORTER`, `OTEL_METRICS_EXPORTER`, `OTEL_LOGS_EXPORTER` | names of exporters; `none` |
| `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_..._ENDPOINT` | set: the exporter is `otlp` |
| `REMIT_TRACES` | `off`: no files in `.remit/traces/` |
| `REMIT_TRACES_MAX_MB` | limit of these files, 64 by default |
| `REMIT_TRACE_ARGUMENTS` | `1`: renderings of arguments become attributes |

Unlike the specification's default, no exporter is used where no variable asks for one:
nothing leaves the machine unasked. All others (`OTEL_EXPORTER_OTLP_*`, `OTEL_BSP_*`,
`OTEL_TRACES_SAMPLER`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SERVICE_NAME`, ...) are read by the SDK.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["TelemetrySettings", "forwarded"]

_MEGABYTE = 1024 * 1024
_DEFAULT_MAX_MB = 64.0
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "none")


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """What is made and where it goes."""

    files: bool = True
    """Whether traces are kept in the workspace."""
    max_bytes: int = int(_DEFAULT_MAX_MB) * _MEGABYTE
    """Limit of those files."""
    traces: tuple[str, ...] = ()
    """Names of span exporters."""
    metrics: tuple[str, ...] = ()
    """Names of metric exporters."""
    logs: tuple[str, ...] = ()
    """Names of log exporters."""
    arguments: bool = False
    """Whether renderings of arguments are kept."""

    @property
    def exports(self) -> bool:
        """Tell whether an SDK is needed."""
        return bool(self.traces or self.metrics or self.logs)

    @property
    def is_on(self) -> bool:
        """Tell whether anything is made at all."""
        return self.files or self.exports

    @classmethod
    def off(cls) -> TelemetrySettings:
        """Return settings that make nothing."""
        return cls(files=False)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> TelemetrySettings:
        """Read the variables; what cannot be read has its default."""
        if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return cls.off()
        return cls(
            files=environ.get("REMIT_TRACES", "on").strip().lower() not in _FALSE,
            max_bytes=int(_megabytes(environ.get("REMIT_TRACES_MAX_MB", "")) * _MEGABYTE),
            traces=_exporters(environ, "TRACES"),
            metrics=_exporters(environ, "METRICS"),
            logs=_exporters(environ, "LOGS"),
            arguments=environ.get("REMIT_TRACE_ARGUMENTS", "").strip().lower() in _TRUE,
        )


def _exporters(environ: Mapping[str, str], signal: str) -> tuple[str, ...]:
    named = environ.get(f"OTEL_{signal}_EXPORTER", "").strip()
    if named:
        return tuple(name for part in named.split(",") if (name := part.strip()) and name != "none")
    asked = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return ("otlp",) if asked else ()


def _megabytes(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        return _DEFAULT_MAX_MB
    return found if found > 0 else _DEFAULT_MAX_MB


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the coordinator and its hosts take over from whoever starts them.

    They may hold keys (`OTEL_EXPORTER_OTLP_HEADERS`), so they are neither journalled nor shown.
    """
    return {name: text for name, text in environ.items() if name.startswith(("OTEL_", "REMIT_TRACE"))}

"""The same trace in Phoenix, read back over its API. Only when asked for.

`REMIT_TEST_PHOENIX=install` installs Phoenix into an environment of its own (600 MB) for the test;
`REMIT_TEST_PHOENIX=/path/to/phoenix` uses one that is there. It is up after about a minute.
With `REMIT_TEST_PICTURE=docs/images/trace-in-phoenix.png` the picture of the documentation is taken too; that
takes Chromium, and playwright beside Phoenix.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from remit.telemetry import TelemetrySettings
from remit.testing import open_inprocess, wait_until
from tests.telemetry.test_cancel_path import swarm
from tests.telemetry.world import Kept, Traced

ASKED = os.environ.get("REMIT_TEST_PHOENIX", "")
PICTURE = os.environ.get("REMIT_TEST_PICTURE", "")
PROJECT = "remit-test"
MOST_PICTURE_BYTES = 300_000

pytestmark = [
    pytest.mark.skipif(not ASKED, reason="REMIT_TEST_PHOENIX=install, or its path, asks for it"),
    pytest.mark.soak,
    pytest.mark.timeout(1_800),
]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _executable(folder: Path) -> Path:
    if ASKED != "install":
        return Path(ASKED)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "pip"), "install", "-q", "arize-phoenix", "playwright"], check=True)
    return folder / "bin" / "phoenix"


def _not_yet() -> bool:
    """Return false after a moment: a server is not to be asked two hundred times a second."""
    time.sleep(0.5)
    return False


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def _post(url: str, document: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(document).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


class Server(NamedTuple):
    """A Phoenix that is up."""

    address: str
    python: Path
    """The interpreter that it was installed for."""


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start Phoenix on loopback, with its agent off."""
    folder = tmp_path_factory.mktemp("phoenix")
    port = _free_port()
    off = ("AGENTS_DISABLE_BASH", "AGENTS_DISABLE_WEB_ACCESS", "AGENTS_DISABLE_GITHUB", "DISABLE_AGENT_ASSISTANT")
    environment = {
        **os.environ,
        "PHOENIX_WORKING_DIR": str(folder / "data"),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(_free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
        **{f"PHOENIX_{name}": "true" for name in off},
    }
    (folder / "data").mkdir()
    executable = _executable(folder / "env")
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([str(executable), "serve"], env=environment, stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert server.poll() is None, (folder / "log").read_text()[-2_000:]
        try:
            _get(f"{address}/v1/projects")
        except (urllib.error.URLError, OSError):
            return _not_yet()
        return True

    try:
        wait_until(is_up, timeout_s=600.0)
        yield Server(address, executable.parent / "python")
    finally:
        server.terminate()
        server.wait(60)


def test_the_trace_is_there_and_can_be_searched_by_its_outcome(
    phoenix: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{phoenix.address}/v1/traces")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"openinference.project.name={PROJECT}")
    kept = Kept()
    settings = TelemetrySettings.from_env(os.environ)
    with open_inprocess(tmp_path, poll_s=0.1, telemetry=settings, sinks=[kept]) as system:

        async def story() -> None:
            async with system.coordinator() as coordinator:
                await swarm(Traced(system, coordinator, kept), tmp_path)

        asyncio.run(story())
        assert system.recorder is not None
        system.recorder.close(30.0)
        assert system.recorder.statistics()["dropped"] == 0

    query = urllib.parse.urlencode({"limit": 500})
    found: list[dict[str, Any]] = []

    def all_there() -> bool:
        try:
            found[:] = _get(f"{phoenix.address}/v1/projects/{PROJECT}/spans?{query}")["data"]
        except urllib.error.HTTPError:
            return _not_yet()
        return len(found) >= len(kept.spans) or _not_yet()

    wait_until(all_there, timeout_s=120.0)
    assert len(found) == len(kept.spans)
    assert {span["context"]["trace_id"] for span in found} == {f"{kept.spans[0].trace_id:032x}"}
    parents = {span["context"]["span_id"]: span["parent_id"] for span in found}
    for span in kept.spans:
        expected = f"{span.parent_id:016x}" if span.parent_id else None
        assert parents[f"{span.span_id:016x}"] == expected
    errors = [span["name"] for span in found if span["status_code"] == "ERROR"]
    assert errors == ["cancel.deliver"]

    nodes = _post(
        f"{phoenix.address}/graphql",
        {
            "query": "query($name: String!, $f: String) { getProjectByName(name: $name) "
            "{ spans(first: 500, filterCondition: $f) { edges { node { name } } } } }",
            "variables": {"name": PROJECT, "f": "attributes['remit']['outcome'] == 'cancelled'"},
        },
    )["data"]["getProjectByName"]["spans"]["edges"]
    names = [edge["node"]["name"] for edge in nodes]
    wanted = [span.name for span in kept.spans if span.attributes.get("remit.outcome") == "cancelled"]
    assert sorted(names) == sorted(wanted)
    if PICTURE:
        picture = Path(PICTURE).resolve()
        picture.parent.mkdir(parents=True, exist_ok=True)
        trace = f"{kept.spans[0].trace_id:032x}"
        script = Path(__file__).with_name("picture.py")
        words = [str(phoenix.python), str(script), phoenix.address, PROJECT, trace, str(picture)]
        subprocess.run(words, check=True, timeout=300)
        assert 0 < picture.stat().st_size < MOST_PICTURE_BYTES

"""Takes the picture of a trace in Phoenix: `python picture.py ADDRESS PROJECT TRACE FILE`.

Run by a Python that has playwright; needs Chromium. Not a test: `test_phoenix.py` runs it
where `REMIT_TEST_PICTURE` names the file to write.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import urllib.request
from typing import Any

WIDTH, HEIGHT = 1500, 1800
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def project_id(address: str, project: str) -> str:
    """Return the id that Phoenix's pages have for a project."""
    document = {"query": "query($n: String!) { getProjectByName(name: $n) { id } }", "variables": {"n": project}}
    request = urllib.request.Request(
        f"{address}/graphql", json.dumps(document).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: str = json.load(answer)["data"]["getProjectByName"]["id"]
    return found


def take(address: str, project: str, trace: str, path: str) -> None:
    """Open the trace, choose its cancel, and write what is seen."""
    # By name: only the Python that runs this has it.
    playwright: Any = importlib.import_module("playwright.sync_api")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(f"{address}/projects/{project_id(address, project)}/traces/{trace}", timeout=120_000)
        page.get_by_text("cancel.request", exact=True).first.click(timeout=120_000)
        page.get_by_text("remit.cancel.orphans", exact=True).first.wait_for(timeout=120_000)
        page.mouse.move(WIDTH - 1, HEIGHT - 1)  # away from what tells more when it is pointed at
        page.wait_for_load_state("networkidle")
        # The panel of the trace alone, without what is behind it.
        page.get_by_role("dialog").first.screenshot(path=path, animations="disabled")
        browser.close()


if __name__ == "__main__":
    take(*sys.argv[1:5])

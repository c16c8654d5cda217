"""Headless Chromium, Debian's, as the renderer of pages: installed where it is missing."""

import subprocess
import tempfile
from pathlib import Path

from tests.cluster.build import debian
from tests.pictures import png

PROGRAM = "chromium-headless-shell"
SECONDS = 60


def ready() -> None:
    """Have the program. Raises tests.cluster.build.errors.BuildError."""
    debian.ensure({PROGRAM: PROGRAM}, print)


def screenshot(page: Path, width: int, height: int, into: Path) -> None:
    """A picture of a page of ours; nothing is fetched from elsewhere."""
    with tempfile.TemporaryDirectory(prefix="gna-chromium-") as folder:
        # Root cannot use its sandbox in a container; the pages are this project's own.
        subprocess.run(
            [
                PROGRAM,
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--user-data-dir={folder}",
                f"--window-size={width},{height}",
                f"--screenshot={into}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=SECONDS,
        )
    into.write_bytes(png.smaller(into.read_bytes()))


if __name__ == "__main__":  # before tests, which have no time for it
    ready()

"""Hatchling's hook: a wheel says which commit it is of. An editable installation is the tree itself."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class VersionHook(BuildHookInterface):
    """Puts agent/__init__.py with the version of the build in the place of the tree's."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is packed."""
        if version != "standard":
            return
        sys.path.insert(0, str(Path(self.root) / ".ci"))
        import build_version  # noqa: PLC0415

        text = (Path(self.root) / build_version.WRITTEN).read_text()
        self._folder = tempfile.TemporaryDirectory(prefix="gna-wheel-")
        file = Path(self._folder.name) / "__init__.py"
        file.write_text(build_version.stamped(text, self.metadata.version))
        build_data["force_include"][str(file)] = str(build_version.WRITTEN)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Called when it is packed."""
        if version == "standard":
            self._folder.cleanup()

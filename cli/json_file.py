"""`--json FILE` of the commands that measure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click


class _NewFile(click.Path):
    """A file that can be written, as far as that can be said beforehand: not found out after minutes of measuring."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        folder = path.absolute().parent
        if not folder.is_dir():
            self.fail(f"there is no directory {str(folder)!r} to write it in.", param, ctx)
        if not path.exists() and not os.access(folder, os.W_OK):
            self.fail(f"the directory {str(folder)!r} is not writable.", param, ctx)
        return path


JSON_OPTION = click.option("--json", "json_file", type=_NewFile(), metavar="FILE", help="Write the figures there as well.")

"""Reads and searches the text files below one directory; nothing outside it can be reached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from traces.mcp_servers.schema import offer_choices

MAX_FILES = 2000
MAX_FILE_BYTES = 1 << 20
MAX_LINES = 80
MAX_MATCHES = 20
MAX_LINE_CHARS = 200


class Workspace:
    """The files of a directory, by their paths relative to it, with forward slashes."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def paths(self) -> list[str]:
        """Every file, sorted, without hidden ones and without what a link leads to outside; at most MAX_FILES."""
        return sorted(path.relative_to(self.root).as_posix() for path in self._walk())[:MAX_FILES]

    def _walk(self) -> Iterator[Path]:
        for path in self.root.rglob("*"):
            hidden = any(part.startswith(".") for part in path.relative_to(self.root).parts)
            if not hidden and path.is_file() and path.resolve().is_relative_to(self.root):
                yield path

    def lines(self, path: str) -> list[str]:
        """The lines of a file. Raises ToolError, whose text the model reads."""
        target = (self.root / path).resolve()
        if not target.is_relative_to(self.root):
            raise ToolError(f"{path} lies outside the workspace.")
        if not target.is_file():
            raise ToolError(f"There is no file {path}. Call list_files to see what there is.")
        if target.stat().st_size > MAX_FILE_BYTES:
            raise ToolError(f"{path} is larger than {MAX_FILE_BYTES} bytes.")
        try:
            return target.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ToolError(f"{path} is not a text file.") from error


def build(root: Path) -> MCPServer:
    """A server for the files below `root`."""
    workspace = Workspace(root)

    def list_files(folder: str = "") -> str:
        """List the files of the workspace, or of one folder."""
        prefix = folder.strip("./") + "/" if folder.strip("./") else ""
        found = [path for path in workspace.paths() if path.startswith(prefix)]
        if not found:
            raise ToolError(f"There is no folder {folder}.")
        return "\n".join(found)

    def read_file(path: str, start_line: int = 1) -> str:
        """Read a text file from start_line on, with line numbers."""
        lines = workspace.lines(path)
        if not 1 <= start_line <= max(1, len(lines)):
            raise ToolError(f"{path} has {len(lines)} lines; start_line {start_line} is not among them.")
        shown = lines[start_line - 1 : start_line - 1 + MAX_LINES]
        text = "\n".join(f"{number} {line[:MAX_LINE_CHARS]}" for number, line in enumerate(shown, start_line))
        left = len(lines) - (start_line - 1) - len(shown)
        return text + (f"\n({left} more lines)" if left > 0 else "")

    def search(text: str) -> str:
        """Find a piece of text in all files, without regard to case."""
        if not text.strip():
            raise ToolError("Give a text to search for.")
        wanted, found = text.lower(), []
        for path in workspace.paths():
            try:
                lines = workspace.lines(path)
            except ToolError:
                continue  # too large or no text: nothing to find there
            found += [
                f"{path}:{number}: {line.strip()[:MAX_LINE_CHARS]}"
                for number, line in enumerate(lines, 1)
                if wanted in line.lower()
            ]
            if len(found) > MAX_MATCHES:
                return "\n".join(found[:MAX_MATCHES]) + "\n(more matches are not shown)"
        return "\n".join(found) or f"Nothing contains {text!r}."

    offer_choices(read_file, "path", workspace.paths(), "Path of the file")
    server = MCPServer("repo", log_level="WARNING")
    for tool in (list_files, read_file, search):
        server.add_tool(tool, structured_output=False)
    return server


@click.command()
@click.option("--root", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
def main(root: Path) -> None:
    """Serve the files below ROOT over stdio."""
    build(root).run("stdio")


if __name__ == "__main__":
    main()

"""A ticket desk in an SQLite file: create, find, show, comment on and close tickets."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Literal

import click
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

MAX_LISTED = 30
MAX_TEXT = 2000

SCHEMA = """
CREATE TABLE IF NOT EXISTS tickets (
    number INTEGER PRIMARY KEY, title TEXT NOT NULL, body TEXT NOT NULL,
    priority TEXT NOT NULL CHECK (priority IN ('low', 'normal', 'high')),
    status TEXT NOT NULL CHECK (status IN ('open', 'waiting', 'closed'))
);
CREATE TABLE IF NOT EXISTS comments (
    ticket INTEGER NOT NULL REFERENCES tickets (number), position INTEGER NOT NULL, text TEXT NOT NULL,
    PRIMARY KEY (ticket, position)
);
"""

Priority = Literal["low", "normal", "high"]
Status = Literal["open", "waiting", "closed"]


class TicketDesk:
    """Tickets in one SQLite database. A connection per call: tools run on several threads."""

    def __init__(self, database: Path) -> None:
        self._database = database
        with closing(self._connect()) as connection, connection:
            connection.executescript(SCHEMA)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._database, timeout=10)

    def seed(self, file: Path) -> None:
        """Takes tickets from a JSON file into an empty database; a used one is left as it is. Raises OSError and ValueError."""
        tickets = json.loads(file.read_text(encoding="utf-8"))
        with closing(self._connect()) as connection, connection:
            if connection.execute("SELECT count(*) FROM tickets").fetchone()[0] == 0:
                connection.executemany(
                    "INSERT INTO tickets (title, body, priority, status) VALUES (:title, :body, :priority, :status)", tickets
                )

    def create(self, title: str, body: str, priority: Priority) -> int:
        with closing(self._connect()) as connection, connection:
            query = "INSERT INTO tickets (title, body, priority, status) VALUES (?, ?, ?, 'open') RETURNING number"
            return int(connection.execute(query, (title, body, priority)).fetchone()[0])

    def find(self, status: Status | None, text: str = "") -> list[tuple[int, str, str, str]]:
        """(number, priority, status, title), the newest first."""
        pattern = "%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        query = """SELECT number, priority, status, title FROM tickets WHERE (?1 IS NULL OR status = ?1)
                   AND (title LIKE ?2 ESCAPE '\\' OR body LIKE ?2 ESCAPE '\\') ORDER BY number DESC LIMIT ?3"""
        with closing(self._connect()) as connection:
            return connection.execute(query, (status, pattern, MAX_LISTED)).fetchall()

    def show(self, number: int) -> tuple[tuple[str, str, str, str], list[str]]:
        """(title, body, priority, status) and the comments. Raises ToolError for a number that is not there."""
        with closing(self._connect()) as connection:
            ticket = connection.execute(
                "SELECT title, body, priority, status FROM tickets WHERE number = ?", (number,)
            ).fetchone()
            if ticket is None:
                raise ToolError(f"There is no ticket {number}. Call list_tickets to see which there are.")
            comments = connection.execute("SELECT text FROM comments WHERE ticket = ? ORDER BY position", (number,))
            return ticket, [text for (text,) in comments]

    def comment(self, number: int, text: str, status: Status | None) -> None:
        """Adds a comment and, where given, sets the status. Raises ToolError."""
        self.show(number)
        with closing(self._connect()) as connection, connection:
            query = "INSERT INTO comments SELECT ?1, coalesce(max(position), 0) + 1, ?2 FROM comments WHERE ticket = ?1"
            connection.execute(query, (number, text))
            if status is not None:
                connection.execute("UPDATE tickets SET status = ? WHERE number = ?", (status, number))


def _text(name: str, value: str) -> str:
    value = value.strip()
    if not 0 < len(value) <= MAX_TEXT:
        raise ToolError(f"{name} takes 1 to {MAX_TEXT} characters, not {len(value)}.")
    return value


def _listing(found: list[tuple[int, str, str, str]]) -> str:
    return "\n".join(f"#{number} [{priority}, {state}] {title}" for number, priority, state, title in found) or "No tickets."


def build(desk: TicketDesk) -> MCPServer:
    """A server for one desk."""
    server = MCPServer("tickets", log_level="WARNING")

    def list_tickets(status: Literal["open", "waiting", "closed", "any"] = "open") -> str:
        """List tickets with their number, priority, status and title."""
        found = desk.find(None if status == "any" else status)
        return (
            "\n".join(f"#{number} [{priority}, {state}] {title}" for number, priority, state, title in found) or "No tickets."
        )

    def find_tickets(text: str) -> str:
        """Find tickets whose title or body contains a text."""
        found = desk.find(None, _text("text", text))
        return (
            "\n".join(f"#{number} [{priority}, {state}] {title}" for number, priority, state, title in found) or "No tickets."
        )

    def show_ticket(number: int) -> str:
        """Show one ticket with its comments."""
        (title, body, priority, status), comments = desk.show(number)
        lines = [f"#{number} {title}", f"priority: {priority}, status: {status}", body]
        return "\n".join([*lines, *(f"comment {position}: {text}" for position, text in enumerate(comments, 1))])

    def create_ticket(title: str, body: str, priority: Priority = "normal") -> str:
        """Open a new ticket."""
        return f"Opened ticket #{desk.create(_text('title', title), _text('body', body), priority)}."

    def comment_ticket(number: int, text: str) -> str:
        """Add a comment to a ticket."""
        desk.comment(number, _text("text", text), None)
        return f"Commented on ticket #{number}."

    def close_ticket(number: int, resolution: str) -> str:
        """Close a ticket and say how it was resolved."""
        desk.comment(number, "Resolution: " + _text("resolution", resolution), "closed")
        return f"Closed ticket #{number}."

    for tool in (list_tickets, find_tickets, show_ticket, create_ticket, comment_ticket, close_ticket):
        server.add_tool(tool, structured_output=False)
    return server


@click.command()
@click.option("--database", type=click.Path(dir_okay=False, path_type=Path), required=True, help="SQLite file; made if absent.")
@click.option(
    "--seed", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON file that fills an empty database."
)
def main(database: Path, seed: Path | None) -> None:
    """Serve the tickets of DATABASE over stdio."""
    desk = TicketDesk(database)
    if seed is not None:
        desk.seed(seed)
    build(desk).run("stdio")


if __name__ == "__main__":
    main()

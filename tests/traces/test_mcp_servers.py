"""The MCP servers over stdio, as an agent's host sees them: real input, real errors, nothing outside their directory."""

from __future__ import annotations

import sys

import pytest

from traces.mcp_servers.tickets import TicketDesk
from traces.sample_tasks import ENGINEER, WORKSPACE
from traces.tool_host import MAX_RESULT_CHARS, ServerSpec, ToolHost, ToolHostError


def server(name, *args):
    return ServerSpec(name, sys.executable, ("-m", f"traces.mcp_servers.{name}", *map(str, args)))


def parameters(host, tool):
    return next(t["function"]["parameters"] for t in host.tools if t["function"]["name"] == tool)


def asker(host):
    """The text of a result; of an error, its own sentence after an exclamation mark."""

    async def text(tool, **arguments):
        result = await host.call(tool, arguments)
        return f"! {result.text.removeprefix(f'Error executing tool {tool}: ')}" if result.is_error else result.text

    return text


async def test_repo(tmp_path):
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "a.txt").write_text("one\nTwo words\nthree\n" * 40)
    (root / "sub" / "b.md").write_text("x" * 500 + "\ntwo")
    (root / "binary").write_bytes(b"\xff\xfe\x00two")
    (root / ".hidden").write_text("two")
    (tmp_path / "secret.txt").write_text("two secrets")
    (root / "link").symlink_to(tmp_path / "secret.txt")
    async with ToolHost([server("repo", "--root", root)]) as host:
        assert [tool["function"]["name"] for tool in host.tools] == ["list_files", "read_file", "search"]
        assert parameters(host, "read_file")["properties"]["path"]["enum"] == ["a.txt", "binary", "sub/b.md"]

        text = asker(host)

        assert await text("list_files") == "a.txt\nbinary\nsub/b.md"
        assert await text("list_files", folder="sub/") == "sub/b.md"
        assert await text("list_files", folder="nope") == "! There is no folder nope."
        assert (await text("read_file", path="a.txt", start_line=119)) == "119 Two words\n120 three"
        whole = await text("read_file", path="a.txt")
        assert whole.startswith("1 one\n2 Two words\n")
        assert whole.endswith("\n80 Two words\n(40 more lines)")
        assert (
            await text("read_file", path="a.txt", start_line=121) == "! a.txt has 120 lines; start_line 121 is not among them."
        )
        assert await text("read_file", path="binary") == "! binary is not a text file."
        for outside in ("../secret.txt", str(tmp_path / "secret.txt"), "link"):
            assert await text("read_file", path=outside) == f"! {outside} lies outside the workspace."
        assert await text("read_file", path="gone") == "! There is no file gone. Call list_files to see what there is."
        assert (await text("search", text="TWO")).splitlines()[:2] == ["a.txt:2: Two words", "a.txt:5: Two words"]
        assert (await text("search", text="TWO")).endswith("(more matches are not shown)")
        assert await text("search", text="secrets") == "Nothing contains 'secrets'."
        assert await text("search", text=" ") == "! Give a text to search for."
        assert "start_line" in await text("read_file", path="a.txt", start_line="many")


async def test_tickets(tmp_path):
    database = tmp_path / "t.sqlite"
    spec = server("tickets", "--database", database, "--seed", WORKSPACE / "tickets.json")
    async with ToolHost([spec]) as host:
        text = asker(host)

        assert (await text("list_tickets", status="waiting")) == "#5 [low, waiting] Keel Guatemala sold out"
        assert await text("create_ticket", title="100% off_", body='it\'s "new"', priority="high") == "Opened ticket #8."
        assert await text("find_tickets", text="100% off_") == "#8 [high, open] 100% off_"
        assert await text("find_tickets", text="0_ ") == "No tickets."
        assert await text("comment_ticket", number=8, text="first") == "Commented on ticket #8."
        assert await text("close_ticket", number=8, resolution="done") == "Closed ticket #8."
        shown = await text("show_ticket", number=8)
        assert shown.splitlines()[1:] == [
            "priority: high, status: closed",
            'it\'s "new"',
            "comment 1: first",
            "comment 2: Resolution: done",
        ]
        assert await text("show_ticket", number=99) == "! There is no ticket 99. Call list_tickets to see which there are."
        assert await text("create_ticket", title=" ", body="x") == "! title takes 1 to 2000 characters, not 0."
        assert (await text("create_ticket", title="x", body="y", priority="urgent")).startswith("! ")
    # The file is the store: a second server sees the same tickets and seeds nothing.
    async with ToolHost([spec]) as host:
        assert (await host.call("show_ticket", {"number": 8})).text.startswith("#8 100% off_")
        assert (await host.call("show_ticket", {"number": 9})).is_error


def test_at_most_thirty_tickets_are_listed(tmp_path):
    desk = TicketDesk(tmp_path / "t.sqlite")
    for number in range(40):
        desk.create(f"t{number}", "b", "low")
    found = desk.find("open")
    assert [number for number, *_ in found] == list(range(40, 10, -1))


async def test_tables(tmp_path):
    (tmp_path / "sales.csv").write_text('day,item,price\nmon,"tea, green",2.5\ntue,coffee,3\nmon,coffee,4\nwed,rum,\n')
    (tmp_path / "staff.csv").write_text("name\n" + "".join(f"n{n}\n" for n in range(40)))
    async with ToolHost([server("tables", "--directory", tmp_path)]) as host:
        properties = parameters(host, "summarise")["properties"]
        assert properties["table"]["enum"] == ["sales", "staff"]
        assert properties["group_by"]["enum"] == ["day", "item", "price", "name"]

        text = asker(host)

        assert (await text("describe", table="sales")).splitlines()[:3] == [
            "sales: 4 rows",
            "columns: day, item, price",
            "mon, tea, green, 2.5",
        ]
        assert await text("rows", table="sales", column="day", equals="MON") == (
            "2 rows; day, item, price\nmon, tea, green, 2.5\nmon, coffee, 4"
        )
        ask = {"table": "sales", "column": "price", "group_by": "day"}
        assert await text("summarise", function="sum", **ask) == "sum of price by day:\nmon: 6.5\ntue: 3"
        assert await text("summarise", function="mean", **ask) == "mean of price by day:\nmon: 3.25\ntue: 3"
        assert await text("summarise", function="min", **ask) == "min of price by day:\ntue: 3\nmon: 2.5"
        assert await text("summarise", function="max", **ask) == "max of price by day:\nmon: 4\ntue: 3"
        assert await text("summarise", function="count", **ask) == "count of price by day:\nmon: 2\ntue: 1\nwed: 1"
        wrong = {"table": "sales", "column": "item", "group_by": "day", "function": "sum"}
        assert await text("summarise", **wrong) == "! Column item holds text; only count works on it."
        assert await text("rows", table="sales", column="name", equals="x") == (
            "! There is no column name here. Columns: day, item, price."
        )
        assert await text("describe", table="x") == "! There is no table x. Tables: sales, staff."
        many = {"table": "staff", "column": "name", "group_by": "name", "function": "count"}
        assert (await text("summarise", **many)).endswith("(16 more groups)")
        assert (await text("summarise", **{**many, "function": "median"})).startswith("! ")


async def test_several_servers_are_one_tool_box(tmp_path):
    async with ToolHost(ENGINEER.servers(tmp_path)) as host:
        assert len(host.tools) == 9
        assert (await host.call("show_ticket", {"number": 1})).text.startswith("#1 Free shipping")
        assert "pricing.js" in (await host.call("list_files", {})).text
        nothing = await host.call("fly", {})
        assert nothing.is_error
        assert nothing.text.startswith("There is no tool 'fly'. Tools: list_files, ")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (ServerSpec("gone", "/no/such/thing"), "'gone' does not answer: .*No such file"),
        (ServerSpec("dies", sys.executable, ("-c", "raise SystemExit(3)")), "'dies' does not answer: Connection closed"),
        (
            ServerSpec("silent", sys.executable, ("-c", "import time; time.sleep(60)")),
            "'silent' does not answer: it took too long",
        ),
    ],
)
async def test_a_server_that_does_not_start(spec, sentence):
    with pytest.raises(ToolHostError, match=sentence):
        async with ToolHost([spec], timeout=1.5):
            pass


async def test_two_tools_of_one_name(tmp_path):
    with pytest.raises(ToolHostError, match="Two MCP servers offer a tool 'list_files', the second is 'repo'"):
        async with ToolHost([server("repo", "--root", tmp_path), server("repo", "--root", tmp_path)]):
            pass


UNRULY = """
import os, time
from mcp.server import MCPServer
server = MCPServer("unruly", log_level="CRITICAL")
@server.tool()
def die() -> str:
    os._exit(1)
@server.tool()
def slow() -> str:
    time.sleep(60)
@server.tool()
def boom() -> str:
    raise KeyError("secret")
@server.tool(structured_output=False)
def long() -> str:
    return "x" * 50_000
server.run("stdio")
"""


async def test_tools_that_misbehave_are_results():
    async with ToolHost([ServerSpec("unruly", sys.executable, ("-c", UNRULY))], timeout=3) as host:
        boom = await host.call("boom", {})
        assert boom.is_error
        assert "secret" not in boom.text
        long = await host.call("long", {})
        assert not long.is_error
        assert long.text == "x" * MAX_RESULT_CHARS + f"\n(cut after {MAX_RESULT_CHARS} characters)"
        slow = await host.call("slow", {})
        assert slow.is_error
        assert "timed out" in slow.text
        for _ in range(2):
            dead = await host.call("die", {})
            assert dead.is_error
            assert "Connection closed" in dead.text

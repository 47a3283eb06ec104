"""The jobs behind the bundled trajectories: three kinds of agents in a small coffee shop, and what each session does.

The embedded model is too small to plan, so every step names its tool. `call` also gives the arguments; `choose` leaves them
to the model, where the tool's schema lists the choices; `say` is the model's own text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traces.agent import Step
from traces.tool_host import ServerSpec

WORKSPACE = Path(__file__).parent / "workspace"


@dataclass(frozen=True, slots=True)
class AgentKind:
    """Sessions of one kind share their system prompt and tools. `servers` takes a scratch directory for the session."""

    name: str
    system: str
    servers: Callable[[Path], tuple[ServerSpec, ...]]


@dataclass(frozen=True, slots=True)
class SampleTask:
    """One session: its name, its agent, the user's words and the script."""

    name: str
    kind: AgentKind
    task: str
    steps: tuple[Step, ...]


def _server(name: str, *args: str) -> ServerSpec:
    return ServerSpec(name, sys.executable, ("-P", "-m", f"traces.mcp_servers.{name}", *args))


def _repo() -> ServerSpec:
    return _server("repo", "--root", str(WORKSPACE))


def _tables() -> ServerSpec:
    return _server("tables", "--directory", str(WORKSPACE / "data"))


def _tickets(scratch: Path) -> ServerSpec:
    return _server("tickets", "--database", str(scratch / "tickets.sqlite"), "--seed", str(WORKSPACE / "tickets.json"))


ENGINEER = AgentKind(
    "engineer",
    "You are the engineer of the web shop of Harbour Light Coffee. You find out why something went wrong by reading"
    " the ticket, the documents and the source code, and you write down what you found in the ticket. Read before "
    "you judge. Quote file and line. Do not change files: say what to change.",
    lambda scratch: (_repo(), _tickets(scratch)),
)
ANALYST = AgentKind(
    "analyst",
    "You are the analyst of Harbour Light Coffee. You answer questions about products, customers and orders with "
    "figures from the tables, and look up the rules in the documents where a figure needs one. Look at the columns "
    "of a table before you compute. Give the figure first, then where it comes from, in two sentences.",
    lambda scratch: (_tables(), _repo()),
)
SUPPORT = AgentKind(
    "support",
    "You answer the customers of Harbour Light Coffee. You look up the ticket, the order and the customer, decide "
    "by the rules of the shop, and comment on the ticket in plain and friendly words: what went wrong, what we do "
    "now, and when it will arrive. Refunds above 80 EUR are decided by Ines.",
    lambda scratch: (_tickets(scratch), _tables()),
)


def call(tool: str, user: str | None = None, /, **arguments: Any) -> Step:
    return Step(tool, arguments, user)


def choose(tool: str, user: str | None = None) -> Step:
    return Step(tool, None, user)


def say(user: str = "In one short sentence: what did you find?") -> Step:
    return Step(None, None, user)


TASKS: tuple[SampleTask, ...] = (
    SampleTask(
        "engineer-shipping",
        ENGINEER,
        "Ticket 1 says a customer paid shipping at exactly 39 EUR. Find out why and tell me the line.",
        (
            call("show_ticket", number=1),
            call("read_file", path="docs/shipping.md"),
            call("search", text="freeFrom"),
            call("read_file", path="src/pricing.js"),
            say(),
            call("search", "Is the discount taken off before that comparison?", text="discount"),
            call("read_file", path="src/orders.js"),
            call(
                "comment_ticket",
                number=1,
                text="pricing.js compares with > and not >=, so exactly 39 EUR pays shipping.",
            ),
            call("list_tickets", status="open"),
            say("Write one sentence for the customer."),
        ),
    ),
    SampleTask(
        "analyst-refunds",
        ANALYST,
        "How many orders were refunded, and which coffees were they?",
        (
            choose("describe"),
            call("describe", table="orders"),
            call("summarise", table="orders", function="count", column="order", group_by="state"),
            call("rows", table="orders", column="state", equals="refunded"),
            say(),
            call("read_file", "Which rule covers a refund?", path="docs/returns.md"),
            call("describe", table="products"),
            call("summarise", table="orders", function="sum", column="total_eur", group_by="state"),
            say("Say in one sentence how much money went back."),
        ),
    ),
    SampleTask(
        "support-grind",
        SUPPORT,
        "Please take care of ticket 6, the wrong grind.",
        (
            call("show_ticket", number=6),
            call("rows", table="customers", column="name", equals="Cafe Zuiderhaven"),
            call("rows", table="orders", column="customer", equals="C03"),
            call("describe", table="products"),
            say(),
            call("comment_ticket", number=6, text="Refund of 96.00 EUR is above 80 EUR. Ines, please decide."),
            call("find_tickets", "Did anybody else get the wrong grind?", text="grind"),
            call("show_ticket", number=6),
            say("What do you tell the customer today?"),
        ),
    ),
    SampleTask(
        "engineer-stock",
        ENGINEER,
        "Ticket 2 is urgent: a line of an order is missing from stock. Look into the reservation code.",
        (
            call("show_ticket", number=2),
            choose("list_files"),
            call("read_file", path="src/stock.js"),
            call("read_file", path="src/orders.js"),
            say(),
            call("search", "Where else do we use the order number as a key?", text="order.id"),
            call("search", text="holds"),
            call("comment_ticket", number=2, text="stock.js keeps one hold per order, so the second line replaces it."),
            say("Which file has to change, and how?"),
        ),
    ),
    SampleTask(
        "analyst-customers",
        ANALYST,
        "Who are our best customers this month, by money?",
        (
            call("describe", table="orders"),
            call("summarise", table="orders", function="sum", column="total_eur", group_by="customer"),
            call("describe", table="customers"),
            call("rows", table="customers", column="kind", equals="company"),
            say(),
            call(
                "summarise",
                "And how many bags did each of them buy?",
                table="orders",
                function="sum",
                column="quantity",
                group_by="customer",
            ),
            choose("summarise"),
            call("rows", table="orders", column="customer", equals="C09"),
            say("Name the best customer and the sum."),
        ),
    ),
    SampleTask(
        "support-parcel",
        SUPPORT,
        "Hotel Sund asks again where their parcel is, see ticket 4.",
        (
            call("show_ticket", number=4),
            call("rows", table="customers", column="name", equals="Hotel Sund"),
            call("rows", table="orders", column="customer", equals="C09"),
            call("rows", table="orders", column="state", equals="lost"),
            say(),
            call(
                "comment_ticket",
                number=4,
                text="Six working days: the parcel counts as lost. We send it again.",
            ),
            call(
                "create_ticket",
                title="Carrier: lost parcel HL-1009",
                body="No move for six working days. Ask for compensation.",
                priority="normal",
            ),
            call("list_tickets", status="open"),
            say("Write the answer to the hotel."),
        ),
    ),
    SampleTask(
        "engineer-invoice",
        ENGINEER,
        "Check that invoices show the right VAT, and whether ticket 7 can stay closed.",
        (
            call("show_ticket", number=7),
            call("read_file", path="src/invoice.js"),
            call("search", text="VAT"),
            choose("read_file"),
            say(),
            call("read_file", "Does the total on the invoice contain the discount?", path="src/pricing.js"),
            call("search", text="invoiceText"),
            call(
                "comment_ticket",
                number=7,
                text="invoice.js takes 7 percent of the whole total. Can stay closed.",
            ),
            say("Give me the result in one sentence."),
        ),
    ),
    SampleTask(
        "analyst-stock",
        ANALYST,
        "Which coffees will run out first? The limit for a warning is in the shop's configuration.",
        (
            call("read_file", path="config/shop.toml"),
            call("describe", table="products"),
            call("summarise", table="products", function="sum", column="stock_bags", group_by="sku"),
            call("summarise", table="orders", function="sum", column="quantity", group_by="sku"),
            say(),
            call("rows", "What about Keel Guatemala?", table="products", column="sku", equals="KEE-250"),
            call("rows", table="orders", column="sku", equals="KEE-250"),
            choose("rows"),
            say("Which one do we roast next?"),
        ),
    ),
    SampleTask(
        "support-espresso",
        SUPPORT,
        "Jonas Weber's espresso is sour, ticket 5 or 3. Help him and close it.",
        (
            call("find_tickets", text="espresso"),
            call("show_ticket", number=3),
            call("rows", table="customers", column="name", equals="Jonas Weber"),
            call("rows", table="orders", column="customer", equals="C07"),
            say(),
            call("rows", "When was his Lighthouse roasted?", table="products", column="name", equals="Lighthouse"),
            call("comment_ticket", number=3, text="Grind finer: 28 seconds for 38 g at 93 C, instead of 19 seconds at 90 C."),
            call("close_ticket", number=3, resolution="Sent the brewing card for Lighthouse."),
            say("Write him two friendly sentences."),
        ),
    ),
    SampleTask(
        "engineer-limits",
        ENGINEER,
        "Are the limits in shop.toml really enforced by the code?",
        (
            call("read_file", path="config/shop.toml"),
            call("search", text="lines_per_order"),
            call("search", text="hold"),
            call("read_file", path="src/stock.js"),
            say(),
            call("read_file", "And the number of bags per line?", path="src/orders.js"),
            call("search", text="quantity"),
            call(
                "create_ticket",
                title="Limits are not enforced",
                body="lines_per_order and bags_per_line of shop.toml are read nowhere.",
                priority="normal",
            ),
            say("Which limits are missing?"),
        ),
    ),
    SampleTask(
        "analyst-shipping",
        ANALYST,
        "How many orders go to each shipping zone, and how many of them would ship free?",
        (
            call("describe", table="customers"),
            call("summarise", table="customers", function="count", column="customer", group_by="zone"),
            call("read_file", path="docs/shipping.md"),
            call("summarise", table="orders", function="count", column="order", group_by="customer"),
            say(),
            call(
                "summarise",
                "What does an order cost on average?",
                table="orders",
                function="mean",
                column="total_eur",
                group_by="customer",
            ),
            call("rows", table="customers", column="zone", equals="far"),
            choose("summarise"),
            say("Answer the first question in one sentence."),
        ),
    ),
    SampleTask(
        "support-soldout",
        SUPPORT,
        "Three people wait for Keel Guatemala, ticket 5. Tell them what we know.",
        (
            call("show_ticket", number=5),
            call("rows", table="products", column="sku", equals="KEE-250"),
            call("rows", table="orders", column="sku", equals="KEE-250"),
            choose("describe"),
            say(),
            call("comment_ticket", number=5, text="Keel Guatemala is roasted on Thursday and ships on Friday."),
            call("rows", "Is there something similar in stock?", table="products", column="kind", equals="filter"),
            call("list_tickets", status="waiting"),
            say("Recommend one coffee until then."),
        ),
    ),
    SampleTask(
        "engineer-triage",
        ENGINEER,
        "Go through the open tickets and tell me which one is a bug in the code.",
        (
            call("list_tickets", status="open"),
            call("show_ticket", number=1),
            call("show_ticket", number=2),
            call("show_ticket", number=4),
            say(),
            call("read_file", "Who of us should get each of them?", path="docs/overview.md"),
            call("search", text="Priya"),
            call("comment_ticket", number=2, text="Bug in src/stock.js, for Priya, before ticket 1."),
            say("List the bugs, the most urgent first."),
        ),
    ),
)
"""In the order in which they are recorded and replayed: neighbours are of different kinds."""

"""`turnkeep`: loads a command's module only when it is asked for, so that `turnkeep --help` answers at once."""

from __future__ import annotations

import importlib

import click

COMMANDS = {
    "serve": "cli.serve",
    "engine": "cli.engine",
    "model": "cli.model",
    "bench": "cli.bench",
    "replay": "cli.replay",
    "explain": "cli.explain",
    "keys": "cli.keys",
    "cache": "cli.cache",
    "demo": "cli.demo",
}


class LazyGroup(click.Group):
    """A group whose commands are attributes `command` of the modules in COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = importlib.import_module(module).command
        return command


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Every option can also be set by an environment variable (TURNKEEP_ plus command and option, for example "
    "TURNKEEP_SERVE_PORT) and, for `serve`, in the TOML file given by --config.",
)
@click.version_option(package_name="turnkeep", prog_name="turnkeep")
def cli() -> None:
    """Serve one language model to many tool-calling agents, and keep their KV while the tools run.

    \b
    First steps:
      turnkeep serve                     the gateway with a small model on this machine's CPU
      turnkeep demo                      an agent, a replay of recorded sessions, and a table of what routing bought
      turnkeep replay FILE --url URL     recorded agent sessions against any OpenAI-compatible server
      turnkeep explain FILE              why recorded turns reuse less of their prefix than they could
    """


def main() -> None:
    """Entry point of the `turnkeep` script."""
    cli(auto_envvar_prefix="TURNKEEP")


if __name__ == "__main__":
    main()

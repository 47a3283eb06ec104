"""The settings of `turnkeep serve` in one list: their place in the TOML file, their option, their kind.

A setting comes from the command line, else from its TURNKEEP_SERVE_ variable, else from the file given by --config, else
from its default: click's own order, with the file as click's default map.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click

from gateway.access.config import AuthConfig
from gateway.admission.config import AdmissionConfig
from gateway.config import HttpConfig, SessionsConfig
from gateway.discovery.fleet import FleetConfig
from gateway.dispatch import PoolConfig
from gateway.router.config import RouterConfig
from gateway.telemetry.config import TelemetryConfig
from gateway.turns.config import TurnsConfig
from gateway.watching.config import MissesConfig
from sessions.gaps.model import GapConfig
from sessions.redis_link import RedisConfig

Kind = Literal["string", "integer", "number", "boolean", "strings"]
Decorated = Callable[..., Any]

_WORDS: dict[Kind, str] = {
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "strings": "a list of strings",
}


class ConfigError(Exception):
    """A configuration that cannot be used. The message names the key and says what is expected."""


@dataclass(frozen=True, slots=True)
class Setting:
    """`path`: where the file has it (`http.port`). `parameter`: the click parameter that carries it."""

    path: str
    parameter: str
    kind: Kind


PLAIN_SETTINGS: tuple[Setting, ...] = (
    Setting("model", "model", "string"),
    Setting("served_model_name", "served_model_name", "strings"),
    Setting("tool_format", "tool_format", "string"),
    Setting("also_serve", "also_serve", "strings"),
    Setting("cache_dir", "cache_dir", "string"),
    Setting("replicas", "replicas", "integer"),
    Setting("processes", "processes", "integer"),
    Setting("workers", "worker", "strings"),
    Setting("workers_file", "workers_file", "string"),
    Setting("pool.ca_file", "worker_ca", "string"),
    Setting("registration_token", "registration_token", "string"),
    Setting("log_level", "log_level", "string"),
    Setting("record", "record", "string"),
    Setting("http.host", "host", "string"),
    Setting("http.port", "port", "integer"),
    Setting("http.max_body_mib", "max_body_mib", "number"),
    Setting("http.tls_cert", "tls_cert", "string"),
    Setting("http.tls_key", "tls_key", "string"),
    Setting("http.cors_origins", "cors_origin", "strings"),
    Setting("auth.api_keys", "api_key", "strings"),
    Setting("auth.api_key_file", "api_key_file", "string"),
    Setting("auth.admin_host", "admin_host", "string"),
    Setting("auth.admin_port", "admin_port", "integer"),
    Setting("sessions.sources", "session_source", "strings"),
    Setting("sessions.ledger", "ledger", "boolean"),
    Setting("redis.url", "redis", "string"),
    Setting("sessions.directory", "session_dir", "string"),
    Setting("router.policy", "policy", "string"),
    Setting("router.shadow_policy", "shadow_policy", "string"),
    Setting("telemetry.otlp", "otlp", "string"),
    Setting("telemetry.otlp_headers", "otlp_header", "strings"),
)
"""Settings with an option of their own in `cli.serve`."""

GENERATED: Mapping[str, tuple[type[Any], frozenset[str]]] = {
    "http": (HttpConfig, frozenset({"host", "port", "max_body_bytes", "tls_cert", "tls_key"})),
    "admission": (AdmissionConfig, frozenset()),
    "auth": (AuthConfig, frozenset({"admin_host", "admin_port"})),
    "router": (RouterConfig, frozenset({"policy", "shadow_policy"})),
    "sessions": (SessionsConfig, frozenset({"ledger"})),
    "pool": (PoolConfig, frozenset({"models", "aliases", "router", "ca_file"})),
    "discovery": (FleetConfig, frozenset()),
    "turns": (TurnsConfig, frozenset()),
    "misses": (MissesConfig, frozenset()),
    "gaps": (GapConfig, frozenset()),
    "redis": (RedisConfig, frozenset({"url"})),
    "telemetry": (TelemetryConfig, frozenset({"otlp_url", "otlp_headers"})),
}
"""Tables whose remaining scalar fields become options --TABLE-FIELD. Each with its config class and what is left out."""

ENGINE_TABLE = "engine"
"""Keys of this table are options of `turnkeep engine`, checked against that command."""


def generated_settings() -> tuple[Setting, ...]:
    """One setting for each scalar field of the config classes that has no option of its own."""
    return tuple(
        Setting(f"{table}.{name}", f"{table}_{name}", kind)
        for table in GENERATED
        for name, kind, _default in _scalar_fields(table)
    )


def all_settings() -> tuple[Setting, ...]:
    """Every setting that the file may hold outside of the engine table."""
    return (*PLAIN_SETTINGS, *generated_settings())


def generated_options(command: Decorated) -> Decorated:
    """Adds the generated settings to a command as hidden options; docs/configuration.md lists them."""
    types: dict[Kind, Any] = {"integer": int, "number": float, "boolean": bool, "string": str}
    for table in reversed(tuple(GENERATED)):
        for name, kind, default in reversed(list(_scalar_fields(table))):
            flag = f"--{table}-{name.replace('_', '-')}"
            command = click.option(
                flag, f"{table}_{name}", type=types[kind], default=None, hidden=True, help=f"[default: {default}]"
            )(command)
    return command


def generated_values(table: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a table's config class that were set."""
    given = ((name, options.get(f"{table}_{name}")) for name, _kind, _default in _scalar_fields(table))
    return {name: value for name, value in given if value is not None}


def _scalar_fields(table: str) -> Iterator[tuple[str, Kind, Any]]:
    config, left_out = GENERATED[table]
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name in left_out:
            continue
        hint = hints[field.name]
        options = [option for option in get_args(hint) if option is not NoneType]
        if NoneType in get_args(hint) and len(options) == 1:
            hint = options[0]
        kinds: dict[Any, Kind] = {bool: "boolean", int: "integer", float: "number", str: "string"}
        kind = "string" if get_origin(hint) is Literal else kinds.get(hint)
        if kind is not None:
            yield field.name, kind, field.default


def load_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A TOML file as (values by click parameter, the engine table). Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    engine = content.pop(ENGINE_TABLE, {})
    if not isinstance(engine, dict):
        raise ConfigError(f"{path}: {ENGINE_TABLE}: a table is expected.")
    known = {setting.path: setting for setting in all_settings()}
    tables = {setting.path.split(".")[0] for setting in known.values() if "." in setting.path}
    values: dict[str, Any] = {}
    for key, value in _flatten(content, tables, path):
        setting = known.get(key)
        if setting is None:
            near = difflib.get_close_matches(key, [*known, ENGINE_TABLE], n=1)
            hint = f" Did you mean {near[0]}?" if near else " docs/configuration.md lists them."
            raise ConfigError(f"{path}: there is no setting {key}.{hint}")
        values[setting.parameter] = _checked(value, setting, path)
    return values, engine


def _flatten(content: Mapping[str, Any], tables: set[str], path: Path) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if key in tables:
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: {key}: a table is expected, not {_kind_of(value)}.")
            for inner, inner_value in value.items():
                yield f"{key}.{inner}", inner_value
        else:
            yield key, value


def _checked(value: Any, setting: Setting, path: Path) -> Any:
    fits = {
        "string": isinstance(value, str),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
        "strings": isinstance(value, list) and all(isinstance(item, str) for item in value),
    }[setting.kind]
    if not fits:
        raise ConfigError(f"{path}: {setting.path}: {_WORDS[setting.kind]} is expected, not {_kind_of(value)}.")
    return value


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    kinds = ((str, "a string"), (int, "a whole number"), (float, "a number"), (list, "a list"), (dict, "a table"))
    return next((word for kind, word in kinds if isinstance(value, kind)), f"a {type(value).__name__}")


def engine_arguments(command: click.Command, values: Mapping[str, Any], where: str) -> list[str]:
    """Options of `turnkeep engine` from keys and values, as arguments. Raises ConfigError for one that it does not have, or
    that the gateway sets itself."""
    options = {option: parameter for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    arguments: list[str] = []
    for key, value in values.items():
        flag = "--" + key.replace("_", "-")
        parameter = options.get(flag)
        if parameter is None:
            near = difflib.get_close_matches(flag, options, n=1)
            hint = f" Did you mean {near[0][2:]}?" if near else " `turnkeep engine --help` lists them."
            raise ConfigError(f"{where}: the engine has no option {key}.{hint}")
        if flag in ("--model", "--model-name", "--uds", "--host", "--port", "--cache-dir"):
            raise ConfigError(f"{where}: {key} is set by the gateway; leave it out.")
        if isinstance(parameter, click.Option) and parameter.is_flag:
            if not isinstance(value, bool) and str(value).lower() not in ("true", "false"):
                raise ConfigError(f"{where}: {key}: true or false is expected, not {value!r}.")
            if value is True or str(value).lower() == "true":
                arguments.append(flag)
            continue
        if isinstance(value, bool | dict | list):
            raise ConfigError(f"{where}: {key}: a string or a number is expected, not {_kind_of(value)}.")
        try:
            parameter.type.convert(str(value), parameter, None)
        except click.BadParameter as error:
            raise ConfigError(f"{where}: {key}: {error.message}") from error
        arguments += [flag, str(value)]
    return arguments

"""What command line, environment and file together make of `turnkeep serve`."""

import dataclasses
import pickle

import pytest
from click.testing import CliRunner

import cli.serve
from cli.config import ConfigError, all_settings, engine_arguments, load_file
from cli.discovery import found_workers
from cli.engine import command as engine_command
from cli.main import cli as turnkeep
from gateway.workers.spec import WorkerSpec


@pytest.fixture
def plan(monkeypatch, tmp_path):
    """Runs the command up to the plan: plan(*arguments, toml=..., **environment) -> ServePlan or the error text."""
    model = tmp_path / "models" / "tiny"
    model.mkdir(parents=True)
    monkeypatch.setattr(cli.serve, "fetch", lambda name, cache_dir, console: model)

    def run(*arguments, toml=None, env=None):
        plans = []

        async def serve(made, console):
            plans.append(made)
            return 0

        monkeypatch.setattr(cli.serve, "serve", serve)
        if toml is not None:
            (tmp_path / "turnkeep.toml").write_text(toml)
            arguments = ("--config", tmp_path / "turnkeep.toml", *arguments)
        result = CliRunner().invoke(turnkeep, ["serve", *map(str, arguments)], env=env or {}, auto_envvar_prefix="TURNKEEP")
        if plans:
            assert result.exit_code == 0, result.output
            return plans[0]
        assert result.exit_code == 2, (result.output, result.exception)
        return " ".join(result.output.replace("\n", " ").split())

    return run


def test_defaults(plan):
    made = plan()
    assert made.replicas.count == 1
    assert made.replicas.arguments == ()
    assert made.gateway.http.port == 8000
    assert made.gateway.http.max_body_bytes == 64 * 2**20
    assert made.gateway.models[0].name == "SmolLM2-135M-Instruct"
    assert made.pool.models == ("SmolLM2-135M-Instruct",)
    assert (made.record, made.workers, made.gateway.auth.keys) == (None, (), ())


def test_options_then_environment_then_file_then_defaults(plan):
    toml = "replicas = 5\n[http]\nport = 1111\nwrite_timeout = 7\n[router]\nhysteresis = 0.4\n"
    made = plan(toml=toml)
    assert (made.replicas.count, made.gateway.http.port, made.gateway.http.write_timeout) == (5, 1111, 7.0)
    assert made.pool.router.hysteresis == 0.4
    env = {"TURNKEEP_SERVE_PORT": "2222", "TURNKEEP_SERVE_HTTP_WRITE_TIMEOUT": "8"}
    made = plan(toml=toml, env=env)
    assert (made.gateway.http.port, made.gateway.http.write_timeout) == (2222, 8.0)
    made = plan("--port", 3333, "--http-write-timeout", 9, "--replicas", 6, toml=toml, env=env)
    assert (made.gateway.http.port, made.gateway.http.write_timeout, made.replicas.count) == (3333, 9.0, 6)


def test_the_file_can_hold_everything(plan, tmp_path):
    (tmp_path / "keys").write_text("k3\n")
    made = plan(
        toml=f"""
        model = "tiny"
        served_model_name = ["main", "gpt-4o"]
        cache_dir = "{tmp_path}"
        replicas = 2
        workers = ["http://10.0.0.1:8100", "unix:/run/w.sock"]
        log_level = "warning"
        record = "{tmp_path}/rec"
        [http]
        host = "0.0.0.0"
        max_body_mib = 1.5
        ping_interval = 5
        [auth]
        api_keys = ["k1", "k2"]
        api_key_file = "{tmp_path}/keys"
        [sessions]
        sources = ["x-session-id", "body.session_id"]
        [router]
        policy = "round_robin"
        max_homes = 10
        [pool]
        max_attempts = 2
        [telemetry]
        otlp = "http://127.0.0.1:4318"
        otlp_headers = ["x-key=abc"]
        semconv = "legacy"
        [engine]
        dtype = "float32"
        max_num_seqs = 9
        no-prefix-caching = true
        """
    )
    assert (made.gateway.models[0].name, made.gateway.models[0].aliases) == ("main", ("gpt-4o",))
    assert made.pool.aliases == {"gpt-4o": "main"}
    assert made.replicas.count == 2
    assert made.workers == (WorkerSpec("http://10.0.0.1:8100"), WorkerSpec("unix:/run/w.sock"))
    assert (made.gateway.auth.keys, made.gateway.auth.key_file) == (("k1", "k2"), tmp_path / "keys")
    assert made.gateway.session_sources == ("x-session-id", "body.session_id")
    assert (made.gateway.http.host, made.gateway.http.max_body_bytes) == ("0.0.0.0", 3 * 2**19)
    assert (made.pool.router.policy, made.pool.router.max_homes, made.pool.max_attempts) == ("round_robin", 10, 2)
    assert (made.telemetry.otlp_url, dict(made.telemetry.otlp_headers)) == ("http://127.0.0.1:4318", {"x-key": "abc"})
    assert made.telemetry.semconv == "legacy"
    assert made.record == tmp_path / "rec"
    assert made.replicas.otlp_url == "http://127.0.0.1:4318"
    assert made.replicas.arguments == ("--dtype", "float32", "--max-num-seqs", "9", "--no-prefix-caching")


def test_engine_options_from_the_command_line_go_before_the_file(plan):
    made = plan("--dtype", "bfloat16", "--engine", "max-num-seqs=3", toml='[engine]\ndtype = "float32"\nmax_num_seqs = 9\n')
    assert made.replicas.arguments == ("--dtype", "bfloat16", "--max-num-seqs", "3")
    made = plan("--quantization", "int8", toml='[engine]\nquantization = "int4"\n')
    assert made.replicas.arguments == ("--quantization", "int8")


def test_with_workers_elsewhere_no_replicas_are_started(plan):
    assert plan("--worker", "http://a:1").replicas.count == 0
    assert plan("--worker", "http://a:1", "--replicas", 2).replicas.count == 2


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("replicas = ", "not valid TOML"),
        ('replicas = "two"', "replicas: a whole number is expected, not a string"),
        ("replicas = true", "replicas: a whole number is expected, not a boolean"),
        ("replicas = 1.5", "replicas: a whole number is expected, not a number"),
        ("http = 5", "http: a table is expected, not a whole number"),
        ("[http]\nprot = 1", "there is no setting http.prot. Did you mean http.port?"),
        ("[htpp]\nport = 1", "there is no setting htpp"),
        ("[auth]\napi_keys = 'k'", "auth.api_keys: a list of strings is expected, not a string"),
        ("[auth]\napi_keys = [1]", "auth.api_keys: a list of strings is expected, not a list"),
        ("[http]\nport = 99999", "99999 is not in the range 0<=x<=65535"),
        ("[http]\nping_interval = -1", "http.ping_interval must be positive, not -1"),
        ("[router]\nhysteresis = -1", "router.hysteresis must be zero or more"),
        ("[router]\npolicy = 'best'", "'best' is not one of"),
        ("[sessions]\nsources = ['cookie']", "no source named 'cookie'"),
        ("engine = 5", "engine: a table is expected"),
        ("[engine]\ndtpye = 'x'", "[engine]: the engine has no option dtpye. Did you mean dtype?"),
        ("[engine]\nport = 5", "port is set by the gateway"),
        ("[engine]\nno_prefix_caching = 'often'", "true or false is expected"),
        ("[engine]\nblock_size = [1]", "a string or a number is expected, not a list"),
        ("[engine]\nblock_size = 0", "block_size: 0 is not in the range"),
        ("[engine]\ndtype = 'int3'", "dtype: 'int3' is not one of"),
        ("[engine]\nquantization = 'int3'", "quantization: 'int3' is not one of"),
    ],
)
def test_files_that_make_no_sense(plan, toml, words):
    assert words in plan(toml=toml)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--config", "/absent.toml"), "/absent.toml cannot be read"),
        (("--replicas", 0), "Nothing would generate"),
        (("--worker", "localhost:1"), "must be http://host:port or unix:/path/to/socket"),
        (("--worker-ca", "/absent"), "pool.ca_file (--worker-ca): /absent cannot be used: No such file"),
        (("--workers-file", "/absent"), "--workers-file: /absent cannot be read: No such file"),
        (("--api-key-file", "/absent"), "API key file /absent cannot be read"),
        (("--engine", "dtype"), "takes NAME=VALUE"),
        (("--engine", "dtype=x"), "--engine: dtype"),
        (("--otlp", "collector"), "must be a URL"),
        (("--otlp", "http://c", "--otlp-header", "a"), "takes NAME=VALUE"),
        (("--http-threads", 0), "http.threads must be at least 1"),
        (("--port", "http"), "not a valid integer"),
        (("--redis", "localhost:6379"), "must be redis://HOST:PORT/DB"),
        (("--redis", "redis://h", "--redis-budget", 0), "redis.budget must be positive"),
        (("--session-source", "x-session"), "did you mean 'x-session-id'"),
        (("--turns-max-turn-bytes", 0), "turns.max_turn_bytes must be at least 1"),
        (("--gaps-half-life", 0), "gaps.half_life must be at least 1 second"),
        (("--misses-max-bytes", 0), "misses.max_bytes must be at least 1"),
    ],
)
def test_options_that_make_no_sense(plan, arguments, words):
    assert words in plan(*arguments)


def test_every_setting_has_an_option_and_every_key_is_documented(request):
    parameters = {parameter.name for parameter in cli.serve.command.params}
    documented = (request.config.rootpath / "docs" / "configuration.md").read_text()
    for setting in all_settings():
        assert setting.parameter in parameters, setting.path
        assert f"`{setting.path}`" in documented, setting.path


def test_a_file_is_read_by_parameter(tmp_path):
    path = tmp_path / "t.toml"
    path.write_text("[http]\nport = 5\n[engine]\na = 1\n")
    assert load_file(path) == ({"port": 5}, {"a": 1})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_file(tmp_path / "absent.toml")


def test_engine_arguments():
    given = {"kv_memory": "50%", "debug-integrity": True, "no_prefix_caching": False, "hang_timeout": 5.5}
    assert engine_arguments(engine_command, given, "x") == ["--kv-memory", "50%", "--debug-integrity", "--hang-timeout", "5.5"]


def test_plans_keep_keys_out_of_logs(plan):
    assert "sk-secret" not in repr(dataclasses.astuple(plan("--api-key", "sk-secret").pool))
    assert "sk-secret" not in repr(plan("--api-key", "sk-secret"))
    shared = plan("--redis", "redis://:sk-secret@h:7/1", "--redis-ttl", 60)
    assert "sk-secret" not in repr(shared)
    assert (shared.redis.shown, shared.redis.ttl) == ("redis://h:7/1", 60.0)
    assert plan().redis is None


def test_a_plan_for_several_processes_can_be_handed_to_them(plan):
    made = plan("--processes", 3, "--worker", "dns://workers.example:8000", "--redis", "redis://10.0.0.1:6379/0")
    assert made.processes == 3
    assert made.pool.router.agree is True
    assert plan().pool.router.agree is False
    assert plan("--processes", 2, "--router-agree", "false").pool.router.agree is False
    # Sources are made anew in each process, from what the options say.
    handed = pickle.loads(pickle.dumps(dataclasses.replace(made, sources=())))
    assert (handed.gateway, handed.pool, handed.redis) == (made.gateway, made.pool, made.redis)
    assert len(found_workers(handed.discovery)[1]) == len(made.sources) == 1

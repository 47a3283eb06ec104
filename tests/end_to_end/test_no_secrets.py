"""Everything a gateway says of a turn is searched for the key that the turn came with, and for pieces of it."""

import base64
import hashlib
import json
import urllib.error
import urllib.request

import pytest
import redis

from gateway.access.entries import new_key
from tests.live_gateway import otlp_collector, serve
from tests.redis_server import redis_server

USER = [{"role": "user", "content": "Say something."}]


def call(url, path, key=None, body=None, method=None, **headers):
    """Status, headers and body of an answer, as one text."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, f"{answer.headers}{answer.read().decode()}"
    except urllib.error.HTTPError as error:
        return error.code, f"{error.headers}{error.read().decode()}"


def everything_in(url):
    store = redis.Redis.from_url(url)
    for name in store.scan_iter():
        kind = store.type(name)
        value = {
            b"string": lambda name: store.get(name),
            b"hash": lambda name: store.hgetall(name),
            b"zset": lambda name: store.zrange(name, 0, -1),
        }[kind](name)
        yield f"{name} {value}"


def test_no_key_is_in_anything_that_leaves_the_gateway(tmp_path):
    user, admin, wrong = new_key(), new_key(), new_key()
    keys = tmp_path / "keys"
    keys.write_text(f"{user} requests_per_minute=100 tokens_per_minute=100000\n{admin} admin\n")
    said = []
    with otlp_collector() as collector, redis_server() as store:
        options = ["--simulate", "--num-blocks", 500, "--api-key-file", keys, "--log-level", "debug"]
        options += ["--otlp", collector.url, "--record", tmp_path / "records", "--redis", store.url]
        with serve(*options) as gateway:
            chat, turn = "/v1/chat/completions", {"messages": USER, "max_tokens": 8}
            answers = [
                call(gateway.url, chat, user, turn, Session_ID="s"),
                call(gateway.url, chat, user, {**turn, "stream": True}, Session_ID="s2"),
                call(gateway.url, "/v1/completions", user, {"prompt": "a", "max_tokens": 3}),
            ]
            assert [status for status, _ in answers] == [200] * 3
            refused = [
                call(gateway.url, chat, wrong, turn),
                call(gateway.url, chat, None, turn, x_api_key=wrong),
                call(gateway.url, chat, user, {"messages": 5}),
                call(gateway.url, f"/nothing/at/{'x' * 20}", user),
                call(gateway.url, "/metrics", user),
            ]
            assert [status for status, _ in refused] == [401, 401, 400, 404, 403]
            looked = [
                call(gateway.url, path, admin) for path in ("/metrics", "/workers", "/admission", "/v1/sessions", "/v1/models")
            ]
            assert {status for status, _ in looked} == {200}
            said.append(call(gateway.url, "/v1/routes", admin)[1])
            said += [text for _, text in (*answers, *refused, *looked)]
            said += [call(gateway.url, path, user)[1] for path in ("/v1/sessions", "/v1/sessions/s", "/v1/tools/gaps")]
            keys.write_text(f"{user}\n{admin} admin\n{wrong} and more\n")
            while not any("stay in force" in line for line in gateway.lines):
                assert gateway.process.poll() is None
                # The log is read by a thread.
                call(gateway.url, "/health")
            spans = collector.wait_for(lambda spans: sum(span.service == "turnkeep-gateway" for span in spans) >= 3)
            said += list(everything_in(store.url))
            gateway.stop()
            said += gateway.lines
        said += [repr(span) for span in spans]
    records = [path.read_text() for path in (tmp_path / "records").rglob("*") if path.is_file()]
    assert records
    said += records
    text = "\n".join(said)
    assert "Say something." in text
    for key in (user, admin, wrong):
        for form in (key, key[3:23], key[-20:], base64.b64encode(key.encode()).decode()[4:40]):
            assert form not in text
    # Not their hashes either: with those somebody could look for weak keys at leisure.
    for key in (user, admin):
        assert hashlib.sha256(key.encode()).hexdigest()[:16] not in text


@pytest.mark.parametrize("option", [("--api-key", "sk-secret-1 secret-2"), ("--api-key-file",)])
def test_a_key_that_cannot_be_read_is_not_repeated(tmp_path, option):
    from click.testing import CliRunner

    from cli.serve import command

    arguments = list(option)
    if len(option) == 1:
        (tmp_path / "keys").write_text("sk-secret-1 secret-2\n")
        arguments.append(str(tmp_path / "keys"))
    result = CliRunner().invoke(command, ["--simulate", *arguments, "--cache-dir", str(tmp_path)])
    assert result.exit_code != 0
    assert "secret-1" not in result.output
    assert "secret-2" not in result.output

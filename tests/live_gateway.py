"""Gateways in processes of their own, as `turnkeep serve` starts them, and a real OTLP receiver beside them."""

import contextlib
import gzip
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


@dataclass
class Served:
    url: str
    process: subprocess.Popen
    lines: list

    @property
    def api(self):
        return self.url + "/v1"

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def serve(*arguments, env=None):
    """`turnkeep serve` with these arguments on a free port, ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "serve", "--port", "0", *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **(env or {})},
    )
    lines, found, ready = [], [], threading.Event()

    def read():
        for line in process.stderr:
            lines.append(line)
            match = re.search(r"is ready at (http\S+)/v1", line)
            if match:
                found.append(match[1])
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(180), "".join(lines)
        assert found, "".join(lines)
        yield Served(found[0], process, lines)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        reader.join(10)
        process.stderr.close()


@dataclass
class Span:
    """A span as it came over the wire; ids are hex."""

    name: str
    trace: str
    id: str
    parent: str
    service: str
    start: int
    end: int
    attributes: dict


@dataclass
class Collector:
    """An OTLP/HTTP receiver: keeps every span it was sent."""

    url: str = ""
    spans: list = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, enough, timeout=30):
        """The spans, once `enough(spans)` holds."""
        with self.changed:
            assert self.changed.wait_for(lambda: enough(self.spans), timeout), [s.name for s in self.spans]
            return list(self.spans)


def plain(value):
    kind = value.WhichOneof("value")
    return [plain(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextlib.contextmanager
def otlp_collector():
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            message = ExportTraceServiceRequest.FromString(body)
            with collector.changed:
                for resource in message.resource_spans:
                    service = {a.key: plain(a.value) for a in resource.resource.attributes}.get("service.name", "")
                    for scope in resource.scope_spans:
                        for s in scope.spans:
                            attributes = {a.key: plain(a.value) for a in s.attributes}
                            ids = (s.trace_id.hex(), s.span_id.hex(), s.parent_span_id.hex())
                            times = (s.start_time_unix_nano, s.end_time_unix_nano)
                            collector.spans.append(Span(s.name, *ids, service, *times, attributes))
                collector.changed.notify_all()
            reply = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()

"""A client that is gone before the headers can be sent is no error of the server."""

import logging

from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from engine.server.app import _begin


async def test_nobody_left_to_answer_is_not_an_error(monkeypatch, caplog):
    async def gone(self, request):
        raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "prepare", gone)
    caplog.set_level(logging.INFO)
    assert await _begin(make_mocked_request("POST", "/v1/generate"), web.StreamResponse()) is False
    assert not caplog.records

"""The endpoints of OpenAI's dialect."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
from aiohttp import web

from gateway.apis.arrivals import Arrivals
from gateway.apis.endpoint import Arrival, TurnEndpoint
from gateway.apis.headers import REQUEST_ID, warning_header
from gateway.apis.openai.chat_answer import ChatAnswer
from gateway.apis.openai.chat_request import ChatOptions, parse_chat
from gateway.apis.openai.completion_answer import CompletionAnswer
from gateway.apis.openai.completion_request import CompletionOptions, parse_completion
from gateway.apis.openai.rendered import rendered
from gateway.apis.openai.sampling import bad_field
from gateway.apis.openai.tokenizing import detokenize, tokenize
from gateway.config import HttpConfig
from gateway.grammars import make_plan
from gateway.histories.keeper import TurnHistory
from gateway.models import ServedModel
from gateway.passthrough.endpoint import PassThrough
from gateway.pipeline import Pipeline
from gateway.turn import Prompt, SessionRef, Turn, TurnError
from gateway.workers.protocol import WorkerInfo
from prefix_cache.hashing import unpack_tokens


class OpenAIRoutes:
    """Chat Completions, Completions, models, and tokenising."""

    def __init__(
        self,
        pipeline: Pipeline,
        endpoint: TurnEndpoint,
        arrivals: Arrivals,
        http: HttpConfig,
        passthrough: PassThrough | None = None,
    ) -> None:
        self._passthrough = passthrough
        self._pipeline = pipeline
        self._endpoint = endpoint
        self._arrivals = arrivals
        self._http = http
        self._created = int(time.time())

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Registers the endpoints."""
        router.add_post("/v1/chat/completions", self.chat)
        router.add_post("/v1/completions", self.completions)
        router.add_post("/v1/chat/completions/render", self.render_chat)
        router.add_post("/v1/completions/render", self.render_completion)
        router.add_post("/v1/embeddings", self.embeddings)
        router.add_get("/v1/models", self.models)
        router.add_get("/v1/models/{name:.+}", self.model)
        router.add_post("/tokenize", self.tokenize)
        router.add_post("/detokenize", self.detokenize)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        arrival, session, warnings = await self._arrivals.turn(request, conversation=True)
        if self._passthrough is not None and self._passthrough.takes(arrival.body):
            return await self._passthrough.deliver(arrival, session, "/v1/chat/completions", "chat")
        model = self._find_model(arrival)
        turn, options = self._chat_turn(arrival, session, model, warnings)
        prompt_ids: list[int] = []

        async def make_prompts(info: WorkerInfo) -> tuple[Sequence[Prompt], TurnHistory | None]:
            prompt, history = await self._pipeline.prompts.from_turn(model, turn, info)
            if options.return_token_ids:
                prompt_ids.extend(unpack_tokens(prompt.packed_token_ids).tolist())
            return (prompt,), history

        answer = ChatAnswer(
            model, turn, options, created=int(arrival.wall_clock), fingerprint=self._fingerprint(model), prompt_ids=prompt_ids
        )
        return await self._endpoint.deliver(arrival, model, turn, make_prompts, answer)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        arrival, session, warnings = await self._arrivals.turn(request)
        if self._passthrough is not None and self._passthrough.takes(arrival.body):
            return await self._passthrough.deliver(arrival, session, "/v1/completions", "text_completion")
        model = self._find_model(arrival)
        turn, options = self._completion_turn(arrival, session, model, warnings)
        prompt_ids: list[list[int]] = []

        async def make_prompts(info: WorkerInfo) -> tuple[Sequence[Prompt], None]:
            prompts = await self._completion_prompts(model, turn, options, info)
            if options.return_token_ids:
                prompt_ids.extend(unpack_tokens(prompt.packed_token_ids).tolist() for prompt in prompts)
            return prompts, None

        answer = CompletionAnswer(
            model, turn, options, created=int(arrival.wall_clock), fingerprint=self._fingerprint(model), prompt_ids=prompt_ids
        )
        return await self._endpoint.deliver(arrival, model, turn, make_prompts, answer, plain=True)

    async def render_chat(self, request: web.Request) -> web.Response:
        """The tokens of a conversation's prompt, as a turn would send them. Nothing is written into the session."""
        arrival, session, warnings = await self._arrivals.turn(request)
        model = self._find_model(arrival)
        turn, _ = self._chat_turn(arrival, session, model, warnings)
        prompt, _ = await self._pipeline.prompts.from_turn(model, turn, self._pipeline.pool_info(model))
        return self._rendered(arrival, rendered(turn, prompt, model.name), warnings)

    async def render_completion(self, request: web.Request) -> web.Response:
        """The tokens of plain prompts, one entry for each."""
        arrival, session, warnings = await self._arrivals.turn(request)
        model = self._find_model(arrival)
        turn, options = self._completion_turn(arrival, session, model, warnings)
        prompts = await self._completion_prompts(model, turn, options, self._pipeline.pool_info(model))
        return self._rendered(arrival, [rendered(turn, prompt, model.name) for prompt in prompts], warnings)

    def _rendered(self, arrival: Arrival, answer: Any, warnings: list[str]) -> web.Response:
        headers = {REQUEST_ID: arrival.request_id, **warning_header(warnings)}
        return web.Response(body=orjson.dumps(answer), content_type="application/json", headers=headers)

    def _chat_turn(
        self, arrival: Arrival, session: SessionRef, model: ServedModel, warnings: list[str]
    ) -> tuple[Turn, ChatOptions]:
        with self._pipeline.telemetry.stages.spent("parse"):
            turn, options = parse_chat(
                arrival.body,
                model=model,
                session=session,
                request_id="chatcmpl-" + secrets.token_hex(16),
                max_choices=self._http.max_choices,
                warnings=warnings,
                seen=arrival.seen,
            )
            self._arrivals.remember(arrival, turn)
        return turn, options

    def _completion_turn(
        self, arrival: Arrival, session: SessionRef, model: ServedModel, warnings: list[str]
    ) -> tuple[Turn, CompletionOptions]:
        return parse_completion(
            dict(arrival.body),
            model=model,
            session=session,
            request_id="cmpl-" + secrets.token_hex(16),
            max_choices=self._http.max_choices,
            max_prompts=self._http.max_prompts,
            warnings=warnings,
        )

    async def _completion_prompts(
        self, model: ServedModel, turn: Turn, options: CompletionOptions, info: WorkerInfo
    ) -> list[Prompt]:
        plan = make_plan(model, turn)
        prompts: list[Prompt] = []
        for position, given in enumerate(options.prompts):
            field = "prompt" if len(options.prompts) == 1 else f"prompt[{position}]"
            if isinstance(given, str):
                prompt = await self._pipeline.prompts.from_text(
                    model, given, info, cache_salt=turn.cache_salt, grammar=plan.source, field=field
                )
            else:
                prompt = self._pipeline.prompts.from_ids(
                    model, given, info, cache_salt=turn.cache_salt, grammar=plan.source, field=field
                )
            prompts.append(replace(prompt, unenforced=plan.unenforced))
        return prompts

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        """Only opaque workers make them."""
        arrival, session, _ = await self._arrivals.turn(request)
        if self._passthrough is not None and self._passthrough.takes(arrival.body):
            return await self._passthrough.deliver(arrival, session, "/v1/embeddings", "embeddings")
        name = self._find_model(arrival).name
        raise TurnError(400, "unsupported", f"Model '{name}' makes no embeddings here.", param="model")

    async def models(self, request: web.Request) -> web.Response:
        self._arrivals.tenant(request)
        data = [self._card(model, name) for model in self._pipeline.models.all for name in (model.name, *model.aliases)]
        data += [self._opaque_card(name) for name in self._opaque_models()]
        return web.json_response({"object": "list", "data": data})

    async def model(self, request: web.Request) -> web.Response:
        self._arrivals.tenant(request)
        name = request.match_info["name"]
        if name in self._opaque_models():
            return web.json_response(self._opaque_card(name))
        return web.json_response(self._card(self._model_named(name), name))

    async def tokenize(self, request: web.Request) -> web.Response:
        arrival, warnings = await self._arrivals.body(request)
        answer = await tokenize(dict(arrival.body), self._pipeline, warnings)
        return web.json_response(answer, headers={REQUEST_ID: arrival.request_id, **warning_header(warnings)})

    async def detokenize(self, request: web.Request) -> web.Response:
        arrival, warnings = await self._arrivals.body(request)
        answer = detokenize(dict(arrival.body), self._pipeline, warnings)
        return web.json_response(answer, headers={REQUEST_ID: arrival.request_id, **warning_header(warnings)})

    def _find_model(self, arrival: Arrival) -> ServedModel:
        """Before anything else is read: an unknown model is a better complaint than any other."""
        name = arrival.body.get("model")
        if name is not None and not isinstance(name, str):
            raise bad_field("model", "a string is expected")
        return self._model_named(name)

    def _model_named(self, name: str | None) -> ServedModel:
        return self._pipeline.models.find(name, also=self._opaque_models())

    def _opaque_models(self) -> tuple[str, ...]:
        return self._passthrough.models() if self._passthrough is not None else ()

    def _opaque_card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "turnkeep"}

    def _card(self, model: ServedModel, name: str) -> dict[str, Any]:
        card: dict[str, Any] = {"id": name, "object": "model", "created": self._created, "owned_by": "turnkeep"}
        if name != model.name:
            card["root"] = model.name
        try:
            card["max_model_len"] = self._pipeline.pool_info(model).max_model_len
        except TurnError:
            # No worker is up yet; the list is right all the same.
            pass
        return card

    def _fingerprint(self, model: ServedModel) -> str:
        """Changes when the weights or the way of computing do: the pool's KV namespace."""
        return "tk-" + self._pipeline.pool_info(model).namespace[:12]

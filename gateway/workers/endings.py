"""What becomes of a request that its workers did not finish: each way as the answer that its client gets."""

from __future__ import annotations

from gateway.turn import TurnError
from gateway.workers.base import WorkerRefusedError, WorkerUnavailableError
from gateway.workers.protocol import ErrorDetail, Failed

# The whole worker is going, not this request: what it could not begin, another can, and what it began, another can finish.
WORKER_IS_GOING = frozenset({"shutting_down", "engine_failed"})
_PASSED_ON = frozenset({400, 413})


class WorkerGoingError(WorkerUnavailableError):
    """The worker says that it is going."""

    def __init__(self, worker: str, chunk: Failed) -> None:
        super().__init__(f"Worker {worker}: {chunk.message}", reached=True, busy=True)
        self.code = chunk.code


def refusal(error: WorkerRefusedError) -> TurnError:
    detail: ErrorDetail = error.detail
    return TurnError(
        error.status if error.status in _PASSED_ON else 400, detail.code, detail.message, param=_param_of(detail.field)
    )


def _param_of(field: str | None) -> str | None:
    """The worker's field in the words of a client: sampling values bear the API's names, prompts do not."""
    if field is None or field in ("token_ids", "packed_token_ids"):
        return None
    return field.removeprefix("sampling.")


def failure(worker: str, chunk: Failed) -> TurnError:
    if chunk.code in WORKER_IS_GOING:
        return TurnError(503, chunk.code, f"Worker {worker}: {chunk.message}", retry_after=1.0)
    return TurnError(502, chunk.code, f"Worker {worker} could not finish the request: {chunk.message}")


def exhausted(error: WorkerUnavailableError, attempts: int) -> TurnError:
    tried = "the worker" if attempts == 1 else f"{attempts} workers"
    if error.busy:
        return TurnError(
            503,
            "overloaded",
            f"No worker can take the request now: {error}. Try again later.",
            retry_after=error.retry_after if error.retry_after is not None else 1.0,
        )
    if not error.reached:
        return TurnError(503, "no_worker", f"Tried {tried} in vain: {error}. Try again shortly.", retry_after=1.0)
    return TurnError(502, "worker_failed", f"Tried {tried} in vain: {error}. Send the request again.", retry_after=1.0)


def closed_error() -> TurnError:
    return TurnError(503, "aborted", "The generation was ended before its answer was complete.")

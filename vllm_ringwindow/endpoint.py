# SPDX-License-Identifier: Apache-2.0
"""``GET /v1/ringwindow``: a running server's rings as JSON. Off by default.

vLLM loads an endpoint plugin only if ``VLLM_PLUGINS`` names it. Under ``/v1``, where
``--api-key`` guards. Tells request ids, lengths and block numbers, never tokens.
"""

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, HTTPException, Request

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

NAME = "ringwindow-inspect"
PATH = "/v1/ringwindow"

router = APIRouter()


class InspectEndpoint:
    """The ``vllm.endpoint_plugins`` entry point."""

    name = NAME
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)

    async def init_state(
        self, engine_client: "EngineClient | None", state: "State", args: Namespace
    ) -> None:
        state.ringwindow_engine = engine_client


async def _ask(request: Request, request_id: str | None) -> list[Any]:
    engine = getattr(request.app.state, "ringwindow_engine", None)
    core = getattr(engine, "engine_core", None)
    if core is None:
        raise HTTPException(503, "this server has no engine whose rings could be shown")
    return await core.call_utility_all_async("ringwindow_state", request_id)


@router.get(PATH)
async def all_rings(request: Request) -> dict[str, Any]:
    """Every engine's ring groups and requests: :func:`state.engine_state`."""
    return {"engines": await _ask(request, None)}


@router.get(PATH + "/requests/{request_id}")
async def one_request(request: Request, request_id: str) -> dict[str, Any]:
    """One request's rings, slot by slot: :func:`state.request_state`."""
    found = [state for state in await _ask(request, request_id) if state is not None]
    if not found:
        raise HTTPException(404, f"no request {request_id!r} is in the engine")
    return found[0]

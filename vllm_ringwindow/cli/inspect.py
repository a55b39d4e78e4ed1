# SPDX-License-Identifier: Apache-2.0
"""``vllm-ringwindow inspect``: a running server's rings."""

import argparse
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from vllm_ringwindow.cli import UserError
from vllm_ringwindow.cli.common import add_json, console, positive, write_json

# As in ``endpoint``, which needs FastAPI.
PATH = "/v1/ringwindow"
ENABLE = "VLLM_PLUGINS=ringwindow,ringwindow-inspect"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="a running server's rings",
        description="Shows the rings of a server that was started with "
        f"{ENABLE} in its environment. No prompt content is shown or served.",
    )
    parser.add_argument("url", help="the server's address, http://localhost:8000")
    parser.add_argument("--request", metavar="ID", help="draw one request's rings")
    parser.add_argument(
        "--watch", action="store_true", help="keep drawing until interrupted"
    )
    parser.add_argument(
        "--interval", type=positive, default=1, help="seconds between two looks"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("VLLM_API_KEY"),
        help="the server's (default: $VLLM_API_KEY)",
    )
    add_json(parser)
    parser.set_defaults(run=run, takes_engine_options=False)


def run(args: argparse.Namespace, _: list[str]) -> int:
    if args.watch and args.json:
        raise UserError("--watch and --json exclude each other")
    url = args.url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise UserError(
            f"{args.url!r} is not an address; example: http://localhost:8000"
        )
    out = console(args.json)
    if args.watch:
        from rich.live import Live

        with Live(console=out, refresh_per_second=4) as live:
            while True:
                live.update(_picture(args, _look(args, url)))
                time.sleep(args.interval)
    found = _look(args, url)
    if args.json:
        write_json(args.json, found)
    if args.json != "-":
        out.print(_picture(args, found))
    return 1 if args.request and wrong_slots(found) else 0


def _look(args: argparse.Namespace, url: str) -> dict[str, Any]:
    path = PATH
    if args.request:
        path += "/requests/" + urllib.parse.quote(args.request, safe="")
    return fetch(url, path, args.api_key)


def fetch(url: str, path: str, api_key: str | None) -> dict[str, Any]:
    """GET JSON.

    Raises:
        UserError: the server cannot be reached, is not vLLM, does not show its rings,
            wants a key, or has no such request.
    """
    request = urllib.request.Request(url + path)
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise UserError(f"{url} wants a key: --api-key, or VLLM_API_KEY") from None
        if error.code != 404:
            raise UserError(f"{url} answered {error.code}: {_detail(error)}") from None
        detail = _detail(error)
        if detail.startswith("no request"):
            raise UserError(f"{detail}; it may have finished") from None
        if _is_vllm(url, api_key):
            raise UserError(
                f"{url} is a vLLM server that does not show its rings: start it with "
                f"{ENABLE}"
            ) from None
        raise UserError(f"{url} is not a vLLM server") from None
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"cannot reach {url}: {reason}") from None
    except ValueError:
        raise UserError(f"{url} is not a vLLM server") from None


def _detail(error: urllib.error.HTTPError) -> str:
    """What the server says: vLLM answers ``{"error": {"message": ...}}``."""
    try:
        body = json.load(error)
        return str(body.get("detail") or body["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return str(error.reason)


def _is_vllm(url: str, api_key: str | None) -> bool:
    request = urllib.request.Request(url + "/version")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return "version" in json.load(response)
    except (OSError, ValueError):
        return False


def wrong_slots(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Slots of one request that do not hold what they should."""
    return [s for g in request["groups"] for s in g["slots"] if s["wrong"]]


def _picture(args: argparse.Namespace, found: dict[str, Any]) -> Any:
    return draw_request(found) if args.request else draw_engines(found["engines"])


def draw_engines(engines: list[dict[str, Any]]) -> Any:
    """Groups and requests of every engine."""
    from rich.console import Group
    from rich.table import Table

    parts: list[Any] = []
    for number, engine in enumerate(engines):
        parts.append(
            f"engine {number}: {engine['model']}, {engine['free_blocks']} of "
            f"{engine['pool_blocks']} blocks free"
        )
        parts += engine["decision"]
        columns = ("rings", "held", "fresh", "recycled", "released", "retained")
        groups = Table("group", "layers", "W", "block size", "R", *columns, "deferred")
        for group in engine["groups"]:
            keys = ("group", "layers", "window", "block_size", "ring_blocks", *columns)
            groups.add_row(*(str(group[key]) for key in (*keys, "deferred")))
        parts.append(groups)
        requests = Table("request", "status", "tokens computed", "ring blocks by group")
        for request in engine["requests"]:
            requests.add_row(
                request["id"],
                request["status"],
                f"{request['computed_tokens']} of {request['tokens']}",
                " ".join(map(str, request["ring_blocks"])),
            )
        parts.append(requests)
    return Group(*parts)


def draw_request(request: dict[str, Any]) -> Any:
    """Every group's ring, a slot per row."""
    from rich.console import Group
    from rich.table import Table

    parts: list[Any] = [
        f"{request['id']}: {request['status']}, {request['computed_tokens']} of "
        f"{request['tokens']} tokens computed"
    ]
    for group in request["groups"]:
        first_visible = max(request["computed_tokens"] - group["window"] + 1, 0)
        table = Table(
            "slot",
            "block",
            "logical block",
            "positions",
            "",
            title=f"group {group['group']}: W = {group['window']}, R = "
            f"{group['ring_blocks']}, base {group['base']}",
            title_justify="left",
        )
        for slot in [*group["slots"], *group["others"]]:
            first, last = slot["positions"]
            notes = []
            if slot["wrong"]:
                notes.append(f"[red]WRONG: {slot['wrong']}[/red]")
            elif slot["block"] is None:
                notes.append("given back")
            elif last < first_visible:
                notes.append("behind the window")
            elif first <= request["computed_tokens"] <= last:
                notes.append("being filled")
            if slot["hashed"]:
                notes.append("shared or cached")
            table.add_row(
                str(slot["slot"]),
                "-" if slot["block"] is None else str(slot["block"]),
                str(slot["logical_block"]),
                f"{first} .. {last}",
                ", ".join(notes),
            )
        parts.append(table)
    wrong = wrong_slots(request)
    parts.append(
        f"[red]{len(wrong)} slots do not hold what they should[/red]"
        if wrong
        else "every slot holds the positions it should"
    )
    return Group(*parts)

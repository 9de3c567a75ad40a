"""The web application: addresses, and what a request must be before a page is made for it.

    Host names this machine ─► not from another site ─► GET ─► token, if the address is not loopback ─► page

A foreign Host name is a DNS rebinding attack, a request from another site a page that wants to read data with the
reader's own browser. Every answer forbids scripts and styles that are not served from here.
"""

import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rowmill.core import html
from rowmill.core.errors import PipelineError
from rowmill.viewer import pages, queries
from rowmill.viewer.builds import Build, Builds, is_kept
from rowmill.viewer.links import Links
from rowmill.viewer.lists import ListName, ListQuery

_LOG = logging.getLogger("rowmill.viewer")

CONTENT_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
TOKEN_COOKIE = "rowmill_token"  # noqa: S105  (its name)
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """Lets a request through if it is a person's on this machine; with a token, on any machine that has it."""

    def __init__(self, app: ASGIApp, host: str, token: str) -> None:
        self.app = app
        self.names = LOOPBACK_NAMES | {host}
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 or 405 in place of the application, or add the headers that every answer has."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        refused = self.refuse(request)
        if refused is not None:
            await refused(scope, receive, send)
            return
        if self.token and "token" in request.query_params:
            # The token leaves the address, so that no link and no history holds it.
            kept = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
            answer = RedirectResponse(f"{request.url.path}{f'?{urlencode(kept)}' if kept else ''}", 303, dict(HEADERS))
            answer.set_cookie(TOKEN_COOKIE, self.token, httponly=True, samesite="strict")
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def refuse(self, request: Request) -> Response | None:
        """Return the answer to a request that is not let through."""
        name = re.sub(r":\d+$", "", request.headers.get("host", "")).strip("[]")
        # With a token, the machine is reached under names that are not known here; a foreign page has no token.
        if name not in self.names and not self.token:
            return _refuse(403, f"Host {name!r}: this server answers to {', '.join(sorted(self.names))} only")
        if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not _is_opened(request):
            return _refuse(403, "a page of another site asked for this; open the address in the browser itself")
        if request.method not in ("GET", "HEAD"):
            return _refuse(405, f"{request.method}: nothing can be changed here; only GET is allowed")
        if self.token:
            given = request.query_params.get("token") or request.cookies.get(TOKEN_COOKIE, "")
            if not hmac.compare_digest(given.encode(), self.token.encode()):
                return _refuse(403, "no token, or a wrong one; open the address that rowmill view printed")
        return None


def _is_opened(request: Request) -> bool:
    """Return whether a person followed a link of another site, such as Dagster's: that site does not see the answer."""
    headers = request.headers
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


def _refuse(status: int, why: str) -> Response:
    return PlainTextResponse(f"{why}\n", status, dict(HEADERS))


def make_app(builds: Builds, *, host: str = "127.0.0.1", token: str = "") -> ASGIApp:
    """Return the application for some recipes."""
    routes = [
        Route("/", _page(lambda _, __: pages.show_recipes(builds))),
        Route("/static/viewer.css", _asset("text/css", pages.join_styles())),
        Route("/static/viewer.js", _asset("text/javascript", pages.join_scripts())),
        Route("/favicon.ico", _asset("image/svg+xml", "")),
        Route("/{recipe}/expectations/{path:path}", _serve_expectations(builds)),
        *(
            Route(path, _of_build(builds, show))
            for path, show in (
                *((path, _report(builds)) for path in ("/{recipe}", "/{recipe}/report.html")),
                *((f"/{{recipe}}/{name}", _list(builds, name)) for name in ("rows", "rejects", "left_out")),
                ("/{recipe}/rows/{row_id}", lambda build, of: pages.show_row(builds, build, of.path_params["row_id"])),
                (
                    "/{recipe}/sequences/{dataset}/{split}/{number}",
                    lambda build, of: pages.show_sequence(
                        build, *(of.path_params[name] for name in ("dataset", "split", "number"))
                    ),
                ),
                (
                    "/{recipe}/steps/{number}",
                    lambda build, of: pages.show_step(
                        builds, build, of.path_params["number"], of.query_params.get("order", "")
                    ),
                ),
                *(
                    (
                        path,
                        lambda build, of: pages.show_comparison(builds, build, of.path_params.get("other", "")),
                    )
                    for path in ("/{recipe}/compare", "/{recipe}/compare/{other}")
                ),
                ("/{recipe}/search", _search),
                ("/{recipe}/selection", _select),
                ("/{recipe}/sql", lambda build, of: queries.show_sql(builds, build, of.query_params.get("q", ""))),
            )
        ),
    ]
    return Guard(Starlette(routes=routes), host, token)


_Show = Callable[[Build, Request], str | Iterator[str] | Response]
_Endpoint = Callable[[Request], Awaitable[Response]]


def _report(builds: Builds) -> _Show:
    def show(build: Build, _: Request) -> Response:
        # Once the page is sent, before its reader has clicked on a number.
        then = BackgroundTask(builds.prepare_lists, build)
        return HTMLResponse(pages.show_report(build), headers=dict(HEADERS), background=then)

    return show


def _list(builds: Builds, name: ListName) -> _Show:
    def show(build: Build, request: Request) -> Iterator[str]:
        query = ListQuery.parse(name, request.query_params)
        return pages.show_list(builds, build, query, request.query_params)

    return show


def _search(build: Build, request: Request) -> Response:
    text = request.query_params.get("q", "")
    return RedirectResponse(
        pages.find_address(build, text) if text.strip() else Links(build).of("rows"), 303, dict(HEADERS)
    )


def _select(build: Build, request: Request) -> Response:
    """Answer what leaves a row out; the browser collects it, and nothing is written here."""
    return JSONResponse(pages.find_entry(build, request.query_params.get("row", "")), headers=dict(HEADERS))


def _of_build(builds: Builds, show: _Show) -> _Endpoint:
    """Return the endpoint of a page of a build."""

    def answer(_: None, request: Request) -> str | Iterator[str] | Response:
        build = None
        try:
            build = builds.open_build(request.path_params["recipe"], request.query_params.get("version", ""))
            shown = show(build, request)
            # The first piece is made here, so that its errors become a page.
            return shown if isinstance(shown, str | Response) else _begin(shown, build)
        except (PipelineError, FileNotFoundError) as error:
            return HTMLResponse(pages.show_error(_explain_error(error, build), build), 404, dict(HEADERS))

    return _page(answer)


def _begin(pieces: Iterator[str], build: Build) -> Iterator[str]:
    first = next(pieces, "")

    def go_on() -> Iterator[str]:
        yield first
        try:
            yield from pieces
        except (PipelineError, FileNotFoundError) as error:
            yield f'<p class="bad" role="alert">{html.escape_text(_explain_error(error, build))}</p>'

    return go_on()


def _explain_error(error: BaseException, build: Build | None) -> BaseException:
    """Return what a page says of an error: one sentence if `gc` removed the build while the page was made."""
    if isinstance(error, FileNotFoundError) or (build is not None and not is_kept(build)):
        return FileNotFoundError("files of this build are gone: rowmill gc removed it; open the current build")
    return error


def _page(make: Callable[[Any, Request], str | Iterator[str] | Response]) -> _Endpoint:
    """Return an endpoint whose page is made in a thread: pages read files and wait for DuckDB."""

    async def answer(request: Request) -> Response:
        shown = await run_in_threadpool(make, None, request)
        if isinstance(shown, Response):
            return shown
        if isinstance(shown, str):
            return HTMLResponse(shown, headers=dict(HEADERS))
        return StreamingResponse(shown, media_type="text/html", headers=dict(HEADERS))

    return answer


def _asset(media_type: str, content: str) -> _Endpoint:
    async def answer(_: Request) -> Response:
        return Response(content, media_type=media_type, headers={**HEADERS, "Cache-Control": "max-age=60"})

    return answer


def _serve_expectations(builds: Builds) -> _Endpoint:
    """Return the endpoint of the pages of expectations, which builds wrote: files with their style inside."""

    def answer(_: None, request: Request) -> Response:
        name, path = request.path_params["recipe"], request.path_params["path"]
        headers = {
            **HEADERS,
            "Content-Security-Policy": html.CONTENT_POLICY.replace("script-src 'unsafe-inline'; ", ""),
        }
        try:
            store = builds.open_project(name).store
            if re.fullmatch(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*){0,3}\.html", path):
                return HTMLResponse(store.read(f"reports/{name}/expectations/{path}"), headers=headers)
        except (PipelineError, FileNotFoundError):
            pass
        return _refuse(404, "no such page")

    return _page(answer)

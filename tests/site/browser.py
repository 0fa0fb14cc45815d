"""The built site in a real browser: ``nox -s docs`` runs this file; it needs Chromium or Chrome.

``GENLM_SITE`` is the folder of the built site, ``GENLM_SITE_ONLY`` the one tutorial that was
executed if not all were, ``GENLM_SCREENSHOTS`` a folder for pictures of what was seen,
``GENLM_BROWSER`` the browser's executable if it is not on the path.
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 180_000  # Milliseconds to wait before an event counts as missing.
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
PAGES = {"start": "", "tutorial": "tutorials/smc/", "reference": "reference/models/"}


def needs(tutorial: str) -> pytest.MarkDecorator:
    only = os.environ.get("GENLM_SITE_ONLY")
    reason = f"the tutorial {tutorial} was not executed: --only {only}"
    return pytest.mark.skipif(only not in (None, "", tutorial), reason=reason)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """The address of the site, served from the folder that was built."""
    handler = functools.partial(Quiet, directory=os.environ["GENLM_SITE"])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    found = os.environ.get("GENLM_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(
            "no browser was found on the path; install one, such as Debian's package chromium, or "
            "set GENLM_BROWSER to its executable"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's sandbox does not work for root. The browser sees only this site.
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


class Visit:
    """A visited page, its errors, and its requests to other hosts."""

    def __init__(self, browser: Any, site: str, size: str) -> None:
        width, height = SIZES[size]
        self.site = site
        self.page = browser.new_page(viewport={"width": width, "height": height})
        self.page.set_default_timeout(PATIENCE)
        self.outside: list[str] = []
        self.errors: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("response", self._answered)
        self.page.route("**/*", self._asked)

    def _asked(self, route: Any) -> None:
        if route.request.url.startswith((self.site, "data:", "blob:")):
            route.continue_()
        else:
            self.outside.append(route.request.url)
            route.abort()

    def _said(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _answered(self, response: Any) -> None:
        if response.status >= 400:
            self.errors.append(f"{response.status} {response.url}")

    def open(self, path: str) -> Any:
        self.page.goto(self.site + path, wait_until="networkidle")
        return self.page

    def picture(self, name: str) -> None:
        folder = os.environ.get("GENLM_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))

    def close(self) -> None:
        self.page.close()
        assert self.outside == []
        assert self.errors == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_complete_and_fits_the_window(
    browser: Any, site: str, name: str, size: str
) -> None:
    visit = Visit(browser, site, size)
    page = visit.open(PAGES[name])
    assert page.locator("article h1").count() == 1
    missing = page.evaluate(
        "() => [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
    )
    assert missing == []
    overflow = page.evaluate(
        "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert overflow <= 0
    visit.picture(f"{name}-{size}")
    visit.close()


@needs("smc")
def test_tutorials_show_their_outputs_and_plots(browser: Any, site: str) -> None:
    visit = Visit(browser, site, "desktop")
    page = visit.open("tutorials/smc/")
    assert "tokens are allowed" in page.locator("article").inner_text()
    assert page.locator("article img").count() == 2
    visit.close()


def test_the_search_finds_a_method(browser: Any, site: str) -> None:
    visit = Visit(browser, site, "desktop")
    page = visit.open("")
    # Click the button once it listens: before that, keys leave the page ("n" goes to the next).
    page.get_by_role("button", name="Search").first.click()
    page.locator("input:focus").wait_for()
    page.keyboard.type("next_token_logprobs")
    found = page.locator("a[href*='reference/']").filter(has_text="next_token_logprobs").first
    found.wait_for()
    visit.picture("search")
    visit.close()


def test_the_reference_links_types_to_their_pages(browser: Any, site: str) -> None:
    visit = Visit(browser, site, "desktop")
    page = visit.open("reference/models/")
    text = page.locator("article").inner_text()
    assert "next_token_logprobs" in text
    # Roles in docstrings have become links or code.
    assert ":class:`" not in text
    assert ":meth:`" not in text
    assert page.locator("article a[href*='types/#genlm.core.types.Stats']").count() > 0
    visit.close()

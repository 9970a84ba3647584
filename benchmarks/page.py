"""Take the picture of docs/server.md: a race on the page of a server that runs.

    python -m jaxspec.serve --warm-up none &
    python benchmarks/page.py

The first race of a server waits for its programs; the picture is of the last one.
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

RACES = 3
QUESTION = "Tell me a short story about a dragon."
PATH = Path(__file__).with_name("page.png")


def race(browser: Browser, url: str, path: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(url)
    page.check("#race")
    page.fill("#temperature", "0.8")
    page.fill("#prompt", QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_be_visible(timeout=600_000)
    print(*page.locator(".head b, .foot, .error").all_text_contents(), sep="\n")
    page.screenshot(path=path)
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/")
    parser.add_argument("--path", type=Path, default=PATH)
    given = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for _ in range(RACES):
            race(browser, given.url, given.path)
        browser.close()


if __name__ == "__main__":
    main()

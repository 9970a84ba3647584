"""The web page of the server in a browser; the server has a fake device.

The tests do not install a browser, `.ci/run` does; without one they are skipped.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect, sync_playwright

from tests.support.fake_engines import letters, said
from tests.support.memory_plans import make_plan
from tests.support.serving import PROMPT, Gate, Site, events_of, site_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
INSTALL = "apt-get install -y --no-install-recommends chromium fonts-dejavu-core"
CHATS = "**/v1/chat/completions"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"no browser: {INSTALL}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not work for the root user.
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield launched
        launched.close()


class Watched:
    """An open page, with the requests and console messages that it has made."""

    def __init__(self, browser: Browser, site: Site, **context: Any):
        self.site = site
        site.delay_s = 0.0
        self.context = browser.new_context(**context)
        self.context.set_default_timeout(30_000)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[Request] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request))
        self.page.goto(site.url)
        expect(self.page.locator("#model")).to_have_text("model")
        self.page.fill("#max-tokens", "12")

    def ask(self, text: str = PROMPT) -> None:
        self.page.fill("#prompt", text)
        self.page.keyboard.press("Enter")

    def wait(self) -> None:
        expect(self.page.locator("#send")).to_be_visible()

    def sent(self, text: str = PROMPT) -> dict[str, Any]:
        """Ask, and wait for the end of the answer; return the page's request."""
        with self.page.expect_request(CHATS) as request:
            self.ask(text)
        self.wait()
        return body_of(request.value)

    def bars(self) -> list[str]:
        return self.page.locator("#positions li b").all_text_contents()

    def tokens(self, lane: int = 0) -> list[list[str]]:
        """Return the origin and text of every token in a column of the page."""
        shown = self.page.locator(".lane").nth(lane).locator(".token")
        read = "all => all.map(one => [one.dataset.origin, one.textContent])"
        return shown.evaluate_all(read)


@pytest.fixture
def watched(browser: Browser, site: Site) -> Iterator[Watched]:
    made = Watched(browser, site)
    yield made
    made.context.close()
    assert all(one.url.startswith(site.url) for one in made.requests)


def body_of(request: Request) -> dict[str, Any]:
    return json.loads(request.post_data or "")


def origins_in(body: str) -> list[list[str]]:
    return [
        [one["origin"], one["text"]]
        for event in events_of(body)
        for choice in event["choices"]
        for one in choice["token_origins"]
    ]


def test_tokens_are_marked_by_origin(watched: Watched):
    page = watched.page
    with page.expect_response(CHATS) as response:
        watched.sent()
    origins = origins_in(response.value.text())
    assert watched.tokens() == origins
    assert "".join(text for _, text in origins) == letters(said(12))
    for origin in ("draft", "leaf", "recovered", "bonus", "target"):
        count = sum(one[0] == origin for one in origins)
        expect(page.locator(f"[data-count={origin}]")).to_have_text(str(count or ""))
    metrics = events_of(response.value.text())[-1]["metrics"]["speculative_decoding"]
    length = f"{metrics['mean_acceptance_length']:.2f}"
    expect(page.locator("#length")).to_have_text(length)
    expect(page.locator("#positions li")).to_have_count(3)
    assert watched.complaints == []


def test_settings_and_history_are_sent(watched: Watched):
    page = watched.page
    page.fill("#temperature", "0.7")
    page.fill("#k", "0")
    asked = watched.sent()
    assert (asked["temperature"], asked["num_speculative_tokens"]) == (0.7, 0)
    assert (asked["max_tokens"], len(asked["messages"])) == (12, 1)
    assert [origin for origin, _ in watched.tokens()] == ["target"] * 12
    assert len(watched.sent()["messages"]) == 3
    page.click("#clear")  # begins a new conversation
    expect(page.locator("article")).to_have_count(0)
    assert len(watched.sent()["messages"]) == 1


def test_race_has_two_columns(watched: Watched):
    page = watched.page
    watched.site.delay_s = 0.01
    page.check("#race")
    speeds = ["ask again"]
    # After a pause of the machine, the page shows "ask again" instead of a ratio.
    while "ask again" in speeds[0] and len(watched.requests) < 20:
        page.click("#clear")
        watched.sent()
        speeds = page.locator(".head b").all_text_contents()
    boxes = [one.bounding_box() for one in page.locator(".lane").all()]
    assert boxes[0] and boxes[1]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    drafted, plain = watched.tokens(0), watched.tokens(1)
    assert {origin for origin, _ in drafted} > {"draft"}
    assert {origin for origin, _ in plain} == {"target"}
    assert [text for _, text in drafted] == [text for _, text in plain]
    assert all(re.match(r"[1-9]\d* tokens/s", speed) for speed in speeds)
    assert "×" in speeds[0]
    expect(page.locator(".foot").nth(1)).to_contain_text("the same text")
    requests = [body_of(one) for one in watched.requests if one.method == "POST"]
    drafts = [one.pop("num_speculative_tokens") for one in requests]
    assert drafts[-2:] == [3, 0]
    assert requests[-2] == requests[-1], "equal requests, with and without drafts"


def test_page_can_be_used_by_keyboard(watched: Watched):
    page, keys = watched.page, watched.page.keyboard
    page.reload()
    expect(page.locator("#model")).to_have_text("model")
    expect(page.locator("#prompt")).to_be_focused()
    for _ in ("send", "k", "temperature", "max-tokens"):
        keys.press("Tab")
    keys.type("12")
    for _ in ("temperature", "k", "send", "prompt"):
        keys.press("Shift+Tab")
    keys.type(PROMPT[:2])
    keys.press("Shift+Enter")
    expect(page.locator("#prompt")).to_have_value(PROMPT[:2] + "\n")
    keys.press("Backspace")
    keys.type(PROMPT[2:])
    keys.press("Enter")
    watched.wait()
    assert len(watched.tokens()) == 12
    expect(page.locator("#prompt")).to_be_focused()
    reached = set()
    for _ in range(12):
        keys.press("Tab")
        focused = page.evaluate(
            "[document.activeElement.id, "
            "getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached.add(focused[0])
        if focused[0]:
            assert focused[1] != "none", f"{focused[0]}: the focus is not visible"
    assert reached >= {"send", "k", "temperature", "max-tokens", "race", "clear"}


@pytest.mark.parametrize("by_key", [True, False])
def test_answer_can_be_stopped(watched: Watched, by_key: bool):
    page = watched.page
    watched.site.delay_s = 0.05
    page.fill("#max-tokens", "90")
    watched.ask()
    expect(page.locator(".lane .token").nth(3)).to_be_attached()
    if by_key:
        page.keyboard.press("Escape")
    else:
        page.click("#stop")
    watched.wait()
    expect(page.locator(".foot")).to_contain_text("Stopped")
    assert 4 <= len(watched.tokens()) < 90
    watched.site.delay_s = 0.0
    page.fill("#max-tokens", "5")
    watched.ask()
    expect(page.locator(".lane")).to_have_count(2)
    watched.wait()
    assert len(watched.tokens(1)) == 5
    assert watched.complaints == []


def test_shows_warm_up_progress(browser: Browser):
    with site_of() as site:
        gate = Gate(site.engine.engine)
        try:
            site.engine.engine.start_warm_up()
            count = site.engine.num_warming
            watched = Watched(browser, site)
            line = watched.page.locator("#warming")
            expect(line).to_contain_text("_sampled")
            expect(line).to_contain_text(f"{count} left")
            expect(line).to_contain_text("answers wait")
            gate.let()
            expect(line).to_contain_text("answers may be slower")
            watched.sent()
            assert len(watched.tokens()) == 12
            gate.open()
            expect(line).to_be_hidden()
            assert watched.complaints == []
            watched.context.close()
        finally:
            gate.open()


def answer_of_json(content: Any) -> Callable[[Route], None]:
    return lambda route: route.fulfill(json=content)


def test_shows_k_and_reason_after_first_request(watched: Watched):
    page, line = watched.page, watched.page.locator("#choice")
    found = httpx.get(f"{watched.site.url}page/server.json").json()
    cases = [
        (3, None, True, "K now 3"),
        (3, 0.414, True, "K now 3: +41 %"),
        (2, -0.03, True, "K now 2: −3 %"),
        (0, 0.41, True, "K now 0: plain decoding is faster"),
        (0, 0.41, False, "K now 0: drafts are switched off"),
        (0, 0.0, None, ""),  # the model has no drafts
    ]
    for k, gain, may_draft, expected in cases:
        answer = found | {"num_drafts": k, "gain": gain, "may_draft": bool(may_draft)}
        if may_draft is None:
            answer["max_draft_tokens"] = 0
        page.unroute_all()
        page.route("**/page/server.json", answer_of_json(answer))
        page.reload()
        expect(page.locator("#model")).to_have_text("model")
        page.fill("#max-tokens", "12")
        expect(line).to_be_hidden()
        watched.sent()
        if expected:
            expect(line).to_be_visible()
            expect(line).to_have_text(expected)
        else:
            expect(line).to_be_hidden()
    assert watched.complaints == []


def test_shows_memory_plan(watched: Watched):
    page, engine = watched.page, watched.site.engine.engine
    memory = page.locator("#memory")
    expect(memory).to_be_hidden()  # the fake device has no plan of its memory
    engine.memory = make_plan(dict(max_num_seqs=64, max_num_batched_tokens=2048))
    try:
        page.reload()
        expect(memory.locator("summary")).to_have_text("Memory: 12.8 × 8,192 tokens")
        memory.locator("summary").click()
        expect(memory.locator("div").first).to_contain_text("17.21 GiB")
        # The page shows the same lines as the log at startup.
        pages, *others = memory.locator("p").all_inner_texts()
        assert "450,560 bytes per token (draft 106,496), 7,208,960 per page" in pages
        assert others == engine.memory.table().splitlines()[-2:]
        assert others[0].startswith("Maximum concurrency at 8,192 tokens: ")
        expect(memory.locator("dt")).to_have_text(
            ["target weights", "draft weights", "programs", "KV", "left"]
        )
        assert fits(page)
    finally:
        engine.memory = None
    assert watched.complaints == []


def test_shows_refusal_and_continues(watched: Watched):
    page = watched.page
    # The context has 96 tokens, of which the prompt takes three.
    page.fill("#max-tokens", "95")
    watched.ask()
    expect(page.get_by_role("alert")).to_contain_text("96 tokens")

    def refuse(route: Route) -> None:
        error = {"error": {"message": "The server is busy.", "code": 503}}
        route.fulfill(status=503, headers={"Retry-After": "7"}, json=error)

    page.route(CHATS, refuse, times=1)
    watched.ask()
    alert = page.get_by_role("alert").nth(1)
    expect(alert).to_contain_text("The server is busy.")
    expect(alert).to_contain_text("7 s")
    page.fill("#max-tokens", "12")
    alert.get_by_role("button").click()
    expect(page.locator(".lane .token")).to_have_count(12)


def answer_with(page: Page, body: str) -> None:
    """Replace the server's next response by this stream."""
    page.route(CHATS, lambda route: route.fulfill(body=body), times=1)


def answer_with_tokens(page: Page, tokens: list[tuple[str, str]], **more: Any) -> None:
    """Replace the server's next response by these tokens: origin and text.

    Args:
        more: Further fields of the chunk.
    """
    origins = [{"origin": one, "text": text, "token_id": 5} for one, text in tokens]
    choice = {"index": 0, "finish_reason": "stop", "token_origins": origins}
    chunk = json.dumps({"choices": [choice]} | more)
    answer_with(page, f"data: {chunk}\n\ndata: [DONE]\n\n")


def test_leaves_have_no_position(watched: Watched):
    page = watched.page
    tokens = [("draft", "a"), ("leaf", "b"), ("bonus", "c"), ("draft", "d")]
    tokens += [("draft", "e"), ("recovered", "f")]
    answer_with_tokens(page, tokens)
    watched.sent()
    assert watched.tokens() == [list(one) for one in tokens]
    expect(page.locator("[data-count=leaf]")).to_have_text("1")
    # Both rounds accepted the first draft, one of them the second, and none the third.
    expect(page.locator("#length")).to_have_text("2.50")
    assert watched.bars() == ["100 %", "50 %", "0 %"]


def test_positions_without_drafts_have_no_share(watched: Watched):
    page = watched.page
    drafts = {"acceptance_histogram": [1, 1, 0, 0], "num_draft_tokens": 3}
    drafts["num_proposed_per_position"] = [2, 1, 0]
    tokens = [("recovered", "a"), ("draft", "b"), ("bonus", "c")]
    answer_with_tokens(page, tokens, metrics={"speculative_decoding": drafts})
    watched.sent()
    assert watched.bars() == ["50 %", "0 %", "–"]
    # K of this answer differs from the requested one.
    heads = page.locator(".head span")
    expect(heads).to_have_text("At most 3 drafts · K = 1.5")
    answer_with_tokens(page, [("target", "a")], metrics={"speculative_decoding": None})
    watched.sent()
    expect(heads.nth(1)).to_have_text("At most 3 drafts · K = 0, no drafts")


def test_docs_list_and_call_endpoints(browser: Browser, site: Site):
    context = browser.new_context()
    page = context.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"{site.url}docs")
    shown = page.locator("details", has_text="/v1/completions").first
    shown.locator("summary").click()
    expect(shown.locator("table")).to_contain_text("temperature")
    shown.locator("textarea").fill(json.dumps({"prompt": PROMPT, "max_tokens": 3}))
    shown.get_by_role("button").click()
    expect(shown.locator("pre")).to_contain_text('"text_completion"')
    assert all(url.startswith(site.url) for url in requests)
    context.close()


def test_model_output_is_not_html(watched: Watched):
    page = watched.page
    text = "<img src=x onerror=alert(1)><b>bold</b>"
    answer_with_tokens(page, [("draft", text)])
    watched.sent(text)
    assert watched.tokens() == [["draft", text]]
    assert page.locator("article").locator("img, .words b").count() == 0


def stream_of(*deltas: dict[str, Any], said: str) -> str:
    """Return a chat's stream with these deltas; the first has the tokens."""
    tokens = [
        {"text": one, "origin": "draft", "token_id": at} for at, one in enumerate(said)
    ]
    choices = [{"index": 0, "delta": one, "finish_reason": None} for one in deltas]
    choices[0]["token_origins"] = tokens
    choices[-1]["finish_reason"] = "stop"
    events = [f"data: {json.dumps({'choices': [one]})}\n\n" for one in choices]
    return "".join([*events, "data: [DONE]\n\n"])


def is_bounded(schema: dict[str, Any]) -> bool:
    """Return whether every text that matches a schema has bounded length."""
    if schema["type"] != "object":
        return {"string": "maxLength", "integer": "maximum"}[schema["type"]] in schema
    is_closed = schema["additionalProperties"] is False
    return is_closed and all(map(is_bounded, schema["properties"].values()))


@pytest.mark.parametrize("width", [1280, 390])
def test_shows_calls_and_json(browser: Browser, site: Site, width: int):
    watched = Watched(browser, site, viewport={"width": width, "height": 800})
    page, shown = watched.page, watched.page.locator(".form figure")
    given = {"city": "Oslo" * 30, "days": list(range(12))}
    text = json.dumps(given)
    call = {"index": 0, "id": "call_1", "type": "function"}
    deltas = [
        {"tool_calls": [call | {"function": {"name": "weather"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": text[:9]}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": text[9:]}}]},
    ]
    # The keyboard moves the focus past the settings, to the button with an example of a
    # tool.
    page.locator("#race").focus()
    keys = page.keyboard
    for key in ("Tab", "Enter", "Tab", "Tab", "Tab", "Enter"):
        keys.press(key)
    expect(page.locator("#schema")).to_be_focused()
    tools = json.loads(page.locator("#schema").input_value())
    assert is_bounded(tools[0]["parameters"])
    answer_with(page, stream_of(*deltas, said=text))
    asked = watched.sent()
    assert asked["tools"] == [{"type": "function", "function": tools[0]}]
    assert asked["tool_choice"] == "required"
    expect(shown.locator("figcaption")).to_have_text("Calls weather")
    expect(shown.locator("pre")).to_have_text(json.dumps(given, indent=2))
    expect(page.locator("#spoken")).to_contain_text("Calls weather with")
    assert "".join(one for _, one in watched.tokens()) == text
    assert fits(page)
    # The page scrolls to the end of the answer, and the open tools do not cover it.
    ends = "one => one.getBoundingClientRect()"
    foot, composer = (
        page.locator(one).evaluate(ends) for one in (".foot", "#composer")
    )
    assert 0 < foot["top"] < foot["bottom"] <= composer["top"]
    # With a schema, the answer is JSON. The request includes the tool call of the
    # previous answer.
    page.click("#example-schema")
    schema = json.loads(page.locator("#schema").input_value())
    assert is_bounded(schema)
    answer_with(page, stream_of({"content": text}, said=text))
    asked = watched.sent()
    assert asked["response_format"]["json_schema"]["schema"] == schema
    assert "tools" not in asked
    (before,) = asked["messages"][1]["tool_calls"]
    assert before["function"] == {"name": "weather", "arguments": text}
    expect(shown.nth(1)).to_contain_text('"days": [')
    assert fits(page)
    # Cut-off JSON and plain text are shown unchanged.
    page.fill("#schema", "")
    for words in (text[:-1], "[sic] words"):
        answer_with(page, stream_of({"content": words}, said=words))
        watched.sent()
    expect(page.locator(".lane")).to_have_count(4)
    expect(shown).to_have_count(2)
    assert watched.complaints == []
    watched.context.close()


def test_invalid_schema_is_refused_before_sending(watched: Watched):
    page = watched.page
    page.locator("#form summary").click()
    for number, wrong in enumerate(("{", "7")):
        page.fill("#schema", wrong)
        watched.ask()
        alert = page.get_by_role("alert").nth(number)
        expect(alert).to_contain_text("JSON or tools: ")
    assert not [one for one in watched.requests if one.method == "POST"]
    page.fill("#schema", "")
    page.get_by_role("alert").last.get_by_role("button").click()
    expect(page.locator(".lane .token")).to_have_count(12)


def test_reconnects_after_server_restart(watched: Watched):
    page, site = watched.page, watched.site
    site.delay_s = 0.05
    page.fill("#max-tokens", "90")
    watched.ask()
    expect(page.locator(".lane .token").nth(3)).to_be_attached()
    site.stop()
    expect(page.get_by_role("alert")).to_contain_text("ended before the answer did")
    expect(page.locator("#notice")).to_contain_text("does not answer")
    site.delay_s = 0.0
    site.start(api_keys=("secret",))
    try:
        expect(page.locator("#notice")).to_contain_text("is back")
        page.fill("#max-tokens", "5")
        watched.ask()
        expect(page.get_by_role("alert").nth(1)).to_contain_text("API key")
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        watched.ask()
        expect(page.locator(".lane").nth(2).locator(".token")).to_have_count(5)
        assert "secret" not in str(page.evaluate("JSON.stringify(localStorage)"))
    finally:
        site.stop()
        site.start()


def fits(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_origins_differ_by_more_than_color(watched: Watched):
    style = "one => getComputedStyle(one).textDecorationStyle"
    samples = watched.page.locator("#legend .token").all()
    lines = [one.evaluate(style) for one in samples[:4]]
    assert sorted(lines) == ["dashed", "dotted", "double", "solid"]


def test_page_fits_a_phone(browser: Browser, site: Site):
    watched = Watched(browser, site, viewport={"width": 360, "height": 640})
    page = watched.page
    assert fits(page)
    page.check("#race")
    watched.sent()
    assert fits(page)
    for name in ("#prompt", "#send", "#k", "#temperature", "#race"):
        expect(page.locator(name)).to_be_in_viewport()
    page.set_viewport_size({"width": 1280, "height": 800})
    assert fits(page)
    watched.context.close()


def test_page_follows_dark_mode(browser: Browser, site: Site):
    shade = "getComputedStyle(document.body).backgroundColor"
    token = "getComputedStyle(document.querySelector('.token')).backgroundColor"
    seen = []
    for scheme in ("light", "dark"):
        watched = Watched(browser, site, color_scheme=scheme)
        seen.append([watched.page.evaluate(one) for one in (shade, token)])
        watched.context.close()
    light, dark = seen
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    brightness = [sum(map(int, re.findall(r"\d+", one[0]))) for one in seen]
    assert brightness[0] > 600 > 150 > brightness[1]

"""The page at ``/`` and the state that feeds it: over plain HTTP, and in a headless browser."""

from __future__ import annotations

import re
import shutil
import time
from contextlib import contextmanager

import pytest
from helpers.serving import MODEL, PROMPT, httpx, serving, target, text_alone, tokenizer, until

from specdec_ext.engine import SerialEngine
from specdec_ext.engine.loop import EngineLoop
from specdec_ext.serve.page.state import State
from specdec_ext.serve.text.choice import Choice

FILES = {"/": "text/html", "/page.js": "text/javascript", "/page.css": "text/css"}


def completion(server, **body) -> dict:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60, "temperature": 0, **body}
    answer = server.post("/v1/completions", **asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def state(server, **headers) -> State:
    answer = server.http.get("/state", headers=headers)
    assert answer.status_code == 200, answer.text
    return State.model_validate(answer.json())


# --- without a browser ------------------------------------------------------------------------------


def test_files_allow_nothing_from_elsewhere_and_need_no_key():
    with serving(api_key="secret") as server:
        for path, media_type in FILES.items():
            answer = server.http.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(media_type)
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"].split("; ")
            assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'"} <= set(policy)
            assert "unsafe" not in str(policy)
            addresses = set(re.findall(r"https?://[^'\"\s)]+", answer.text))
            assert addresses <= {"http://www.w3.org/2000/svg"}  # the name of a format
        page = server.http.get("/").text
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page)


def test_state_needs_the_key():
    with serving(api_key="secret") as server:
        assert server.http.get("/state").status_code == 401
        wrong = {"Authorization": "Bearer wrong"}
        assert server.http.get("/state", headers=wrong).status_code == 401
        assert state(server, Authorization="Bearer secret").model == MODEL


def test_state_counts_what_was_done():
    with serving(chat_template=None) as server:
        before = state(server)
        assert (before.running, before.drafts, before.generation_tokens) == (0, 0, 0)
        assert (before.speculation, before.chat, before.is_open) == ("fixed", False, True)
        assert before.decision is None and before.steps == {}
        usage = completion(server)["usage"]
        after, stats = state(server), server.engine.stats()
        assert after.prompt_tokens == usage["prompt_tokens"]
        assert after.generation_tokens == usage["completion_tokens"]
        assert after.drafter == type(server.engine.drafter).__name__
        for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_per_position"):
            assert getattr(after, name) == getattr(stats, name)
        assert after.drafts > 0 and sum(after.accepted_per_position) == after.accepted_tokens
        assert len(after.reached_per_position) == len(after.proposed_per_position)
        assert (after.max_rows, after.max_tokens) == (16, server.engine.max_tokens)
        assert after.uptime > before.uptime
        metrics = server.http.get("/metrics").text
        assert re.search(
            rf"^vllm:generation_tokens_total\S+ {after.generation_tokens}\.0$", metrics, re.M
        )


def test_state_has_what_the_controller_compared_and_chose():
    with serving({"speculation": "auto"}) as server:
        assert state(server).speculation == "auto" and state(server).decision is None
        completion(server, max_tokens=200)
        now = state(server)
        decision = now.decision
        estimates = {each.name: each for each in decision.estimates}
        assert decision.rows == 1 and decision.chosen in estimates
        assert now.steps and set(estimates) & set(now.steps)
        plain = estimates["plain"]
        assert plain.tokens == 1 and plain.rate == pytest.approx(1 / plain.seconds)
        for each in decision.estimates:
            assert (
                each.tokens >= 1
                and each.seconds > 0
                and each.rate <= each.tokens / each.seconds + 1e-6
            )
        assert decision == server.engine.decision


def test_state_of_plain_decoding_and_of_one_request_after_another():
    with serving({"drafter": None}) as server:
        completion(server)
        now = state(server)
        assert (now.drafter, now.speculation, now.decision) == ("none", "none", None)
    engine = SerialEngine(target(), tokenizer=tokenizer())
    with serving(engine=engine) as server:
        now = state(server)
        assert (now.drafter, now.speculation, now.max_rows) == ("auto", "auto", 1)
        completion(server, max_tokens=120)
        now = state(server)
        assert now.speculation == "auto" and now.drafter not in ("auto", "none")
        assert now.decision.chosen in {each.name for each in now.decision.estimates}
        completion(server, speculation="none")
        after = state(server)
        assert (after.drafter, after.decision) == (now.drafter, now.decision)


# --- in a browser -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("needs chromium")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    switches = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    switches += " --disable-background-networking --disable-component-update --disable-sync"
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=executable, args=switches.split())
        yield running
        running.close()


@contextmanager
def opened(browser, server, allowed: str = "$^", **options):
    """The page of a server. Errors in the console and failed requests fail the test.

    Args:
        allowed: pattern of errors that are part of the test.
    """
    problems: list[str] = []
    page = browser.new_page(**options)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda message: problems.append(message.text) if message.type != "log" else None,
    )
    page.on(
        "requestfailed",
        lambda request: problems.append(f"request failed: {request.url}: {request.failure}"),
    )
    page.set_default_timeout(20_000)
    page.goto(server.url)
    try:
        yield page
    finally:
        page.close()
    assert not [each for each in problems if not re.search(allowed, each)]


def ask(page, prompt: str = PROMPT, temperature: str = "0", tokens: str = "60") -> None:
    page.fill("#prompt", prompt)
    page.fill("#temperature", temperature)
    page.fill("#tokens", tokens)
    page.click("#go")


def shows(page, selector: str, wanted: str) -> None:
    """Wait until the text of an element matches a pattern."""
    until(lambda: re.search(wanted, page.text_content(selector)), 20)


def ended(page) -> str:
    """Wait for the end of a request; returns what the page says about it."""
    shows(page, "#result", ".")
    assert page.text_content("#go") == "Complete"
    return page.text_content("#result")


def test_a_prompt_is_completed_with_marks_and_the_page_fills_with_numbers(browser):
    with serving(chat_template=None) as server, opened(browser, server) as page:
        shows(page, "#model", f"^{MODEL}$")
        assert page.is_hidden("#modes") and page.is_hidden("#unlock")
        ask(page)
        result = ended(page)
        assert page.text_content("#output") == text_alone(PROMPT, max_new_tokens=60)
        drafted = page.locator("#output mark").all_text_contents()
        others = page.locator("#output span").all_text_contents()
        assert all(drafted) and all(others) and drafted and others
        stats = server.engine.stats()
        assert f"{stats.accepted_tokens} of {stats.draft_tokens} draft tokens" in result
        assert "60 tokens" in result and f"{stats.mean_acceptance_length:.2f}" in result

        shows(page, "#totals", " 60 gen")
        bars = page.locator("#positions g")
        shares = bars.evaluate_all(
            "bars => bars.map(bar => [bar.dataset.position, bar.dataset.share])"
        )
        assert shares == [
            [str(i), f"{100 * share:.1f}"]
            for i, share in enumerate(stats.acceptance_per_position, 1)
        ]
        heights = bars.locator(".accepted").evaluate_all(
            "all => all.map(e => e.height.baseVal.value)"
        )
        ratio = [
            height / share
            for height, (_, share) in zip(heights, ((a, float(b)) for a, b in shares), strict=True)
            if share
        ]
        assert ratio == pytest.approx([ratio[0]] * len(ratio), rel=0.02)
        assert page.text_content("#running") == "0 / 16"
        assert "nothing to choose" in page.text_content("#decision")
        assert page.locator("#rates polyline").count() == 1
        shows(page, "#rate", "^0$")


def test_text_grows_while_the_request_runs_and_stop_cancels_it(browser, monkeypatch):
    slow_down(monkeypatch)
    with serving(chat_template=None) as server, opened(browser, server, "ERR_ABORTED") as page:
        ask(page, tokens="400")
        shows(page, "#output", "(?s).{20}")
        shows(page, "#running", "^1 / 16$")
        shows(page, "#rate", "^[1-9]")
        assert page.text_content("#go") == "Stop"
        assert page.get_attribute("#output", "aria-busy") == "true"
        page.click("#go")
        assert ended(page).startswith("Stopped.")
        until(lambda: server.engine.load.running == 0, 3)
        shows(page, "#running", "^0 / 16$")
        assert text_alone(PROMPT, max_new_tokens=400).startswith(page.text_content("#output"))
        assert page.get_attribute("#output", "aria-busy") == "false"


def slow_down(monkeypatch) -> None:
    step = EngineLoop.step
    monkeypatch.setattr(EngineLoop, "step", lambda self: (time.sleep(0.3), step(self))[1])


def test_the_choices_of_the_controller_are_listed(browser):
    with serving({"speculation": "auto"}, chat_template=None) as server:
        completion(server, max_tokens=200)
        with opened(browser, server) as page:
            page.wait_for_selector("#estimates tr.chosen")
            names = page.locator("#estimates td:first-child").all_text_contents()
            decision, steps = server.engine.decision, server.engine.stats().shapes
            listed = [each.name for each in decision.estimates]
            assert [name.split(" ◂")[0] for name in names][: len(listed)] == listed
            assert {name.split(" ◂")[0] for name in names} == set(listed) | set(steps)
            (chosen,) = page.locator("#estimates tr.chosen").all()
            first, tokens, *_, count = chosen.locator("td").all_text_contents()
            assert first == f"{decision.chosen} ◂ chosen"
            (estimate,) = (e for e in decision.estimates if e.name == decision.chosen)
            assert tokens == f"{estimate.tokens:.2f}" and count == str(
                steps.get(decision.chosen, 0)
            )


def test_charts_wait_until_they_have_room(browser):
    with serving(chat_template=None) as server, opened(browser, server) as page:
        completion(server)
        page.route(
            "**/page.css",
            lambda route: route.fulfill(body="svg { display: none }", content_type="text/css"),
        )
        page.reload()
        shows(page, "#model", MODEL)
        assert page.locator("#positions g").count() == 0
        page.unroute("**/page.css")
        page.reload()
        page.wait_for_selector("#positions g")


def test_markup_of_the_model_is_text(browser, monkeypatch):
    evil = "<script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"
    feed = Choice._feed
    monkeypatch.setattr(Choice, "_feed", lambda self, text, piece: feed(self, evil + text, piece))
    named = f"<b>{MODEL}</b>"
    with serving(chat_template=None, model_name=named) as server, opened(browser, server) as page:
        ask(page, tokens="4")
        ended(page)
        assert page.text_content("#output").startswith(evil)
        assert page.text_content("#model") == named
        assert page.locator("#output script, #output img, #model b").count() == 0
        assert page.evaluate("window.evil") is None


def test_chat_with_a_template(browser):
    with serving() as server, opened(browser, server) as page:
        page.wait_for_selector("#modes:not([hidden])")
        ask(page, prompt="read a file")
        ended(page)
        messages = [{"role": "user", "content": "read a file"}]
        asked = {"model": MODEL, "max_tokens": 60, "temperature": 0}
        answer = server.post("/v1/chat/completions", messages=messages, **asked).json()
        assert page.text_content("#output") == answer["choices"][0]["message"]["content"]
        page.select_option("#mode", "text")
        page.evaluate("document.querySelector('#result').textContent = ''")
        ask(page)
        ended(page)
        assert page.text_content("#output") == text_alone(PROMPT, max_new_tokens=60)


def test_a_server_with_a_key_asks_for_it(browser):
    with (
        serving(api_key="secret", chat_template=None) as server,
        opened(browser, server, "401") as page,
    ):
        page.wait_for_selector("#unlock:not([hidden])")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        shows(page, "#status", "wrong")
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        shows(page, "#model", f"^{MODEL}$")
        assert page.is_hidden("#unlock") and page.input_value("#key") == ""
        ask(page)
        assert "60 tokens" in ended(page)
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0
        assert "secret" not in page.content()


def test_refusals_are_told(browser):
    with serving(chat_template=None) as server, opened(browser, server, "400") as page:
        ask(page, tokens="100000")
        assert "a text may have 512 tokens" in ended(page)
        assert "bad" in page.get_attribute("#result", "class")


def test_a_server_that_ends_and_comes_back(browser, monkeypatch):
    refused = "ERR_CONNECTION_REFUSED|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE|ERR_ABORTED|503"
    with serving(chat_template=None) as server:
        page_of = opened(browser, server, refused)
        page = page_of.__enter__()
        shows(page, "#status", "accepting requests")
        server.engine.shutdown()
        shows(page, "#status", "shutting down")
        ask(page)
        assert "the server is shutting down" in ended(page)
        place = httpx.URL(server.url).port
    shows(page, "#status", "can't be reached")
    with serving(chat_template=None, port=place) as server:
        shows(page, "#status", "accepting requests")
        assert page.locator("body.lost").count() == 0
        ask(page)
        shows(page, "#result", "60 tokens")
    page_of.__exit__(None, None, None)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_its_window_and_can_be_read(browser, width, scheme):
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with serving({"speculation": "auto"}, chat_template=None) as server:
        completion(server, max_tokens=120)
        with opened(browser, server, **options) as page:
            ask(page)
            ended(page)
            page.wait_for_selector("#estimates tr.chosen")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(
                "[...document.querySelectorAll('input,textarea,select')].every(e => e.labels.length)"
            )
            for selector in (
                "#about",
                "#status",
                "#output mark",
                "dt",
                "dd",
                ".chosen td",
                "th",
                "#go",
            ):
                assert contrast(page, selector) >= 4.5, selector
            page.focus("#prompt")
            for target_id in ("temperature", "tokens", "go", "output"):
                page.keyboard.press("Tab")
                assert page.evaluate("document.activeElement.id") == target_id


def contrast(page, selector: str) -> float:
    """The contrast of a text and what is behind it, as WCAG defines it."""
    colours = page.evaluate(
        """selector => {
          const element = document.querySelector(selector), colours = [getComputedStyle(element).color];
          for (let e = element; e; e = e.parentElement) {
            const colour = getComputedStyle(e).backgroundColor;
            if (colour !== "rgba(0, 0, 0, 0)") return [...colours, colour];
          }
        }""",
        selector,
    )

    def luminance(colour: str) -> float:
        parts = (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted(map(luminance, colours))
    return (light + 0.05) / (dark + 0.05)

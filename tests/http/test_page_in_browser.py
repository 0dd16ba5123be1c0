"""The page at `/` in a real Chromium: what it shows, does, refuses, and how it can be used without a mouse or eyes.

The engine repeats the last question as its answer, so a test chooses what "the model" writes.
"""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import chromium, faults_of, opened
from http_server import Server, engine_of, serving
from null_adapters import write as write_adapter
from patience import wait_until
from server_here import serving_here

from headrace.frontend.http.options import ServeOptions

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ECHO = ("--distributed-executor-backend", "null_with_tokenizer:EchoExecutor")
TEMPLATE = ("--chat-template", "{{ messages[-1]['content'] }}")
STEP_S = 0.004
LONG = "the quick brown fox " * 400
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 780}, "has_touch": True, "is_mobile": True}
HOSTILE = """# <script>document.title = "pwned"</script>

<img src=x onerror="document.title = 'pwned'"> <iframe srcdoc="<script>parent.document.title='pwned'</script>"></iframe>

[click](javascript:document.title='pwned') [data](data:text/html,<script>1</script>) [rel](/v1/models)
[space]( javascript:1 ) [tab](java\tscript:1) <javascript:1> ![x](https://tracker.example/pixel.png)
[ok](https://example.com/?a=1&b=2 "x\\" onmouseover=alert(1)") **bold <b onclick=alert(1)>**

```html"><script>document.title='pwned'</script>
</code></pre><script>document.title = "pwned"</script>
```

| <script>1</script> | b |
|---|---|
| <svg onload=alert(1)> | [x](vbscript:1) |
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One engine, which is started again when it dies; a stream that loses it ends with the cause."""
    lives = ("--restart-engine", "9", "--max-migrations", "0")
    with serving(*ECHO, *TEMPLATE, *lives, null_model={"step_delay_s": STEP_S}) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    with opened(browser, server.url) as page:
        yield page


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send", disabled=False).wait_for()  # before it knows a model, it sends nothing
    enter(page, text)


def enter(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def answer(page: Page) -> Any:
    return page.locator(".answer").last


def posts_of(page: Page) -> list[Any]:
    """The bodies that the page posts from now on."""
    sent: list[Any] = []

    def keep(request: Any) -> None:
        if request.method == "POST":
            sent.append(json.loads(request.post_data))

    page.on("request", keep)
    return sent


def wait_for_end(page: Page) -> None:
    page.locator(".answer[aria-busy=false]").last.wait_for()
    page.get_by_role("button", name="Send").wait_for()


def test_an_answer_streams_stops_is_tried_again_and_stays_over_a_reload(page: Page) -> None:
    page.get_by_role("heading", name="Ask null").wait_for()
    ask(page, LONG)
    page.get_by_text("the quick brown").nth(1).wait_for()  # while it is written
    page.get_by_role("button", name="Stop").click()
    wait_for_end(page)
    stopped = answer(page).locator(".answer-text").inner_text()
    assert LONG.startswith(stopped.strip())
    assert 0 < len(stopped) < len(LONG) - 100
    figures = answer(page).locator(".figures").inner_text()
    assert all(each in figures for each in ("stopped", "tokens/s", "first after", "prompt")), figures
    page.get_by_role("button", name="Edit").click()
    assert page.get_by_label("Message").input_value() == LONG.strip()
    ask(page, "one *two*")
    wait_for_end(page)
    assert answer(page).locator("em").inner_text() == "two"
    page.get_by_role("button", name="Retry").click()
    wait_for_end(page)
    assert page.locator(".answer").count() == 1
    page.reload()
    assert page.locator(".bubble").inner_text() == "one *two*"
    assert answer(page).locator("em").inner_text() == "two"
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("heading", name="Ask null").wait_for()
    page.reload()
    page.get_by_role("heading", name="Ask null").wait_for()


def test_what_a_model_writes_is_shown_and_never_run(page: Page, server: Server) -> None:
    called: list[str] = []
    page.on("request", lambda request: called.append(request.url))
    page.on("dialog", lambda dialog: called.append(dialog.message))
    ask(page, HOSTILE)
    wait_for_end(page)
    shown = answer(page)
    assert shown.locator("script, img, iframe, svg, b, [onclick], [onerror], [onload]").count() == 0
    assert page.title() == "Headrace"
    links = {each.inner_text(): each.get_attribute("href") for each in shown.locator("a").all()}
    assert links == {"Image: x": "https://tracker.example/pixel.png", "ok": "https://example.com/?a=1&b=2"}
    assert all(each.get_attribute("rel") == "noopener noreferrer nofollow" for each in shown.locator("a").all())
    for text in ("click", "rel", "space"):
        assert shown.locator(".dead-link", has_text=text).count() == 1, text
    assert '<script>document.title = "pwned"</script>' in shown.locator("h3").inner_text()
    assert '</code></pre><script>document.title = "pwned"</script>' in shown.locator(".code code").inner_text()
    assert shown.locator("td").first.inner_text() == "<svg onload=alert(1)>"
    assert all(each.startswith(server.url) and "/v1/models" not in each for each in called), called


@pytest.mark.system
def test_a_server_with_keys_is_asked_by_one_that_the_visitor_types(browser: Browser) -> None:
    with (
        serving(*ECHO, *TEMPLATE, "--api-key", "right-key") as server,
        opened(browser, server.url) as page,
    ):
        field = page.get_by_label("API key")
        for wrong, problem in (("wrong", "does not know that key"), ("schlüssel", "letters, digits and signs")):
            field.fill(wrong)
            field.press("Enter")
            page.get_by_role("alert").filter(has_text=problem).wait_for()
        assert page.get_by_role("heading", name="Ask null").count() == 0  # nothing of the API is seen
        field.fill("right-key")
        field.press("Enter")
        page.get_by_role("heading", name="Ask null").wait_for()
        ask(page, "hello")
        wait_for_end(page)
        assert "hello" in answer(page).inner_text()
        page.reload()  # this tab keeps it
        page.get_by_role("heading", name="Ask null").or_(page.locator(".bubble")).wait_for()
        assert page.get_by_role("dialog").count() == 0
        assert page.evaluate("localStorage.getItem('headrace.key')") is None
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Forget the API key").click()
        page.get_by_label("API key").wait_for()


@pytest.mark.parametrize("look", ["light", pytest.param("dark", marks=pytest.mark.system)])
def test_axe_finds_nothing_wrong_with_any_view(browser: Browser, server: Server, look: Any) -> None:
    with opened(browser, server.url, color_scheme=look, bypass_csp=True) as page:
        page.get_by_role("heading", name="Ask null").wait_for()
        assert faults_of(page) == []
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Log-probabilities of each token").check()
        ask(
            page,
            "# Title\n\n- [x] a\n- b `c`\n\n> q\n\n```py\nx = 1\n```\n\n|a|b|\n|-|-|\n|1|2|\n\n#### Deep\n\n[l](https://x.org)",
        )
        wait_for_end(page)
        assert faults_of(page) == []
        page.get_by_role("button", name="Formatted").click()
        assert faults_of(page) == []
        page.get_by_role("link", name="Live").click()
        page.get_by_role("heading", name="Requests").wait_for()
        assert faults_of(page) == []
    with opened(browser, server.url, color_scheme=look, bypass_csp=True, **PHONE) as page:
        page.get_by_role("heading", name="Ask null").wait_for()
        page.get_by_role("button", name="Settings").click()
        assert faults_of(page) == []


@pytest.mark.system
def test_an_answer_of_a_thousand_lines_is_drawn_whole_and_the_view_follows_it(browser: Browser) -> None:
    long = {"max_model_len": 100_000}
    with serving(*ECHO, *TEMPLATE, null_model=long) as server, opened(browser, server.url) as page:
        check_thousand_lines(page)


def check_thousand_lines(page: Page) -> None:
    lines = "\n".join(f"{number}. line *{number}* of `many`" for number in range(1, 501))
    code = "```\n" + "\n".join(f"code {number}" for number in range(500)) + "\n```"
    ask(page, f"{lines}\n\n{code}")
    wait_for_end(page)
    assert answer(page).locator("li").count() == 500
    assert answer(page).locator(".code code").inner_text().count("\n") == 499
    view = page.locator("#scroll")
    assert view.evaluate("(view) => view.scrollHeight - view.scrollTop - view.clientHeight") < 90
    view.evaluate("(view) => view.scrollTo(0, 0)")
    page.get_by_role("button", name="Newest text").click()
    page.get_by_role("button", name="Newest text").wait_for(state="hidden")


@pytest.mark.system
@pytest.mark.parametrize(
    "text",
    [
        "|" + "a|" * 3000 + "\n|" + "-|" * 3000 + "\n" + ("|" * 3000 + "\n") * 300,
        "|a|b|\n|-|-|\n" + "|1|2|\n" * 30_000,
        "*a **b " * 20_000,
        "[" * 50_000 + "](" * 20_000,
        ("![" * 500 + "](x)" * 500) * 20,
        "` " * 40_000,
        " ".join("`" * length for length in range(1, 600)),
        "> " * 20_000 + "x",
        "\n".join(" " * depth + "- x" for depth in range(2000)),
        "# " + " " * 200_000 + "#" * 100_000 + " x",
        "```" + " " * 200_000 + "`",
        "~" * 200_000 + "`",
        "--" + " " * 200_000 + "x",
        "a | b\n" + "-" * 100_000 + " " * 100_000 + "x",
        "1. " * 20_000,
        "http://a" + "." * 200_000 + "x http://" + "(" * 100_000,
        "\\" * 200_000,
        "&" * 200_000,
        "_a_" * 50_000,
    ],
    ids=lambda text: text[:12].replace("\n", " "),
)
def test_no_text_holds_the_page_for_long(page: Page, text: str) -> None:
    """Hostile and broken text costs processor time by its length: four times as much never sixteen times as much."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def now_ms() -> float:
        """Processor time of the page's thread."""
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(1e3 * each["value"] for each in metrics if each["name"] == "ThreadTime")

    def used_ms(part: str) -> float:
        began_ms = now_ms()
        page.evaluate("async (text) => { new (await import('./ui/markdown.js')).MarkdownView().update(text) }", part)
        return now_ms() - began_ms

    used_ms(text[: len(text) // 16])
    short_ms, long_ms = used_ms(text[: len(text) // 4]), used_ms(text)
    assert long_ms < 10 * max(short_ms, 20.0), (short_ms, long_ms)


@pytest.mark.system
def test_tokens_tell_their_alternatives_by_pointer_and_by_keyboard(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Log-probabilities of each token").check()
    ask(page, "the quick 你好 fox")
    wait_for_end(page)
    tokens = answer(page).locator(".token")
    assert "".join(tokens.all_inner_texts()).replace("·", "") == "the quick 你好 fox<|im_end|>"
    tip = answer(page).get_by_role("tooltip")
    tokens.nth(1).hover()
    tip.wait_for()
    assert "%" in tip.inner_text()
    page.mouse.move(0, 0)
    tip.wait_for(state="hidden")
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    tip.wait_for()
    said = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert said.startswith(tokens.nth(1).inner_text().replace(" ", "␣"))
    page.get_by_role("button", name="Formatted").click()
    assert answer(page).locator(".answer-text").inner_text().strip() == "the quick 你好 fox"


@pytest.mark.system
def test_a_dead_engine_is_told_of_and_its_return_too(page: Page, server: Server) -> None:
    ask(page, LONG)
    page.get_by_text("the quick brown").nth(1).wait_for()
    engine_of(server).send_signal(signal.SIGKILL)
    problem = answer(page).get_by_role("alert")
    problem.wait_for()
    assert "engine" in problem.inner_text().lower()
    assert "the quick brown" in answer(page).inner_text(), "what came before stays"
    page.get_by_role("link", name="Live").click()
    page.locator(".events").get_by_text("Engine 0 is back").wait_for()
    page.get_by_role("link", name="Chat", exact=True).click()
    problem.get_by_role("button", name="Try again").click()
    page.get_by_role("button", name="Stop").wait_for()
    page.keyboard.press("Escape")
    wait_for_end(page)
    assert page.locator(".answer").count() == 1
    assert page.get_by_role("alert").filter(has_text="engine").count() == 0


@pytest.mark.system
def test_a_server_that_is_gone_is_told_of_and_waited_for(browser: Browser) -> None:
    with serving(*ECHO, *TEMPLATE) as server, opened(browser, server.url) as page:
        page.get_by_role("heading", name="Ask null").wait_for()
        port = server.url.rpartition(":")[2]
        server.close()
        page.locator("#banner", has_text="The server does not answer").wait_for()
        ask(page, "hello")
        answer(page).get_by_text("The connection was lost").wait_for()
        with serving(*ECHO, *TEMPLATE, "--port", port):
            page.locator("#banner").wait_for(state="hidden")
            page.get_by_role("button", name="Try again").click()
            wait_for_end(page)
            assert answer(page).locator(".answer-text").inner_text().strip() == "hello"


@pytest.mark.system
def test_a_conversation_that_is_too_long_is_refused_in_words_that_help(browser: Browser) -> None:
    with serving(*ECHO, *TEMPLATE, "--max-model-len", "64") as server, opened(browser, server.url) as page:
        ask(page, "the quick brown fox " * 100)
        problem = answer(page).get_by_role("alert")
        problem.wait_for()
        assert "longer than the model's context" in problem.inner_text()
        assert "Start a new chat" in problem.inner_text()


@pytest.mark.system
def test_the_live_view_is_of_one_server_where_several_answer(browser: Browser) -> None:
    """As behind a balancer that asks them in turn."""
    asked = 0

    def in_turn(route: Any) -> None:
        nonlocal asked
        asked += 1
        answered = route.fetch()
        state = answered.json()
        if asked % 2:
            state["server"] = "another"
            for engine in state["engines"]:
                engine["generated_tokens"] += 1_000_000
        route.fulfill(response=answered, json=state)

    with serving(*ECHO, *TEMPLATE) as server, opened(browser, server.url) as page:
        page.route("**/ui/live", in_turn)
        page.get_by_role("link", name="Live").click()
        rates: list[str] = []
        row = page.get_by_role("region", name="Figures of each engine").locator("tbody tr td").nth(3)

        def enough() -> bool:
            rates.append(row.inner_text())
            return asked >= 8

        wait_until(enough, 60, "some answers of both")
        assert set(rates) <= {"\N{EN DASH}", "0"}
        assert page.get_by_text("Several servers answer here").count() == 1
        page.unroute_all(behavior="ignoreErrors")


@pytest.mark.system
def test_one_of_several_engines_can_be_chosen_and_each_is_drawn(browser: Browser) -> None:
    with (
        serving(*ECHO, *TEMPLATE, "--data-parallel-size", "2", null_model={"step_delay_s": STEP_S}) as server,
        opened(browser, server.url) as page,
    ):
        choice = page.get_by_label("Model")
        wait_until(lambda: choice.locator("option").count() == 3, 30, "the choice of both engines")
        choice.select_option("null 1")
        sent = []
        page.on("request", lambda request: sent.append(request) if request.method == "POST" else None)
        ask(page, "to the second")
        wait_for_end(page)
        assert sent[0].headers["x-data-parallel-rank"] == "1"
        page.get_by_role("link", name="Live").click()
        rows = page.get_by_role("region", name="Figures of each engine").locator("tbody tr")
        wait_until(lambda: rows.count() == 2, 30, "a row for each engine")
        wait_until(lambda: "ms" in rows.nth(1).inner_text(), 60, "the second engine's latencies")
        assert "ms" not in rows.nth(0).inner_text()
        page.get_by_label("Engines to draw").select_option("1")
        assert page.locator(".startup table").count() == 1
        assert "running" in page.locator(".legend").first.inner_text()


@pytest.mark.system
def test_an_adapter_is_chosen_as_a_model_is(browser: Browser, tmp_path: Path) -> None:
    write_adapter(tmp_path / "sql", "sql")
    options = ServeOptions(port=0, lora_modules=(f"sql={tmp_path}/sql",), chat_template=TEMPLATE[1])
    engine: Any = {"enable_lora": True, "distributed_executor_backend": ECHO[1]}
    with serving_here(options, **engine) as server, opened(browser, server.url) as page:
        choice = page.get_by_label("Model")
        wait_until(lambda: choice.locator("option").all_inner_texts() == ["null", "sql (adapter)"], 30, "both names")
        choice.select_option("sql")
        page.get_by_role("heading", name="Ask sql (adapter)").wait_for()
        sent = posts_of(page)
        ask(page, "how many")
        wait_for_end(page)
        assert answer(page).locator(".answer-text").inner_text() == "how many"
        assert [each["model"] for each in sent] == ["sql"]


def test_a_model_that_writes_no_text_is_not_asked(browser: Browser) -> None:
    model = {"generates": False, "vector_width": 8}
    with serving_here(null_model=model) as server, opened(browser, server.url) as page:
        page.get_by_role("heading", name="null writes no text").wait_for()
        assert page.locator(".suggestion").count() == 0
        sent = posts_of(page)
        enter(page, "one")
        assert page.get_by_role("button", name="Send").is_disabled()
        page.get_by_role("link", name="the routes of this server").click()
        page.wait_for_url(f"{server.url}/docs")
        assert sent == []


@pytest.mark.system
def test_settings_go_with_the_next_question_and_stay(page: Page) -> None:
    sent = posts_of(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Max tokens").fill("7")
    page.get_by_label("Stop at").fill("one\ntwo")
    page.reload()
    ask(page, "hello there, hello there, hello there")
    wait_for_end(page)
    (body,) = sent
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"], body["stop"]) == (0.5, 7, ["one", "two"])
    assert "top_p" not in body
    assert "7 tokens" in answer(page).locator(".figures").inner_text()
    assert "cut at max tokens" in answer(page).locator(".figures").inner_text()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("9")
    ask(page, "again")
    assert len(sent) == 1, "a value that the server would refuse is not sent"


@pytest.mark.system
def test_the_theme_is_the_systems_or_the_chosen_one(browser: Browser, server: Server) -> None:
    def background(page: Page) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    with opened(browser, server.url, color_scheme="dark") as page:
        dark = background(page)
        page.get_by_role("button", name="Theme").click()  # light
        light = background(page)
        assert light != dark
        page.reload()
        assert background(page) == light
        page.get_by_role("button", name="Theme").click()
        assert background(page) == dark


@pytest.mark.system
def test_nothing_sticks_out_on_a_phone(browser: Browser, server: Server) -> None:
    with opened(browser, server.url, **PHONE) as page:
        ask(page, "|a|b|c|\n|-|-|-|\n|" + "wide " * 40 + "|2|3|\n\n`" + "x" * 300 + "`\n\n" + "y" * 300)
        wait_for_end(page)
        for view in ("#chat", "#live"):
            page.goto(server.url + "/" + view)
            page.locator(f"{view}").wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["viewport"]["width"]


@pytest.mark.system
@pytest.mark.parametrize("look", [PHONE, {"viewport": {"width": 1280, "height": 800}}], ids=["phone", "wide"])
def test_nothing_in_the_toolbar_covers_something_else(browser: Browser, server: Server, look: dict[str, Any]) -> None:
    with opened(browser, server.url, **look) as page:
        page.locator("#engine option").first.wait_for(state="attached")  # once the page knows a model
        page.evaluate("document.querySelector('#engine option').textContent = 'A-model-with-a-long-name-Instruct'")
        boxes = page.evaluate(
            """() => [...document.querySelectorAll(".toolbar select, .toolbar button")]
              .map((each) => each.getBoundingClientRect()).map(({ left, right, height }) => [left, right, height])"""
        )
        assert len(boxes) == 4
        assert all(left >= right for (_, right, _), (left, _, _) in itertools.pairwise(boxes)), boxes
        assert boxes[-1][1] <= look["viewport"]["width"]
        assert all(height < 40 for *_, height in boxes), "each is one line"


MARKDOWN = {
    "a **b *c* d** e": "<p>a <strong>b <em>c</em> d</strong> e</p>",
    "***both***": "<p><em><strong>both</strong></em></p>",
    "snake_case_name and 2*3*4": "<p>snake_case_name and 2<em>3</em>4</p>",
    "~~gone~~ `a*b*` ``x ` y``": "<p><del>gone</del> <code>a*b*</code> <code>x ` y</code></p>",
    "a \\*b\\* &lt;c&gt; &copy;": "<p>a *b* &lt;c&gt; &amp;copy;</p>",
    "**unclosed and *half": "<p>**unclosed and *half</p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# A\n### B\n#### C": "<h3>A</h3><h4>B</h4><h5>C</h5>",
    "- a\n- b\n  1. c\n  2. d\n- e": "<ul><li>a</li><li>b<ol><li>c</li><li>d</li></ol></li><li>e</li></ul>",
    "3. c\n4. d": '<ol start="3"><li>c</li><li>d</li></ol>',
    "Born in\n1986. A year": "<p>Born in<br>1986. A year</p>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "[[a] b](https://x.org/a_(b))": '<p><a href="https://x.org/a_(b)" target="_blank" '
    'rel="noopener noreferrer nofollow" title="https://x.org/a_(b)">[a] b</a></p>',
    "<div>x</div>": "<p>&lt;div&gt;x&lt;/div&gt;</p>",
    "not a | table": "<p>not a | table</p>",
}


@pytest.mark.system
def test_markdown_becomes_what_commonmark_says(page: Page) -> None:
    for text, expected in MARKDOWN.items():
        html = page.evaluate(
            """async (text) => { const { MarkdownView } = await import("./ui/markdown.js");
            const view = new MarkdownView(); view.update(text); return view.element.innerHTML; }""",
            text,
        )
        assert html == expected, text
    grown = page.evaluate(
        """async (texts) => { const { MarkdownView } = await import("./ui/markdown.js");
        return texts.filter((text) => {
          const whole = new MarkdownView(), grown = new MarkdownView(); whole.update(text);
          for (let end = 1; end <= text.length; end++) grown.update(text.slice(0, end));
          return whole.element.innerHTML !== grown.element.innerHTML; }); }""",
        [*MARKDOWN, HOSTILE],
    )
    assert grown == [], "drawn piece by piece it is the same"


TOOLS = [{"name": "get_weather", "description": "x", "parameters": {"type": "object", "properties": {}}}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.mark.system
def test_past_chats_are_listed_continued_and_deleted(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as page:
        for text in ("the first chat", "the second chat"):
            ask(page, text)
            wait_for_end(page)
            page.get_by_role("button", name="New chat").click()
            page.get_by_role("heading", name="Ask null").wait_for()
        other = page.context.new_page()  # another tab of the same browser
        other.goto(server.url)
        other.get_by_role("button", name="Past chats").click()
        panel = other.get_by_role("complementary", name="Past chats")
        titles = panel.locator(".past-title")
        assert titles.all_inner_texts() == ["the second chat", "the first chat"]
        titles.nth(1).click()
        panel.wait_for(state="hidden")
        assert other.locator(".bubble").inner_text() == "the first chat"
        ask(other, "and more of it")
        other.locator(".answer[aria-busy=false]").nth(1).wait_for()
        other.get_by_role("button", name="Past chats").click()
        assert titles.all_inner_texts() == ["the first chat", "the second chat"], "the latest comes first"
        panel.get_by_role("button", name="Delete: the second chat").click()
        assert titles.all_inner_texts() == ["the first chat"]
        panel.get_by_role("button", name="Delete all").click()
        assert titles.count() == 1, "all of them go only once that is confirmed"
        panel.get_by_role("button", name="Keep").click()
        panel.get_by_role("button", name="Delete all").click()
        panel.get_by_role("button", name="Delete 1 chat").click()
        assert titles.count() == 0
        assert other.locator(".bubble").count() == 0, "the chat that was open is gone too"
        other.reload()
        other.get_by_role("heading", name="Ask null").wait_for()
        kept = other.evaluate("Object.keys(localStorage).filter((each) => each.startsWith('headrace.chat.'))")
        assert kept == []


@pytest.mark.system
def test_a_full_storage_loses_the_oldest_chat_and_nothing_else(page: Page) -> None:
    fits = page.evaluate(
        """async () => {
        const { keepChat, pastChats } = await import("./ui/chats.js");
        const said = (text) => [{ role: "user", text }];
        for (let number = 0; number < 12; number++) keepChat(String(number), said(`${number} ` + "x".repeat(900_000)));
        return pastChats().map(({ id }) => id);
    }"""
    )
    assert 2 <= len(fits) < 12
    assert fits[0] == "11"


@pytest.mark.system
def test_calls_of_tools_are_shown_and_what_they_return_is_sent(browser: Browser) -> None:
    options = (*ECHO, *TEMPLATE, "--tool-call-parser", "hermes", "--max-model-len", "4096")
    with serving(*options) as server, opened(browser, server.url, bypass_csp=True) as page:
        sent = posts_of(page)
        page.get_by_role("button", name="Settings").click()
        tools = page.get_by_label("Tools")
        tools.fill("[{}]")
        ask(page, CALL)
        assert sent == [], "tools without a name are not sent"
        tools.fill(json.dumps(TOOLS))
        page.get_by_role("button", name="Close").click()
        ask(page, CALL)
        wait_for_end(page)
        assert sent[0]["tools"] == [{"type": "function", "function": TOOLS[0]}]
        assert answer(page).locator(".call-head").inner_text() == "Calls get_weather"
        assert json.loads(answer(page).locator(".call-arguments").inner_text()) == {"city": "Oslo"}
        assert faults_of(page) == []
        page.get_by_label("What get_weather returns").fill("12 degrees")
        page.get_by_role("button", name="Continue with these").click()
        page.locator(".answer[aria-busy=false]").nth(1).wait_for()
        assert page.locator(".result .call-arguments").inner_text() == "12 degrees"
        call, result = sent[1]["messages"][-2:]
        assert call["tool_calls"][0]["function"]["name"] == "get_weather"
        assert (result["role"], result["content"]) == ("tool", "12 degrees")
        assert result["tool_call_id"] == call["tool_calls"][0]["id"]
        assert answer(page).locator(".answer-text").inner_text().strip() == "12 degrees"
        assert page.get_by_role("button", name="Continue with these").count() == 0
        assert faults_of(page) == []


@pytest.mark.system
@pytest.mark.parametrize("size", ["11.5px", "20px"])
def test_no_label_of_a_chart_is_cut(browser: Browser, server: Server, size: str) -> None:
    """Whatever the visitor's font."""
    with opened(browser, server.url, bypass_csp=True) as page:
        page.add_style_tag(content=f".tick {{ font-size: {size} !important }}")
        cut = page.evaluate(
            """async () => {
            const { Chart } = await import("./ui/chart.js");
            const chart = new Chart("x", (value) => `${value * 1000} thousand`);
            document.body.replaceChildren(chart.element);
            await new Promise((done) => setTimeout(done));
            chart.update([{ label: "a", color: 0, points: [[1, 5]] }], 0, 60);
            const plot = chart.element.getBoundingClientRect();
            return [...chart.element.querySelectorAll(".tick")].filter((each) => {
              const box = each.getBoundingClientRect();
              return box.left < plot.left || box.right > plot.right;
            }).map((each) => each.textContent);
        }"""
        )
        assert cut == []


@pytest.mark.system
def test_the_axis_of_a_count_has_whole_numbers(page: Page) -> None:
    """Nothing is half a request."""
    labels = page.evaluate(
        """async () => {
        const { Chart } = await import("./ui/chart.js");
        const chart = new Chart("x", String, { leastMax: 4 });
        document.body.replaceChildren(chart.element);
        await new Promise((done) => setTimeout(done));
        return [...Array(300).keys()].flatMap((most) => {
          chart.update([{ label: "a", color: 0, points: [[1, most]] }], 0, 60);
          return [...chart.element.querySelectorAll(".tick")].slice(0, 3).map((each) => each.textContent);
        });
    }"""
    )
    assert len(labels) == 900
    assert [each for each in labels if not each.isdecimal()] == []


@pytest.mark.system
def test_charts_begin_with_a_minute_and_grow_to_the_chosen_time(browser: Browser, server: Server) -> None:
    """So that what has just been opened is not a line at the edge of an empty chart."""
    with opened(browser, server.url + "/#live") as page:
        begin = page.locator(".chart").first.get_by_text("min ago")
        begin.wait_for()
        assert begin.text_content() == "1 min ago"
        sample = "{ at: Date.now() / 1000 - 200, server: '', engines: {} }"
        page.add_init_script(f"sessionStorage.setItem('headrace.samples', JSON.stringify([{sample}]))")
        page.reload()
        page.get_by_label("Time to draw").wait_for()
        wait_until(lambda: begin.text_content() == "5 min ago", 30, "a chart with the sample")
        page.get_by_label("Time to draw").select_option("60")
        assert begin.text_content() == "1 min ago"

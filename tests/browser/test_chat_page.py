"""The chat page in a headless Chromium, with a server of a tiny model: `make browser`."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.serve.servers import CONFIG, Server, make_run, running_server

playwright_api = pytest.importorskip(
    "playwright.sync_api", reason='playwright is not installed: pip install "megalith[browser]"'
)
expect = playwright_api.expect
expect.set_options(timeout=60_000)
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium"),
]
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
CHAT = "**/v1/chat/completions"
ONLY_LETTERS = {"ignore_eos": True, "allowed_token_ids": list(range(97, 123))}
LONG = 8000
"""Tokens of an answer that is still generated when a test stops it."""

FAILED_LOAD = re.compile("Failed to load resource")
"""What Chromium logs for every response with an error status, and for a refused connection."""


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a tiny model that has a long context; its tokens are bytes."""
    folder = tmp_path_factory.mktemp("browser") / "run"
    return make_run(folder, replace(CONFIG, max_seq_len=2 * LONG))


@pytest.fixture(scope="module")
def server(long_run: Path) -> Iterator[Server]:
    """A server of the model under the name tiny."""
    with running_server(long_run, "--served-model-name", "tiny", "--template", "chatml") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium with an empty profile."""
    with playwright_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


@dataclass
class Profile:
    """A profile of the browser, whose tabs share their storage; records what they do."""

    context: Any
    url: str
    max_tokens: int = 24
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the chat requests, as the page sent them."""

    urls: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Errors in the console, and exceptions."""

    def __post_init__(self) -> None:
        """Record requests, and make answers of the model letters without an end token."""
        self.context.set_default_timeout(60_000)
        self.context.on("request", lambda request: self.urls.append(request.url))
        self.context.on("weberror", lambda error: self.errors.append(str(error.error)))
        self.context.on("console", self._record_message)
        self.context.route(CHAT, self._add_fields)

    def _record_message(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _add_fields(self, route: Any) -> None:
        body = route.request.post_data_json
        self.bodies.append(body)
        fields = {"max_tokens": self.max_tokens} | body | ONLY_LETTERS
        route.continue_(post_data=json.dumps(fields))

    def answer_with(self, *deltas: dict[str, Any], end: str = "data: [DONE]\n\n") -> None:
        """Answer the chat requests that follow with these deltas."""
        events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end
        self.context.route(
            CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=text)
        )

    def open(self, path: str = "/") -> "Tab":
        """Open a tab."""
        page = self.context.new_page()
        page.goto(self.url + path)
        return Tab(page)

    def check(self) -> None:
        """Check that there was no error, and no request to another host."""
        assert self.errors == []
        assert self.urls and all(url.startswith(self.url + "/") for url in self.urls)

    def allow_failed_loads(self) -> None:
        """Forget the console's messages about responses with an error status."""
        self.errors = [text for text in self.errors if not FAILED_LOAD.match(text)]


@dataclass
class Tab:
    """A tab with the chat page."""

    page: Any

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the page."""
        return getattr(self.page, name)

    @property
    def prompt(self) -> Any:
        """The input of the message."""
        return self.page.get_by_label("Message", exact=True)

    @property
    def answers(self) -> Any:
        """The turns of the model."""
        return self.page.locator(".assistant")

    @property
    def contents(self) -> list[str]:
        """The texts of all turns."""
        texts: list[str] = self.page.locator(".turn .content").all_text_contents()
        return texts

    def button(self, name: str) -> Any:
        """The visible buttons with a name."""
        return self.page.get_by_role("button", name=name, exact=True)

    def send(self, text: str) -> None:
        """Send a message with the keyboard."""
        expect(self.page.get_by_role("combobox", name="Model")).to_have_value(re.compile("."))
        self.prompt.fill(text)
        self.prompt.press("Enter")

    def ask(self, text: str) -> str:
        """Send a message; returns the complete answer."""
        self.send(text)
        self.wait_complete()
        return self.contents[-1]

    def wait_complete(self) -> None:
        """Wait until the last answer is complete."""
        expect(self.answers.last.locator(".stats, .error")).to_be_visible()
        expect(self.button("Send")).to_be_visible()

    def wait_streaming(self) -> None:
        """Wait until an answer has text and is not complete."""
        expect(self.answers.last.locator(".content")).to_have_text(re.compile("[a-z]{3}"))
        expect(self.button("Stop")).to_be_visible()


@pytest.fixture
def profile(browser: Any, server: Server) -> Iterator[Profile]:
    """An empty profile for the server; checks at the end that nothing went wrong in it."""
    context = browser.new_context()
    profile = Profile(context, server.url)
    yield profile
    profile.check()
    context.close()


# --- answers


def test_first_answer_is_that_of_the_server(profile: Profile, server: Server) -> None:
    tab = profile.open()
    tab.button("Settings").click()
    tab.get_by_label("System prompt").fill("Be brief.")
    for label, value in (("Temperature", "1.5"), ("Top-p", "0.9"), ("Top-k", "20")):
        tab.get_by_label(label, exact=True).fill(value)
    tab.get_by_label("Seed", exact=True).fill("7")
    tab.get_by_label("Max tokens", exact=True).fill("30")
    tab.button("Done").click()
    answer = tab.ask("Hello")
    (body,) = profile.bodies
    assert body == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        **{"temperature": 1.5, "top_p": 0.9, "top_k": 20, "seed": 7, "max_tokens": 30},
    }
    del body["stream"], body["stream_options"]
    expected = server.post("/v1/chat/completions", body | ONLY_LETTERS).json()
    assert answer == expected["choices"][0]["message"]["content"] and len(answer) == 30
    assert tab.contents == ["Hello", answer]
    prompt = expected["usage"]["prompt_tokens"]
    assert re.fullmatch(
        rf"tiny · 30 tokens · [\d.]+ tokens/s · first token after \d+\.\d\d s · 0 of {prompt} "
        "prompt tokens cached · ended at the token limit",
        tab.locator(".stats").text_content(),
    )
    tab.ask("More")
    assert [message["role"] for message in profile.bodies[1]["messages"]] == [
        *("system", "user", "assistant", "user")
    ]
    assert profile.bodies[1]["messages"][2] == {"role": "assistant", "content": answer}
    stats = tab.locator(".stats").last.text_content()
    assert int(re.search(r"(\d+) of \d+ prompt tokens cached", stats)[1]) >= prompt


def test_answer_streams_and_stop_frees_its_blocks(profile: Profile, server: Server) -> None:
    profile.max_tokens = LONG
    before = server.metrics()
    tab = profile.open()
    tab.send("Hello")
    tab.wait_streaming()
    shown = len(tab.contents[-1])
    tab.wait_for_function(
        "length => document.querySelector('.assistant .content').textContent.length > length",
        arg=shown,
    )
    assert server.metrics()["kv_cache_usage_perc"] > 0
    tab.button("Stop").click()
    tab.wait_complete()
    samples = server.wait_idle()
    assert samples["kv_cache_usage_perc"] == 0
    assert samples["client_disconnects_total"] == before["client_disconnects_total"] + 1
    assert samples["generation_tokens_total"] - before["generation_tokens_total"] < LONG
    assert shown < len(tab.contents[-1]) < LONG
    assert "stopped" in tab.locator(".stats").text_content()
    profile.max_tokens = 5
    tab.ask("Continue")
    assert len(profile.bodies[1]["messages"][1]["content"]) == len(tab.contents[1])


def test_retry_and_edit_replace_later_turns(profile: Profile) -> None:
    tab = profile.open()
    first, second = tab.ask("one"), tab.ask("two")
    tab.answers.last.get_by_role("button", name="Retry").click()
    expect(tab.answers.last.locator(".content")).not_to_have_text(second)
    tab.wait_complete()
    assert tab.contents[:3] == ["one", first, "two"] and len(tab.contents) == 4
    assert profile.bodies[2] == profile.bodies[1]

    tab.locator(".user").first.get_by_role("button", name="Edit").click()
    editor = tab.get_by_label("Edit the message")
    expect(editor).to_be_focused()
    editor.fill("three")
    editor.press("Enter")
    dialog = tab.get_by_role("dialog")
    expect(dialog).to_contain_text("This replaces the 2 later messages.")
    dialog.get_by_role("button", name="Cancel").click()
    expect(editor).to_have_value("three")  # nothing is lost
    editor.press("Enter")
    tab.get_by_role("dialog").get_by_role("button", name="Replace").click()
    expect(tab.locator(".turn")).to_have_count(2)
    tab.wait_complete()
    assert tab.contents[0] == "three"
    assert profile.bodies[3]["messages"] == [{"role": "user", "content": "three"}]

    tab.answers.last.get_by_role("button", name="Edit").click()
    tab.get_by_label("Edit the message").fill("**changed**")
    tab.button("Save").click()
    expect(tab.answers.last.locator("strong")).to_have_text("changed")
    tab.ask("four")
    assert profile.bodies[4]["messages"][1] == {"role": "assistant", "content": "**changed**"}


def test_reasoning_and_tool_calls_are_shown(profile: Profile) -> None:
    call = {"index": 0, "id": "1", "function": {"name": "get_weather", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Paris"}'}}
    profile.answer_with(
        {"role": "assistant", "reasoning_content": "First "},
        {"reasoning_content": "<b>this</b>"},
        {"content": "The answer."},
        {"tool_calls": [call]},
        {"tool_calls": [rest]},
    )
    tab = profile.open()
    assert tab.ask("Weather?") == "The answer."
    reasoning = tab.get_by_text("First <b>this</b>")
    expect(reasoning).to_be_hidden()
    tab.get_by_text("Reasoning").click()
    expect(reasoning).to_be_visible()
    expect(tab.get_by_text("Tool call: get_weather")).to_be_visible()
    expect(tab.get_by_text('{"city": "Paris"}')).to_be_visible()


def test_html_of_the_model_is_shown_as_text(profile: Profile) -> None:
    attack = '<img src=x onerror="window.attacked = true"><script>window.attacked = true</script>'
    link = "[link](javascript:window.attacked=true) [data](data:text/html,x)"
    profile.answer_with({"content": f"{attack} {link}\n\n```html\n"}, {"content": f"{attack}\n```"})
    profile.context.route(
        "**/v1/models", lambda route: route.fulfill(json={"data": [{"id": attack}]})
    )
    tab = profile.open()
    tab.ask(attack)
    assert tab.contents[0] == attack
    expect(tab.answers.locator(".content p")).to_have_text(f"{attack} {link}")
    expect(tab.answers.locator("pre")).to_have_text(attack)
    tab.answers.get_by_text("link").click()
    expect(tab.locator("#conversations a")).to_have_text(attack[:60])
    assert tab.locator("img").count() == tab.answers.locator("script, a").count() == 0
    assert tab.evaluate("() => window.attacked") is None
    assert tab.evaluate("() => { try { document.body.innerHTML = 'x' } catch { return 1 } }") == 1
    profile.errors = [text for text in profile.errors if "TrustedHTML" not in text]  # of this line


def test_markdown_becomes_elements(profile: Profile) -> None:
    profile.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = """# Title

**bold** and *italic* and _also_, `a*b*c`, snake_case_name, 2 * 3 * 4, ***both***

1. one
   - nested
   - *more*
2. two

5) five
> quoted

[page](https://example.org/a_(b)) [unsafe](ftp://x)
```python
x = "**"

y = 1
```
end"""
    parts = [{"content": text[start : start + 7]} for start in range(0, len(text), 7)]
    profile.answer_with(*parts)
    tab = profile.open()
    tab.ask("x")
    content = tab.answers.locator(".content")
    expect(content.locator("h1")).to_have_text("Title")
    expect(content.locator("p > strong")).to_have_text(["bold", "both"])
    expect(content.locator("p em")).to_have_text(["italic", "also", "both"])
    expect(content.locator("p > code")).to_have_text("a*b*c")
    expect(content.locator("p").first).to_contain_text("snake_case_name, 2 * 3 * 4")
    expect(content.locator("ol > li > ul > li")).to_have_text(["nested", "more"])
    assert content.locator("ol").evaluate_all("all => all.map(each => each.start)") == [1]
    expect(content.locator("ol > li")).to_have_count(3)
    expect(content.locator("blockquote")).to_have_text("quoted")
    link = content.get_by_role("link")
    expect(link).to_have_attribute("href", "https://example.org/a_(b)")
    expect(link).to_have_attribute("rel", "noopener noreferrer")
    expect(content.get_by_text("[unsafe](ftp://x)")).to_be_visible()
    expect(content.locator("pre")).to_have_text('x = "**"\n\ny = 1')
    expect(content.locator("p").last).to_have_text("end")
    tab.button("Copy code").click()
    expect(tab.get_by_role("status").filter(has_text="Copied")).to_be_attached()
    assert tab.evaluate("() => navigator.clipboard.readText()") == 'x = "**"\n\ny = 1'


# --- conversations


def test_conversations_survive_a_reload(profile: Profile, server: Server) -> None:
    tab = profile.open()
    answer = tab.ask("first question")
    tab.get_by_label("Title of the conversation").fill("renamed")
    tab.get_by_label("Title of the conversation").press("Enter")
    tab.reload()
    assert tab.contents == ["first question", answer]
    expect(tab.locator("#conversations a")).to_have_text("renamed")

    tab.button("+ New conversation").click()
    profile.max_tokens = LONG
    tab.send("second question")
    tab.wait_streaming()
    tab.reload()
    server.wait_idle()
    expect(tab.locator(".stats")).to_contain_text("stopped")
    assert re.fullmatch("[a-z]+", tab.contents[1])
    tab.locator("#conversations a", has_text="renamed").click()
    expect(tab.locator(".user .content")).to_have_text("first question")
    tab.go_back()
    expect(tab.locator(".user .content")).to_have_text("second question")

    tab.button("Delete second question").click()
    tab.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(tab.locator(".turn")).to_have_count(0)
    tab.reload()
    expect(tab.locator("#conversations a")).to_have_text("renamed")


def test_two_tabs_share_conversations(profile: Profile, server: Server) -> None:
    one, two = profile.open(), profile.open()
    one.ask("in one")
    two.ask("in two")
    for tab in (one, two):
        expect(tab.locator("#conversations a")).to_have_text(["in two", "in one"])
    two.locator("#conversations a", has_text="in one").click()
    two.ask("again")
    expect(one.locator(".turn")).to_have_count(4)
    assert one.contents == two.contents

    profile.max_tokens = LONG
    one.send("long")
    one.wait_streaming()
    expect(two.get_by_text("being answered in another tab")).to_be_visible()
    two.send("refused")
    expect(two.prompt).to_have_value("refused")
    one.prompt.press("Escape")
    one.wait_complete()
    server.wait_idle()
    expect(two.locator(".turn")).to_have_count(6)
    assert len(profile.bodies) == 4
    two.button("Delete in one").click()
    two.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(one.locator(".turn")).to_have_count(0)


# --- errors


def test_key_is_asked_once_and_a_restarted_server_is_used(browser: Any, long_run: Path) -> None:
    options = ["--served-model-name", "tiny", "--template", "chatml", "--api-key", "secret"]
    context = browser.new_context()
    with running_server(long_run, *options) as server:
        profile = Profile(context, server.url)
        tab = profile.open()
        dialog = tab.get_by_role("dialog")
        expect(dialog).to_contain_text("The server requires an API key.")
        dialog.get_by_role("button", name="Cancel").click()
        expect(tab.get_by_text("The server requires an API key.")).to_be_visible()
        tab.button("Retry").click()
        for key, text in (("wrong", "requires an API key"), ("secret", "rejected the API key")):
            expect(dialog).to_contain_text(text)
            dialog.get_by_label("API key").fill(key)
            dialog.get_by_label("API key").press("Enter")
        expect(dialog).to_have_count(0)
        tab.ask("one")
        tab.reload()
        tab.ask("two")
        expect(dialog).to_have_count(0)
        server.process.kill()
        server.process.wait()
        tab.send("three")
        expect(tab.locator(".error")).to_contain_text(
            f"The server at {server.url.removeprefix('http://')} cannot be reached. Check that"
        )
    port = server.url.rpartition(":")[2]
    with running_server(long_run, *options, "--port", port):
        tab.button("Retry").last.click()
        tab.wait_complete()
        expect(tab.locator(".error")).to_have_count(0)
        expect(dialog).to_have_count(0)
        assert len(tab.contents) == 6 and len(tab.contents[-1]) == 24
    profile.allow_failed_loads()
    profile.check()
    context.close()


def test_lost_connection_and_errors_in_a_stream_are_shown(profile: Profile) -> None:
    profile.answer_with({"content": "Half"}, end="")
    tab = profile.open()
    assert tab.ask("x") == "Half"
    expect(tab.locator(".error")).to_contain_text("connection to the server was lost before")
    error = {"error": {"message": "the deadline <b>passed</b>.", "code": None, "param": None}}
    profile.answer_with({"content": "Part"}, end=f"data: {json.dumps(error)}\n\n")
    tab.button("Retry").last.click()
    expect(tab.locator(".error")).to_contain_text("the deadline <b>passed</b>.")
    assert tab.contents == ["x", "Part"]
    profile.context.unroute(CHAT)
    tab.button("Settings").click()
    tab.get_by_label("Temperature").fill("-1")
    tab.button("Done").click()
    tab.button("Retry").last.click()
    expect(tab.locator(".error")).to_contain_text("temperature=-1")
    profile.allow_failed_loads()


def test_model_without_template_continues_text(profile: Profile) -> None:
    message = "messages: the model has no chat template: none."
    profile.context.route(
        CHAT,
        lambda route: route.fulfill(
            status=400, json={"error": {"message": message, "param": "messages", "code": None}}
        ),
    )
    profile.context.route(
        "**/tokenizer_info", lambda route: route.fulfill(json={"chat_template": None})
    )
    tab = profile.open()
    tab.button("Settings").click()
    tab.get_by_label("Max tokens").fill("12")
    tab.button("Done").click()
    tab.send("Once")
    expect(tab.locator(".error")).to_contain_text(message)
    with tab.expect_request("**/v1/completions") as request:
        tab.button("Continue the text without a template").click()
    tab.wait_complete()
    assert request.value.post_data_json["prompt"] == "Once"
    assert "messages" not in request.value.post_data_json
    expect(tab.locator(".error")).to_have_count(0)
    assert tab.contents[1]
    profile.allow_failed_loads()


# --- accessibility


def test_keyboard_alone_suffices(profile: Profile, server: Server) -> None:
    profile.max_tokens = LONG
    tab = profile.open()
    expect(tab.prompt).to_be_focused()
    expect(tab.get_by_role("combobox", name="Model")).to_have_value("tiny")
    for key in ("a", "Shift+Enter", "b", "Enter"):
        tab.keyboard.press(key)
    tab.wait_streaming()
    tab.keyboard.press("Escape")
    tab.wait_complete()
    server.wait_idle()
    assert tab.contents[0] == "a\nb"
    expect(tab.prompt).to_be_focused()

    retry = tab.answers.last.get_by_role("button", name="Retry")
    focused = "() => document.activeElement.textContent"
    for _ in range(10):
        tab.keyboard.press("Shift+Tab")
        if tab.evaluate(focused) == "Retry":
            break
    expect(retry).to_be_focused()
    assert retry.evaluate("element => getComputedStyle(element).outlineStyle") == "solid"
    profile.max_tokens = 6
    tab.keyboard.press("Enter")
    tab.wait_complete()
    assert re.fullmatch("[a-z]{6}", tab.contents[1])
    tab.reload()
    for _ in range(10):
        tab.keyboard.press("Tab")
        if tab.evaluate(focused) == "Skip to the message":
            break
    expect(tab.button("Skip to the message")).to_be_visible()
    for _ in range(3):
        tab.keyboard.press("Tab")
    expect(tab.button("Delete a b")).to_be_focused()
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("dialog")).to_be_visible()
    tab.keyboard.press("Escape")
    expect(tab.get_by_role("dialog")).to_have_count(0)
    expect(tab.locator(".turn")).to_have_count(2)


def test_screen_readers_get_names_and_states(profile: Profile) -> None:
    profile.max_tokens = LONG
    tab = profile.open()
    tab.send("Hello")
    tab.wait_streaming()
    log = tab.get_by_role("log", name="Messages")
    expect(log).to_have_attribute("aria-busy", "true")
    tab.keyboard.press("Escape")
    tab.wait_complete()
    expect(log).to_have_attribute("aria-busy", "false")
    expect(tab.locator("#status")).to_have_text("Stopped")
    expect(tab.get_by_role("article", name="Assistant")).to_have_count(1)
    names = tab.locator(
        "button:visible, input:visible, select:visible, textarea:visible"
    ).evaluate_all("all => all.map(each => each.ariaLabel || each.textContent.trim())")
    assert len(names) >= 10 and all(names)


def test_narrow_screen_does_not_scroll_sideways(profile: Profile) -> None:
    word = "x" * 200
    profile.answer_with({"content": f"{word}\n\n- `{word}`\n\n```\n{word}\n```\n# {word}"})
    tab = profile.open()
    tab.set_viewport_size({"width": 320, "height": 600})
    width = "() => Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
    tab.ask(word)
    assert tab.evaluate(width) == 320
    assert tab.locator("#log").evaluate("log => log.scrollWidth - log.clientWidth") == 0
    new = tab.button("+ New conversation")
    expect(new).to_be_hidden()
    tab.button("Conversations").click()
    expect(new).to_be_focused()
    assert tab.evaluate(width) == 320
    tab.keyboard.press("Escape")
    expect(new).to_be_hidden()
    expect(tab.button("Conversations")).to_be_focused()
    tab.button("Settings").click()
    assert tab.evaluate(width) == 320
    assert tab.get_by_role("dialog").evaluate("each => each.scrollWidth - each.clientWidth") == 0
    tab.button("Done").click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_follow_the_scheme_with_enough_contrast(profile: Profile, scheme: str) -> None:
    profile.answer_with({"content": "[link](https://example.org)"})
    tab = profile.open()
    tab.emulate_media(color_scheme=scheme)
    tab.ask("x")
    tab.prompt.fill("y")

    def luminance(selector: str, name: str) -> float:
        color = tab.locator(selector).first.evaluate(
            "(element, name) => getComputedStyle(element)[name]", name
        )
        values = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
        parts = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts))

    back = luminance("body", "backgroundColor")
    assert back < 0.02 if scheme == "dark" else back > 0.9
    pairs = [("body", "body"), (".stats", "body"), (".assistant a", "body"), (".actions", "body")]
    pairs += [(".user .content", ".user .content"), ("#send", "#send"), ("#model", ".box")]
    for text, behind in pairs:
        low, high = sorted((luminance(text, "color"), luminance(behind, "backgroundColor")))
        assert (high + 0.05) / (low + 0.05) >= 4.5, text  # WCAG 2.2, level AA

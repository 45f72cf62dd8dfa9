"""The viewer's page in chromium: it loads, plays, steps, handles pointer and keys, logs nothing.

Needs playwright (the extra `browser`) and a system-wide chromium; skipped without them.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoengine.bench.simulator import make_scheduler, simulate
from nanoengine.bench.workload import WorkItem
from nanoengine.observe.explain import explain_recording
from nanoengine.observe.trace import Trace
from nanoengine.observe.trace_reader import read_trace
from nanoengine.observe.viewer.page import page
from nanoengine.observe.viewer.page_data import page_data
from tests.observe.test_viewer import SAMPLE, States
from tests.support.browser import start_chromium

pytestmark = pytest.mark.browser

EVIL = "<script>document.title='run'</script><img src=x onerror=document.title='run'>"
READY = "html[data-ready]"
WORDS = {974: EVIL}


def words(token_id: int) -> str:
    return WORDS.get(token_id, f" word{token_id}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="the extra `browser` is missing")
    with api.sync_playwright() as playwright:
        started = start_chromium(playwright)
        if isinstance(started, str):
            pytest.skip(started)
        yield started
        started.close()


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("viewer")
    lines = gzip.decompress(SAMPLE.read_bytes()).replace(b'"id":"3"', f'"id":"{EVIL}"'.encode())
    (folder / "run.trace").write_bytes(lines)
    data = page_data(read_trace(folder / "run.trace"), text_of=words, title="a run")
    (folder / "run.html").write_text(page(data), encoding="utf-8")
    return folder / "run.html"


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any, html: Path) -> Iterator[Open]:
    """Opens pages; afterwards checks that nothing was logged and nothing else was requested."""
    messages: list[str] = []
    script: list[str] = []
    contexts, opens = [], set()

    def opened(fragment: str = "", file: Path = html, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(20_000)
        tab.on("console", lambda message: messages.append(message.text))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.on("request", lambda request: script.append(request.url))
        opens.add(file.as_uri())
        tab.goto(file.as_uri() + fragment)
        tab.wait_for_selector(READY)
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert messages == []
    assert {url.partition("#")[0] for url in script} == opens


def text(tab: Any, selector: str) -> str:
    return str(tab.locator(selector).inner_text())


def current(tab: Any) -> int:
    return int(tab.evaluate("viewer.state.frame"))


def until(tab: Any, expression: str) -> None:
    """Waits until the expression is true; playwright's own wait needs `unsafe-eval` in the page."""
    for _ in range(400):
        if tab.evaluate(expression):
            return
        tab.wait_for_timeout(50)
    pytest.fail(f"20 seconds have passed, and not {expression}")


def painted(tab: Any, selector: str) -> int:
    """Returns the number of colours on a canvas."""
    return int(
        tab.evaluate(
            "(selector) => { const canvas = document.querySelector(selector);"
            " const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width,"
            " canvas.height); return new Set(new Uint32Array(data.buffer)).size }",
            selector,
        )
    )


def test_the_page_loads_and_draws(open_page: Open) -> None:
    tab = open_page()
    assert "224 steps" in text(tab, "#about") and "35 preemptions" in text(tab, "#about")
    assert "step 0 of 223" in text(tab, "#now")
    for selector in ("[data-track=tokens] canvas", "[data-track=time] canvas", "#lanes canvas",
                     "#pool canvas"):  # fmt: skip
        assert painted(tab, selector) > 5, selector
    assert tab.locator("#curves .uplot").count() == 4


def test_the_state_of_the_page_equals_the_core_forwards_and_backwards(open_page: Open) -> None:
    tab, expected = open_page(), States(read_trace(SAMPLE).replay()).of
    tab.evaluate("viewer.fold.constructor.SPACING = 100")  # so that states are cached and used
    script = """(frame) => { const { fold, tablesOf, knownTokens, lanes, textOf } = viewer;
        fold.seek(frame);
        return { refs: Array.from(fold.refs), contents: Array.from(fold.content, (c) => c >= 0),
                 lanes: lanes.map((lane, i) => [lane.seq, tablesOf(i, frame),
                                                knownTokens(i, frame)]) } }"""
    frames = [*range(len(expected)), *range(len(expected) - 1, -1, -7), 100, 5, 220]
    for frame in frames:
        found = tab.evaluate(script, frame)
        refs, contents, running = expected[frame]
        assert found["refs"] == refs, frame
        assert found["contents"] == [block in contents for block in range(len(refs))], frame
        for seq_id, tables, known in found["lanes"]:
            held, length = running.get(seq_id, ({}, known))
            blocks = {(group, index): block for group, table in enumerate(tables)
                      for index, block in enumerate(table) if block}  # fmt: skip
            assert (blocks, known) == (held, length), (frame, seq_id)


def test_playback_stops_at_the_end(open_page: Open) -> None:
    tab = open_page()
    tab.select_option("#speed", "500")
    tab.click("#play")
    until(tab, "viewer.state.frame === 223 && !viewer.state.playing")
    assert text(tab, "#play") == "▶ Play"
    tab.click("#play")  # from the end it restarts
    until(tab, "viewer.state.frame === 223 && !viewer.state.playing")


def test_buttons_slider_and_tracks_select_steps(open_page: Open) -> None:
    tab = open_page()
    tab.click("#forward")
    tab.click("#forward")
    tab.click("#back")
    assert current(tab) == 1
    tab.locator("#slider").fill("60")
    assert current(tab) == 60 and "step 60" in text(tab, "#now")
    tab.click("#last")
    assert current(tab) == 223
    box = tab.locator("[data-track=tokens] canvas").bounding_box()
    tab.mouse.click(box["x"] + box["width"] / 2, box["y"] + 20)
    assert 80 < current(tab) < 130
    tab.click("#in")
    start, end = tab.evaluate("viewer.state.view")
    assert end - start == 112 and start <= current(tab) < end
    tab.click("#all")
    assert tab.evaluate("viewer.state.view") == [0, 224]


def test_hover_and_click_show_the_history_of_a_block(open_page: Open) -> None:
    tab = open_page("#step=128")
    box, cell = tab.locator("#pool canvas").bounding_box(), tab.evaluate("viewer.pool.cell")
    at = box["x"] + 3.5 * cell, box["y"] + 0.5 * cell
    tab.mouse.move(*at)
    tab.wait_for_selector("#tip:not([hidden])")
    assert "Block 3: in use by requests" in text(tab, "#tip")
    assert "step 0: allocated by request 0, entry 2 of its table" in tab.evaluate(
        "viewer.blockHistory(3).map(([frame, text]) => `step ${frame}: ${text}`)"
    )
    tab.mouse.click(*at)
    assert "Block 3" in text(tab, "#chosen") and "History of the block" in text(tab, "#chosen")
    entries = tab.locator("#chosen .life li").count()
    assert entries > 20
    tab.locator("#chosen .go").first.click()
    assert current(tab) == 0


def test_hover_and_click_show_the_history_of_a_request(open_page: Open) -> None:
    tab = open_page("#step=60")
    box = tab.locator("#lanes").bounding_box()
    at = box["x"] + 200, box["y"] + 9 + 4 * 18  # the fifth lane
    tab.mouse.move(*at)
    tab.wait_for_selector("#tip:not([hidden])")
    lines = text(tab, "#tip")
    assert "arrived at" in lines and "preempted with" in lines
    tab.mouse.click(*at)
    chosen = text(tab, "#chosen")
    assert "History of the request" in chosen and "Block table" in chosen and "finished" in chosen
    lines = explain_recording(read_trace(SAMPLE)).request_lines("4")
    found = tab.evaluate("viewer.requestHistory(4).map(([, text]) => text)")
    assert found == [re.sub(r"^step \d+: ", "", line) for line in lines]
    tab.keyboard.press("Escape")
    assert "Select a request" in text(tab, "#chosen")
    assert "Waiting:" in text(tab, "#chosen")  # the highlights of the run


def test_search_finds_requests_prompts_blocks_and_steps(open_page: Open) -> None:
    tab = open_page()
    tab.fill("#search", "12")
    tab.keyboard.press("Enter")
    assert "Request 12" in text(tab, "#chosen")
    tab.fill("#search", f"{EVIL} word973 word311")
    first = tab.locator("#found button").first
    assert "prompts that begin with" in first.inner_text()
    first.click()
    assert "only" in text(tab, "#unfilter")
    tab.click("#unfilter")
    assert tab.locator("#unfilter").is_hidden()
    tab.fill("#search", "block 7")
    tab.keyboard.press("Enter")
    assert "Block 7" in text(tab, "#chosen")
    tab.fill("#search", "step 40")
    tab.keyboard.press("Enter")
    assert current(tab) == 40
    tab.fill("#search", "there is no such thing")
    assert "nothing found" in text(tab, "#found")


def test_unused_blocks_are_not_drawn(open_page: Open, tmp_path: Path) -> None:
    shapes = []
    for num_blocks in (101, 100_001):
        trace = tmp_path / f"{num_blocks}.trace"
        with Trace(trace, scheduler := make_scheduler(num_blocks=num_blocks, block_size=4)) as one:
            items = [WorkItem(prompt_token_ids=tuple(range(i, i + 90)), max_tokens=4)
                     for i in range(0, 400, 100)]  # fmt: skip
            simulate(items, scheduler, trace=one)
        html = trace.with_suffix(".html")
        html.write_text(page(page_data(read_trace(trace), title="a pool")), encoding="utf-8")
        tab = open_page(file=html)
        shapes.append(tab.evaluate("[viewer.pool.columns, viewer.pool.rows, viewer.pool.cell]"))
    assert shapes[0] == shapes[1]
    assert "are never used and not drawn" in text(tab, "#pool-words")
    assert "100,000 blocks of" in text(tab, "#about")


def test_a_link_selects_a_step(open_page: Open) -> None:
    tab = open_page("#step=77&sequence=5&block=4")
    assert current(tab) == 77 and "Block 4" in text(tab, "#chosen")
    tab.evaluate("viewer.setFrame(90)")
    until(tab, "location.hash === '#step=90&sequence=5&block=4'")
    for nonsense in ("#step=99999999", "#step=-4&block=x&sequence=%00", "#<script>"):
        assert 0 <= current(open_page(nonsense)) <= 223


def test_the_page_can_be_used_with_the_keyboard_alone(open_page: Open) -> None:
    tab = open_page()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Shift+ArrowRight")
    assert current(tab) == 11
    tab.keyboard.press("End")
    assert current(tab) == 223
    tab.keyboard.press("Home")
    tab.keyboard.press(" ")
    until(tab, "viewer.state.frame > 2")
    tab.keyboard.press(" ")
    assert tab.evaluate("viewer.state.playing") is False
    tab.keyboard.press("?")
    assert "play or stop" in text(tab, "#keys")
    tab.keyboard.press("Escape")
    reached = set()
    for _ in range(40):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate("document.activeElement.id"))
        wide = "parseFloat(getComputedStyle(document.activeElement).outlineWidth) >= 2"
        assert tab.evaluate(f"document.activeElement === document.body || {wide}")
    assert {"play", "slider", "speed", "search", "help", "in", "lanes", "colour", "pool"} <= reached
    tab.focus("#lanes")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowDown")
    assert "Request 1" in text(tab, "#chosen") and "Request 1" in text(tab, "#live")
    tab.focus("#pool")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    assert "Block 1" in text(tab, "#live")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "chosen"


def test_the_page_fits_a_phone(open_page: Open) -> None:
    tab = open_page("#step=60", viewport={"width": 390, "height": 844}, has_touch=True,
                    is_mobile=True, device_scale_factor=2)  # fmt: skip
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert painted(tab, "#pool canvas") > 5
    tab.locator("#pool").scroll_into_view_if_needed()
    box, cell = tab.locator("#pool canvas").bounding_box(), tab.evaluate("viewer.pool.cell")
    tab.touchscreen.tap(box["x"] + 1.5 * cell, box["y"] + 0.5 * cell)
    assert "Block 1" in text(tab, "#chosen")


def test_dark_and_light_follow_the_system(open_page: Open) -> None:
    tab = open_page(color_scheme="dark")
    shade = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(shade)
    tab.emulate_media(color_scheme="light")
    until(tab, f"{shade} !== '{dark}'")
    assert dark == "rgb(15, 18, 23)"


def test_prompts_and_names_are_never_parsed_as_html(open_page: Open) -> None:
    tab = open_page("#step=30&sequence=3")
    assert EVIL in text(tab, "#chosen")
    assert text(tab, "#chosen .text").startswith(EVIL)
    tab.fill("#search", "script")
    assert EVIL in text(tab, "#found")
    assert tab.locator("main script, main img, #found img").count() == 0
    assert tab.title() == "a run · nanoengine"

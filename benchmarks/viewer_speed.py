"""Speed of the viewer's page for a large run: `python benchmarks/viewer_speed.py --out DIR`.

Simulates a run of about 10,000 steps with a pool of 100,000 blocks, writes its page, opens it in
chromium without a GPU, and measures the time to first paint, frames per second during playback and
while a pointer moves over blocks and lanes, and milliseconds per jump and zoom. Needs the extra
`browser`, and chromium from the system.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from nanoengine.bench.simulator import make_scheduler, simulate
from nanoengine.bench.workload import Scale, random_workload
from nanoengine.observe.trace import Trace
from nanoengine.observe.trace_reader import read_trace
from nanoengine.observe.viewer.page import packed, page
from nanoengine.observe.viewer.page_data import page_data

COUNT_FRAMES = """async (seconds) => {
    let frames = 0, longest = 0, last = performance.now();
    const start = last;
    while (last - start < 1000 * seconds) {
        await new Promise(requestAnimationFrame);
        const now = performance.now();
        longest = Math.max(longest, now - last); last = now; frames++;
    }
    return [1000 * frames / (last - start), longest];
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("/tmp/viewer_speed"))
    parser.add_argument("--num-requests", type=int, default=4500)
    parser.add_argument("--num-blocks", type=int, default=100_001)
    parser.add_argument("--page", type=Path, help="measure this page, and simulate nothing")
    args = parser.parse_args()
    html = args.page or written(args.out, args.num_requests, args.num_blocks)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        measure(browser.new_page(viewport={"width": 1440, "height": 900}), html)
        browser.close()


def written(folder: Path, num_requests: int, num_blocks: int) -> Path:
    """The page of a simulated run; an existing trace is reused."""
    folder.mkdir(parents=True, exist_ok=True)
    trace, html = folder / "large.trace.gz", folder / "large.html"
    if not trace.exists():
        simulated(trace, num_requests, num_blocks)
    start = time.perf_counter()
    recording = read_trace(trace)
    read_s = time.perf_counter() - start
    data = page_data(recording, title=trace.name)
    html.write_text(page(data), encoding="utf-8")
    print(
        f"{data.meta['frames']:,} frames, {len(data.columns['events']) // 3:,} events,"
        f" {recording.header['layout']['num_blocks']:,} blocks, {len(data.meta['lanes']):,} lanes;"
        f" trace {trace.stat().st_size / 1e6:.1f} MB, page {html.stat().st_size / 1e6:.1f} MB of"
        f" which data {len(packed(data)) * 4 / 3 / 1e6:.1f} MB"
    )
    print(f"written in {time.perf_counter() - start:.1f} s, of which read {read_s:.1f} s")
    return html


def simulated(path: Path, num_requests: int, num_blocks: int) -> None:
    """Traces a run of the benchmark's standard workload, without a model."""
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=16)
    work = random_workload(Scale(num_requests))
    with Trace(path, scheduler) as trace:
        report = simulate(work, scheduler, trace=trace)
    print(f"simulated {report.steps:,} steps in {report.wall_s:.0f} s")


def measure(tab: Page, html: Path) -> None:
    """Prints the speed of the page."""
    start = time.perf_counter()
    tab.goto(html.as_uri())
    tab.wait_for_selector("html[data-ready]", timeout=60_000)
    tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    print(f"first paint after {time.perf_counter() - start:.2f} s")
    tab.evaluate("viewer.setFrame(Math.floor(viewer.state.view[1] / 2))")
    for speed in ("30", "500"):
        tab.select_option("#speed", speed)
        tab.click("#play")
        show(tab, f"playing {speed} steps a second")
        tab.click("#play")
    for name, selector in (("blocks", "#pool canvas"), ("lanes", "#lanes")):
        box = tab.locator(selector).bounding_box()
        assert box is not None
        frames = tab.evaluate_handle(f"() => {{ window.counting = ({COUNT_FRAMES})(2.5); }}")
        until = time.perf_counter() + 2.4
        step = 0
        while time.perf_counter() < until:
            step += 1
            x, y = box["x"] + 80 + step * 7 % (box["width"] - 90), box["y"] + 20 + step % 200
            tab.mouse.move(x, y)
        frames.dispose()
        rate, longest = tab.evaluate("window.counting")
        print(f"hovering over {name}: {rate:.0f} frames/s, longest {longest:.0f} ms")
    for name, code in (
        ("a jump to another end of the run", "viewer.setFrame(i % 2 ? 10 : 1e9)"),
        ("a step back", "viewer.setFrame(viewer.state.frame - 1)"),
        ("choosing a lane", "document.getElementById('lanes').dispatchEvent("
         "new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true}))"),
        ("zooming", "document.getElementById(i % 2 ? 'in' : 'out').click()"),
    ):  # fmt: skip
        took = tab.evaluate(
            f"() => {{ const t = performance.now(); for (let i = 0; i < 20; i++) {code};"
            " return (performance.now() - t) / 20 }"
        )
        print(f"{name}: {took:.1f} ms")


def show(tab: Page, what: str) -> None:
    rate, longest = tab.evaluate(COUNT_FRAMES, 3)
    print(f"{what}: {rate:.0f} frames/s, longest {longest:.0f} ms")


if __name__ == "__main__":
    main()

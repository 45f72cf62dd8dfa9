"""Pictures for the docs: `make images` records a run of the demo model and draws it again.

The run has an example of everything that a page shows: prompts with a common passage, two samples
of one prompt, chunks, a pool that is too small for all, and a tier. Its times are from the machine
that drew it. Needs the extra `browser`, and chromium from the system.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Why one thread: on a busy machine two would wait for each other, which the picture would show.
os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}

from example import PASSAGE, QUESTIONS  # noqa: E402
from nanoengine import LLM, HostTier, SamplingParams  # noqa: E402
from nanoengine.assets import demo_model_path  # noqa: E402
from nanoengine.cli.main import main as nanoengine  # noqa: E402
from tests.support.browser import start_chromium  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MAX_IMAGE_BYTES = 200_000
SHOTS = {
    # name: width, height, dark, fragment of the address, and actions after loading
    "viewer": (1440, 900, False, "#step=11&block=2", ""),
    "viewer-dark": (1440, 900, True, "#step=62&sequence=4", ""),
    "viewer-phone": (390, 844, False, "#step=62", "side.scrollIntoView()"),
}  # fmt: skip


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        trace, html = Path(folder) / "demo.trace.gz", Path(folder) / "demo.html"
        record(trace)
        if nanoengine(["viz", str(trace), "-o", str(html)]):
            sys.exit("no page was written")
        browser = start_chromium(playwright)
        if isinstance(browser, str):
            sys.exit(browser)
        for name in SHOTS:
            shoot(browser, html, name)
        browser.close()


def record(trace: Path) -> None:
    """A run of twelve requests in a pool for about four of them."""
    options: dict[str, Any] = {
        "block_size": 16, "num_kv_blocks": 29, "max_num_seqs": 6, "max_num_batched_tokens": 96,
        "kv_tiers": [HostTier(gib=0.002)], "admission": "watermark",
    }  # fmt: skip
    with LLM(demo_model_path(), **options) as llm:
        llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)  # compiles kernels
    with LLM(demo_model_path(), trace=trace, **options) as llm:
        questions = [f"{PASSAGE}\n\nQuestion: {question}\nAnswer:" for question in QUESTIONS]
        stories = [f"Once upon a time, there was a little {name}" for name in
                ("fox", "bear", "rabbit", "owl", "mouse", "cat")]  # fmt: skip
        params = [SamplingParams(temperature=0, max_tokens=96)] * 12
        params[3] = SamplingParams(n=2, temperature=0.8, seed=7, max_tokens=72)
        prompts = [one for pair in zip(stories, questions, strict=True) for one in pair]
        llm.generate(prompts, params, use_tqdm=False)


def shoot(browser: Browser, html: Path, name: str) -> None:
    """Writes one picture."""
    width, height, dark, fragment, code = SHOTS[name]
    tab = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
    )
    tab.goto(html.as_uri() + fragment)
    tab.wait_for_selector("html[data-ready]")
    if code:
        tab.evaluate(code)
    tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    path = IMAGES / f"{name}.png"
    tab.screenshot(path=path)
    tab.close()
    size = path.stat().st_size
    if size > MAX_IMAGE_BYTES:
        sys.exit(f"{path} has {size:,} bytes, more than {MAX_IMAGE_BYTES:,}")
    print(f"{path.relative_to(ROOT)}: {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()

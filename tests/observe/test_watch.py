"""The display of `--watch`, and where it is refused."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from nanoengine.cli import main as cli
from nanoengine.observe import watch
from nanoengine.observe.watch import Watch
from nanoengine.settings.params import SamplingParams
from tests.support.fake_executor import make_engine, run


def test_watch_draws_the_pool_lanes_and_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "REFRESH_S", 0.0)
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100, height=12, color_system=None)
    engine = make_engine(num_blocks=17, block_size=4, max_num_seqs=2)
    shown = Watch(lambda: "[red]title", console=console)
    engine.observers.append(shown)
    for name in ("a", "bb", "[bold]c"):
        params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
        engine.add_request(name, [len(name), 2, 3, 4, 5, 6], params)
    run(engine)
    engine.close()
    text = drawn.getvalue()
    assert "step 0: [red]title" in text, "the title was parsed as markup"
    assert "0████············" in text
    assert "· 12 empty   ▒ 0 cached   █ 4 active" in text
    assert "request a" in text and "prompt 6 of 6, output 1 of 8, 2 blocks" in text
    assert "waiting 1: sequence 2 first, because max_num_seqs" in text
    assert "request [bold]c" in text
    assert "▒" in text, "blocks of the first two requests are cached"


def test_a_large_pool_and_a_long_list_are_shortened() -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100, height=10, color_system=None)
    engine = make_engine(num_blocks=1601, block_size=4, max_num_seqs=30)
    shown = Watch(lambda: "x", console=console)
    engine.observers.append(shown)
    for number in range(30):
        engine.add_request(str(number), [number], SamplingParams(max_tokens=2))
    engine.step()
    engine.close()
    text = drawn.getvalue()
    assert "one block of 5 is drawn" in text
    assert "and 29 more" in text
    assert text.partition("and 29 more")[0].count("request ") == 1


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_watch_without_a_terminal_raises(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "rows.txt"
    source.write_text("the dog\n", encoding="utf-8")
    rest = ["--prompt", "a"] if command == "generate" else [str(source), "--output", "-"]
    assert cli.main([command, "/no/such/model", *rest, "--watch"]) == 2
    assert capsys.readouterr().err == (
        "error: --watch needs a terminal, but stderr is not one: remove --watch\n"
    )


@pytest.mark.guards("nanoengine/observe/watch.py", "nanoengine/cli/generate.py")
def test_on_a_terminal_the_picture_goes_and_the_answer_stays(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    prompts = ["--prompt", "Once upon a time", "--prompt", "The dog", "--max-tokens", "40"]
    command = [sys.executable, "-m", "nanoengine.cli.main", "generate", "demo", "--watch", *prompts]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    assert process.stdout is not None
    drawn = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the terminal has no writer left
            break
        if not piece:
            break
        drawn += piece
    records = process.stdout.read().splitlines()
    assert process.wait() == 0 and len(records) == 2
    text = drawn.decode()
    assert "prompts are left" in text and "request 0" in text and "█" in text
    os.close(ours)

"""`nanoengine chat`: turns, commands, and an answer that is stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.cli import main as cli
from nanoengine.cli.chat import Chat
from tests.support.checkpoints import make_checkpoint
from tests.support.text_fixtures import CHAT_TEMPLATE, byte_level

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "llama", vocab_size=len(byte_level().backend))
    byte_level().backend.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    with LLM(directory, device="cpu", attention_backend="naive", num_kv_blocks=64) as llm:
        yield llm


def lines(*texts: Any) -> Callable[[str], str]:
    """What a person types; an exception is raised in its place."""
    typed = iter(texts)

    def read(prompt: str) -> str:
        line = next(typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return str(line)

    return read


def test_turns_follow_each_other_and_the_cache_stays_warm(llm: LLM, capsys: Any) -> None:
    before = llm.stats().cache_hit_tokens
    chat = Chat(llm, GREEDY, "be kind " * 8, lines("the dog and the little girl", "", "and then"))
    chat.run()
    assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 2]
    shown = capsys.readouterr().out.splitlines()
    assert shown == "\n".join(m["content"] for m in chat.messages[2::2]).splitlines()
    (alone,) = llm.chat(chat.messages[:4], GREEDY, use_tqdm=False)
    assert alone.outputs[0].text == chat.messages[4]["content"]
    assert llm.stats().cache_hit_tokens - before > 40


def test_commands(llm: LLM, capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    chat = Chat(llm, GREEDY, None, lines(
        "hi", f"/save {path}", "/stats", "/sytem x", "/system be short", "/save", "/save /no/x",
        "go", "/reset", "/quit", "never read",
    ))  # fmt: skip
    chat.run()
    saved = json.loads(path.read_text())["messages"]
    assert [m["role"] for m in saved] == ["user", "assistant"]
    shown = capsys.readouterr().out
    assert "prompt tokens computed" in shown
    assert "unknown command '/sytem'; did you mean '/system'?" in shown
    assert "/save needs the name of a file" in shown
    assert "/no/x can't be written: No such file or directory" in shown
    assert chat.messages == [{"role": "system", "content": "be short"}]


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(llm: LLM, capsys: Any) -> None:
    class Interrupting:
        """Ctrl-C in the fourth step."""

        steps = 0

        def on_step(self, plan: object, result: object, scheduler: object) -> None:
            self.steps += 1
            if self.steps == 4:
                raise KeyboardInterrupt

    chat = Chat(llm, GREEDY, None, lines("the dog", KeyboardInterrupt(), "and then"))
    observer = Interrupting()
    llm.engine.observers.append(observer)
    try:
        chat.run()
    finally:
        llm.engine.observers.remove(observer)
    assert "[stopped]" in capsys.readouterr().out
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    assert len(chat.messages[1]["content"]) < len(chat.messages[3]["content"])


def test_an_error_is_told_and_the_turn_taken_back(llm: LLM, capsys: Any) -> None:
    chat = Chat(llm, GREEDY, None, lines("hi", "long " * 3000, "go"))
    chat.run()
    assert "error: prompt 0: " in capsys.readouterr().out
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2


def test_options_are_checked_before_the_model_loads(capsys: Any) -> None:
    assert cli.main(["chat", "/no/model", "--n", "2"]) == 2
    assert "error: --n must be 1" in capsys.readouterr().err
    assert cli.main(["chat", "/no/model", "--top-p", "7"]) == 2
    assert "error: top_p must be in (0, 1], got 7" in capsys.readouterr().err

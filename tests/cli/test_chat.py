"""`nanoengine chat`: turns, commands, and interrupting an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.cli.chat import HELP, Chat
from nanoengine.jobs.progress import CUT
from tests.support.text_fixtures import text_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = text_checkpoint(tmp_path_factory.mktemp("model"))
    with LLM(directory, device="cpu", attention_backend="naive", num_kv_blocks=64) as llm:
        yield llm


@pytest.fixture
def talk(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Chat]:
    """Returns a function that runs a chat on scripted input; exceptions in the input are raised."""

    def talk(*typed: Any, system: str | None = None) -> Chat:
        lines = iter(typed)

        def read(prompt: str) -> str:
            line = next(lines, EOFError())
            if isinstance(line, BaseException):
                raise line
            return str(line)

        monkeypatch.setattr("builtins.input", read)
        chat = Chat(llm, GREEDY, system)
        chat.run()
        return chat

    return talk


def test_later_turns_hit_the_prefix_cache(llm: LLM, talk: Callable[..., Chat], capsys: Any) -> None:
    before = llm.stats().cache_hit_tokens
    chat = talk("the dog and the little girl", "", "and then", system="be kind " * 8)
    assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 2]
    shown = capsys.readouterr().out
    assert shown.count(f" [{CUT}]\n") == 2
    answers = "\n".join(m["content"] for m in chat.messages[2::2]).splitlines()
    assert shown.replace(f" [{CUT}]", "").splitlines() == answers
    (expected,) = llm.chat(chat.messages[:4], GREEDY, use_tqdm=False)
    assert expected.outputs[0].text == chat.messages[4]["content"]
    assert llm.stats().cache_hit_tokens - before > 40


def test_chat_commands_change_the_conversation(talk: Callable[..., Chat], capsys: Any) -> None:
    chat = talk(
        "/help", "hi", "/sytem x", "/system be short", "go", "/reset", "/quit", "never read"
    )
    shown = capsys.readouterr().out
    assert shown.startswith(HELP + "\n")
    assert f"unknown command '/sytem'; the commands are:\n{HELP}\n" in shown
    assert chat.messages == [{"role": "system", "content": "be short"}]


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(
    llm: LLM, talk: Callable[..., Chat], capsys: Any
) -> None:
    class Interrupting:
        """Raises KeyboardInterrupt in the fourth step."""

        steps = 0

        def on_step(self, plan: object, result: object, scheduler: object) -> None:
            self.steps += 1
            if self.steps == 4:
                raise KeyboardInterrupt

    observer = Interrupting()
    llm.engine.observers.append(observer)
    try:
        chat = talk("the dog", KeyboardInterrupt(), "and then")
    finally:
        llm.engine.observers.remove(observer)
    assert "[stopped]" in capsys.readouterr().out
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    assert len(chat.messages[1]["content"]) < len(chat.messages[3]["content"])


def test_an_error_is_printed_and_its_turn_is_removed(
    talk: Callable[..., Chat], capsys: Any
) -> None:
    chat = talk("hi", "long " * 3000, "go")
    assert "error: prompt 0: " in capsys.readouterr().out
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2

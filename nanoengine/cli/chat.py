"""`nanoengine chat`: a conversation in the terminal, streamed, with prefix cache hits.

/system TEXT   start over with this system message
/reset         start over
/help          show these lines
/quit          exit, as Ctrl-D does; Ctrl-C stops an answer and keeps the text so far
"""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nanoengine.cli.options import EngineArgs, SamplingArgs, engine_options, sampling_fields
from nanoengine.errors import ConfigError, NanoEngineError
from nanoengine.jobs.manifest import sampling_line
from nanoengine.jobs.progress import CUT
from nanoengine.text.chat_template import CHATS

if TYPE_CHECKING:
    from nanoengine.llm import LLM
    from nanoengine.settings.params import SamplingParams

HELP = (__doc__ or "").partition("\n\n")[2].rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatArgs(EngineArgs):
    """A conversation with a model; /help shows its commands.

    examples:
      nanoengine chat demo
      nanoengine chat Qwen/Qwen3-0.6B --system "Answer in one sentence." --temperature 0.6
      nanoengine chat Qwen/Qwen3-0.6B --quantization int4 --max-tokens 2000

    Attributes:
        system: System message of the conversation.
    """

    sampling: SamplingArgs = field(default_factory=SamplingArgs)  # type: ignore[valid-type]
    system: str | None = None


def main(args: ChatArgs) -> None:
    """Runs a conversation until the end of the input."""
    sampling = sampling_fields(args.sampling)
    if sampling.get("n", 1) != 1:
        raise ConfigError(f"--n must be 1 in a conversation, got {sampling['n']}")
    with suppress(ImportError):
        import readline  # noqa: F401  # adds line editing and history

    print(f"loading {args.model} ...", file=sys.stderr)
    CHATS.begin()  # Why here: the process starts while the model loads.
    from nanoengine.llm import LLM

    with LLM(**engine_options(args)) as llm:
        if not llm.tokenizer.chat_template:
            raise ConfigError(f"model {args.model!r} has no chat template: give --chat-template")
        print(f"{args.model}: {llm.info.num_parameters:,} parameters\n{HELP}", file=sys.stderr)
        sampling = {"max_tokens": None} | sampling
        print("sampling:", sampling_line(llm.config, llm.info, sampling), file=sys.stderr)
        Chat(llm, replace(llm.default_sampling_params, **sampling), args.system).run()


@dataclass
class Chat:
    """One conversation."""

    llm: LLM
    params: SamplingParams
    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list, init=False)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The system message, if there is one, and the messages so far."""
        system = {"role": "system", "content": self.system}
        return self.turns if self.system is None else [system, *self.turns]

    def run(self) -> None:
        """Reads lines and answers them. Ctrl-C at the prompt clears the line."""
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                continue
            if line == "/quit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _answer(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})
        answer, end = "", ""
        try:
            prompt = {"messages": self.messages}
            with closing(self.llm.stream(prompt, self.params, kind="delta")) as outputs:
                for output in outputs:
                    print(output.outputs[0].text, end="", flush=True)
                    answer += output.outputs[0].text
            end = f" [{CUT}]" * (output.outputs[0].finish_reason == "length")
        except KeyboardInterrupt:
            end = " [stopped]"
        except NanoEngineError as error:
            answer, end = "", f"error: {error}"
        print(end)
        if answer:
            self.turns.append({"role": "assistant", "content": answer})
        else:
            self.turns.pop()

    # --- commands -------------------------------------------------------------------------------

    def _command(self, line: str) -> None:
        match line.split(maxsplit=1):
            case ["/system" | "/reset" as name, *rest]:
                if name == "/system":
                    self.system = rest[0] if rest else None
                self.turns.clear()
            case [name, *_]:
                error = "" if name == "/help" else f"unknown command {name!r}; the commands are:\n"
                print(error + HELP)

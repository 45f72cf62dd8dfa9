"""NanoEngineLM: the engine as a model of lm-evaluation-harness, for scores on its tasks.

    task ── Instances ── NanoEngineLM ── LLM.generate ── scores, texts ── metrics
                         (this file)

The harness sends two kinds of requests. A *log-likelihood* request asks for the likelihood of a
continuation after a context. Both are one prompt here, scored from the first continuation token on,
so that the choices of one question share the blocks of its context. A *generation* request asks for
text up to a stop string.

Only this file imports lm_eval; `run` passes `nanoengine eval` to its command line.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

# Why: otherwise the harness's datasets library would report each use of a local file online.
os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
try:
    # Why first: registering a model before the harness's own models would hide those.
    import lm_eval.models  # noqa: F401
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    from nanoengine.errors import MissingDependencyError

    raise MissingDependencyError(
        "evaluation needs lm-evaluation-harness 0.4.13 or newer: pip install 'nanoengine[eval]'"
    ) from error

from nanoengine.errors import ConfigError, RequestError
from nanoengine.llm import LLM
from nanoengine.outputs import RequestOutput
from nanoengine.settings.checks import quoted
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.vllm_names import warn_no_effect

__all__ = ["NanoEngineLM"]

SHARED_BLOCK = 16
"""Default block size [tokens]: choices share only blocks that lie entirely in the context. Perf:
docs/evaluation.md has the times of this size and of the CPU backend's default, 64."""

MAX_GEN_TOKS = 256
"""Longest answer [tokens] of a task without a limit, as in the harness's `hf` model."""


@register_model("nanoengine")
class NanoEngineLM(TemplateLM):
    """An `LLM` with the harness's interface.

    Args:
        pretrained: directory of a checkpoint, or a hub id; the name is the harness's.
        max_length: longest input [tokens]; longer ones lose their beginning. None: the model's
            context, minus the token to predict and the one that a request must generate.
        batch_size, max_batch_size: accepted for the harness's command line; the engine batches up
            to `max_num_seqs` requests by itself.
        options: the fields of `EngineConfig`; `block_size` defaults to SHARED_BLOCK.

    Raises:
        ConfigError: a value has another type or is out of range.

    Source: the interface of lm-evaluation-harness 0.4.13 (api/model.py).
    """

    def __init__(
        self,
        pretrained: str,
        *,
        max_length: int | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name, value in (("max_length", max_length), ("max_gen_toks", max_gen_toks)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be an integer of at least 1, got {quoted(value)}")
        if options.get("attention_backend") != "flash_attn":  # Its blocks have 256 tokens.
            options.setdefault("block_size", SHARED_BLOCK)
        if str(batch_size) != "1" and not str(batch_size).startswith("auto"):
            warn_no_effect(f"batch_size={batch_size} (max_num_seqs limits what runs together)")
        self.llm = LLM(pretrained, **options)
        self.tokenizer = self.llm.get_tokenizer()
        longest = self.llm.info.max_model_len - 2
        self.max_length = longest if max_length is None else min(max_length, longest)
        self.max_gen_toks = max_gen_toks

    # --- tokens -------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self.llm.info.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token of an empty context: the tokenizer's BOS, else its EOS."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer in the harness's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; None adds no BOS if the text begins with it."""
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token
            add_special_tokens = not (begin and string.startswith(begin))
        return self.llm.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as one text."""
        return self.llm.tokenizer.render_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    # --- requests -----------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Per continuation: its log-likelihood, and whether greedy decoding generates it."""
        prompts = [(context + after)[-self.max_length - 1 :] for _, context, after in requests]
        params = [
            SamplingParams(
                max_tokens=0,
                detokenize=False,
                prompt_logprobs=0,
                prompt_logprobs_start=max(len(token_ids) - len(after), 1),
            )
            for token_ids, (_, _, after) in zip(prompts, requests, strict=True)
        ]
        answers = []
        outputs = self._run(prompts, params, disable_tqdm)
        for (texts, *_), output in zip(requests, outputs, strict=True):
            pairs = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
            scored = [found[token_id] for token_id, found in pairs if found is not None]
            answer = sum(one.logprob for one in scored), all(one.rank == 1 for one in scored)
            answers.append(answer)
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts, in windows of `max_length` if they are longer."""
        windows, counts = [], []
        for request in requests:
            pairs = get_rolling_token_windows(
                self.tok_encode(*request.args), self.prefix_token_id, self.max_length, context_len=1
            )
            found = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += found
            counts.append(len(found))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        answers = [sum(score for score, _ in islice(scores, count)) for count in counts]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a stop string."""
        asked = [request.args for request in requests]
        params = [self._sampling_params(options) for _, options in asked]
        prompts = [
            self.tok_encode(context)[one.max_tokens - self.max_length :]
            for (context, _), one in zip(asked, params, strict=True)
        ]
        answers = [output.outputs[0].text for output in self._run(prompts, params, disable_tqdm)]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _sampling_params(self, options: dict[str, Any]) -> SamplingParams:
        """Converts a task's `generation_kwargs` to SamplingParams; unknown ones are errors."""
        given = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        if not given.pop("do_sample", False):
            given["temperature"] = 0.0
        max_tokens, stop = given.pop("max_gen_toks"), filter(None, given.pop("until", []))
        if max_tokens >= self.max_length:
            raise RequestError(
                f"max_gen_toks={max_tokens} must be below max_length={self.max_length}, because the"
                " prompt needs at least one token"
            )
        try:
            return SamplingParams(max_tokens=max_tokens, stop=list(stop), **given)
        except TypeError as error:
            raise RequestError(f"generation_kwargs: {error}") from error

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], disable_tqdm: bool
    ) -> list[RequestOutput]:
        """Runs prompts of token ids, sorted so that common prefixes are consecutive."""
        order = sorted(range(len(prompts)), key=prompts.__getitem__)
        outputs = self.llm.generate(
            [prompts[i] for i in order], [params[i] for i in order], use_tqdm=not disable_tqdm
        )
        if wrong := next(filter(None, (output.error for output in outputs)), None):
            raise RequestError(wrong)
        return [output for _, output in sorted(zip(order, outputs, strict=True), key=itemgetter(0))]


# --- the command ----------------------------------------------------------------------------------


def run(model: str, options: Sequence[str]) -> int:
    """Runs the harness's `run` command on this model; returns the exit status.

    Raises:
        ConfigError: an option is invalid, or the harness refuses one.
    """
    _check(options)
    sys.argv = ["lm-eval", "run", "--model", "nanoengine", "--model_args", f"pretrained={model}"]
    sys.argv += ["--device", "auto", *options]  # Why: the harness defaults to a GPU.
    try:
        cli_evaluate()
    except ValueError as error:
        raise ConfigError(f"lm-eval: {error}") from error
    return 0


def _check(args: Sequence[str]) -> None:
    """Checks in advance what the harness checks after loading a model, or at the end.

    Raises:
        ConfigError: --limit leaves no question, or the results can't be written.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--limit", "-L", type=float)
    parser.add_argument("--output_path", "-o", type=Path)
    try:
        given, _ = parser.parse_known_args(list(args))
    except argparse.ArgumentError:  # The harness reports it.
        return
    if given.limit is not None and not given.limit > 0:
        raise ConfigError(
            "--limit must be a number of questions, or a share of them below 1: greater than 0, got"
            f" {given.limit:g}"
        )
    if given.output_path is None:
        return
    folder = given.output_path.parent if given.output_path.suffix else given.output_path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--output_path {str(given.output_path)!r} can't be written: {error.strerror}"
        ) from error

"""compare: how much the next-token distributions of two models differ.

    REFERENCE ── logits [T, V] ──┐
                                 ├── KL, same best token, perplexity, worst positions
    MODEL ────── logits [T, V] ──┘

Two engines run on the same tokens, one text at a time, so the logits of a whole run are not kept.
The logits are the ones of prompt log-probabilities: the engine computes them with its KV cache and
its kernels. KL is sum(p log(p / q)) over the whole vocabulary [nats]; p is the reference's.

Legend: T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from nanoengine.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from nanoengine.llm import LLM

WORST = 5
"""Number of positions with the largest KL that are shown."""
LOSSY = 0.01
"""A model with a larger mean KL [nats] is called lossy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareArgs:
    """Compares the next-token distributions and greedy answers of models with a reference.

    Settings of the engine follow a path after `@`, as in `model@quantization=int4`. The reference
    computes in float32 with the weights as they are stored, unless its settings say otherwise.

    examples:
      nanoengine compare ./model ./model@quantization=int8 model-Q4_K_M.gguf
      nanoengine compare model.gguf model.gguf model.gguf@kv_cache_dtype=int8 --texts rows.jsonl

    Attributes:
        reference: A checkpoint or a GGUF file.
        models: The models to compare, one after the other; they must have the same tokens.
        texts: Files of texts, as in `nanoengine batch`: .txt, .jsonl, .csv, .parquet. By default,
            20 texts that come with the package.
        max_length: Number of tokens to compare per text.
        answer_tokens: Greedy tokens that continue each text; an answer with any other token counts
            as changed. 0: none.
        json: Write all figures to this file.
    """

    reference: Annotated[Positional[str], arg(metavar="REFERENCE")]
    models: Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL...")]
    texts: tuple[str, ...] = ()
    max_length: int = 256
    answer_tokens: int = 32
    json: Path | None = None


@dataclass(kw_only=True)
class Comparison:
    """Figures of one model compared with the reference, summed over texts."""

    model: str
    kl: list[float] = field(default_factory=list)
    same: int = 0
    nll: float = 0.0
    reference_nll: float = 0.0
    changed: int = 0
    answers: int = 0
    worst: list[dict[str, Any]] = field(default_factory=list)

    def add(self, text: int, ids: list[int], p: torch.Tensor, q: torch.Tensor) -> None:
        """Adds the positions of a text.

        Args:
            text: number of the text.
            ids: its T tokens.
            p, q: logits of the reference and of the model, [T - 1, V].
        """
        import torch

        # Why the smaller vocabulary: some files pad it with entries that are not tokens.
        size = min(p.shape[1], q.shape[1])
        p, q = (x[:, :size].double().log_softmax(1) for x in (p, q))
        kl, targets = (p.exp() * (p - q)).nan_to_num_(0).sum(1), torch.tensor(ids[1:])[:, None]
        best, found = p.argmax(1), q.argmax(1)
        self.kl += kl.tolist()
        self.same += int((best == found).sum())
        self.reference_nll -= float(p.gather(1, targets).sum())
        self.nll -= float(q.gather(1, targets).sum())
        for at in kl.topk(min(WORST, len(kl))).indices.tolist():
            tokens = {"reference": int(best[at]), "model": int(found[at])}
            self.worst.append({"text": text, "position": at, "kl": float(kl[at]), "best": tokens})
        self.worst = sorted(self.worst, key=lambda one: -one["kl"])[:WORST]

    def figures(self) -> dict[str, Any]:
        """All figures, as `--json` writes them."""
        count, ordered = len(self.kl), sorted(self.kl)
        return {
            "model": self.model,
            "positions": count,
            "kl_mean": sum(ordered) / count,
            "kl_median": ordered[count // 2],
            "kl_95": ordered[int(0.95 * count)],
            "kl_max": ordered[-1],
            "same_best_token": self.same / count,
            "perplexity": math.exp(self.nll / count),
            "perplexity_ratio": math.exp((self.nll - self.reference_nll) / count),
            "answers_changed": self.changed,
            "answers": self.answers,
            "worst": self.worst,
        }


def main(args: CompareArgs) -> None:
    """Runs the command and prints a table.

    Raises:
        ConfigError: there are no texts, models have other tokens, or an option is invalid.
    """
    from nanoengine.bench import throughput

    if args.max_length < 2 or args.answer_tokens < 0:
        raise ConfigError("--max-length must be at least 2 and --answer-tokens at least 0")
    throughput.require_directory(args.json, "json")
    found = []
    with _open(args.reference, args, is_reference=True) as reference:
        prompts = list(_prompts(args.texts))
        texts = [ids for one in prompts if len(ids := _tokens(reference, one, args)) > 1]
        if not texts:
            raise ConfigError("no text has two or more tokens: there is nothing to compare")
        answers = _answers(reference, texts, args.answer_tokens)
        print(_line(COLUMNS, "model"))
        for name in args.models:
            with _open(name, args) as model:
                if [_tokens(model, one, args) for one in prompts[:WORST]] != texts[:WORST]:
                    raise ConfigError(f"{name} has other tokens than {args.reference}")
                one = Comparison(model=name)
                for i, ids in enumerate(texts):
                    one.add(i, ids, _logits(reference, ids), _logits(model, ids))
                theirs = _answers(model, texts, args.answer_tokens)
                one.changed = sum(map(list.__ne__, answers, theirs))
                one.answers = len(answers)
            figures = one.figures()
            found.append(figures)
            name += " (lossy: mean KL above 0.01)" * (figures["kl_mean"] > LOSSY)
            print(_line((cell.format(**figures) for cell in COLUMNS.values()), name), flush=True)
        for figures in found:
            print(_worst(figures, texts, reference))
    if args.json is not None:
        from nanoengine.version import versions

        report = {"reference": args.reference, "versions": versions(), "models": found}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _open(name: str, args: CompareArgs, *, is_reference: bool = False) -> Iterator[LLM]:
    """Loads the model of a `PATH@key=value,...`; the default settings keep both engines small."""
    from nanoengine.assets import demo_model_path
    from nanoengine.checkpoint.config import load_model_config
    from nanoengine.checkpoint.find import resolve_model
    from nanoengine.llm import LLM
    from nanoengine.settings.config import EngineConfig
    from nanoengine.settings.files import is_gguf

    path, at, settings = name.rpartition("@")
    if not at or "=" not in settings:
        path, settings = name, ""
    path = str(demo_model_path()) if path == "demo" else path
    options: dict[str, Any] = {
        "max_num_seqs": 8, "kv_cache_gib": 0.5,
        "max_model_len": args.max_length + args.answer_tokens + 1,
    }  # fmt: skip
    if is_reference:
        options["dtype"] = "float32"
        file = resolve_model(EngineConfig.from_kwargs(model=path))
        if is_gguf(file) and load_model_config(file).quantization is not None:
            options["quantization"] = "gguf_weight_only"
    for setting in filter(None, settings.split(",")):
        key, _, text = setting.partition("=")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    with LLM(path, **options) as llm:
        yield llm


def _prompts(files: Sequence[str]) -> Iterator[Any]:
    """The prompts of files, or of the package's texts, in the forms of `LLM.generate`.

    Raises:
        ConfigError: a file can't be used.
        RequestError: a row has no prompt.
    """
    from nanoengine.assets import texts_path
    from nanoengine.jobs.job import JobOptions, tasks_of
    from nanoengine.jobs.rows import RowReader, Task
    from nanoengine.jobs.source import find_inputs

    options = JobOptions(inputs=tuple(files) or (str(texts_path()),), output="-")
    for task in tasks_of(find_inputs(options.inputs), options, RowReader(options)):
        if isinstance(task, Task):
            if task.error is not None:
                raise task.error
            yield task.prompt


def _tokens(llm: LLM, prompt: Any, args: CompareArgs) -> list[int]:
    """The first tokens of a prompt; the model's chat template renders a conversation."""
    from nanoengine.text.chats import Chats
    from nanoengine.text.prompt_forms import parse_prompt, template_options

    given, tokenizer = parse_prompt(prompt), llm.tokenizer
    ids = given.get("prompt_token_ids")
    if ids is None and "messages" in given:
        text = Chats(tokenizer).render(given["messages"], template_options(given))
        ids = tokenizer.encode(text, add_special_tokens=False)
    elif ids is None:
        ids = tokenizer.encode(given.get("prompt") or "")
    return ids[: args.max_length]


def _logits(llm: LLM, ids: list[int]) -> torch.Tensor:
    """The logits after each token except the last, [T - 1, V], as the engine scores a prompt."""
    import torch

    from nanoengine.observe.hooks import Hooks
    from nanoengine.runner.sampling import logprobs
    from nanoengine.settings.params import SamplingParams

    found: list[torch.Tensor] = []

    def keep(call: Any, logits: torch.Tensor, *more: Any) -> Any:
        found.append(logits.cpu().clone())
        return call(logits, *more)

    hooks = Hooks((logprobs, "token_logprobs", keep))
    try:
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
        llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    finally:
        hooks.remove()
    if sum(map(len, found)) != len(ids) - 1:
        raise ConfigError("compare does not support tensor_parallel_size: remove it")
    return torch.cat(found)


def _answers(llm: LLM, texts: list[list[int]], count: int) -> list[list[int]]:
    """The greedy continuations of texts, as token ids."""
    from nanoengine.settings.params import SamplingParams

    if not count:
        return []
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in texts]
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]


COLUMNS = {
    "KL mean": "{kl_mean:.5f}", "KL 95 %": "{kl_95:.5f}", "KL max": "{kl_max:.3f}",
    "same best token": "{same_best_token:.1%}", "perplexity": "{perplexity:.3f}",
    "ratio": "{perplexity_ratio:.4f}", "answers changed": "{answers_changed} of {answers}",
}  # fmt: skip


def _line(cells: Iterable[str], name: str) -> str:
    widths = (len(title) + 2 for title in COLUMNS)
    return "".join(map(str.rjust, cells, widths)) + f"  {name}"


def _worst(figures: dict[str, Any], texts: list[list[int]], llm: LLM) -> str:
    """The positions with the largest KL, with the text before them and both best tokens."""
    decode = llm.tokenizer.decode
    lines = [f"\n{figures['model']}: {figures['positions']:,} positions; the largest KL"]
    for one in figures["worst"]:
        before = decode(texts[one["text"]][: one["position"] + 1])[-40:]
        best, other = (repr(decode([one["best"][name]])) for name in ("reference", "model"))
        best = best if best == other else f"{other} instead of {best}"
        lines.append(f"  {one['kl']:8.3f}  text {one['text'] + 1}, after {before!r}: {best}")
    return "\n".join(lines)

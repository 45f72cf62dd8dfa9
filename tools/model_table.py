"""Tries every causal model type of the installed transformers, and writes the table of
docs/models.md: python tools/model_table.py [TYPE ...]

For each type it makes a tiny random checkpoint with transformers, and compares the most likely
token at each position of three prompts: with the native model in float64, or, if there is none,
with transformers' modules under this engine, in chunks and in one batch. A type that transformers
can't configure in this size is listed as such. tests/docs/test_model_table.py compares the
committed table with the supported families.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanoengine import LLM, SamplingParams  # noqa: E402
from nanoengine.checkpoint.config import UnknownArchitectureError, parse_model_config  # noqa: E402
from nanoengine.checkpoint.families import TEXT_PARTS, every_family  # noqa: E402
from nanoengine.errors import NanoEngineError  # noqa: E402
from tests.support import checkpoints  # noqa: E402
from tests.support.model_helpers import all_logits, build, random_prompts  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
EQUAL, BY_TRANSFORMERS = "equal", "equal, by transformers' modules"
MAX_PARAMETERS = 30_000_000
NOT_RUN = "not tested: the tiny checkpoint "
BEGIN, END = "<!-- table: python tools/model_table.py -->", "<!-- end of the table -->"
SMALL = {
    **dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "zero_expert_num": 2,
    "index_n_heads": 4,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("intermediate_size_mlp", "ffn_hidden_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "index_head_dim", "index_topk"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "linear_head_dim", "swa_head_dim"), 16),
    "qk_rope_head_dim": 8,
    "linear_num_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "num_layers": 2,
    "sliding_window": 16,
}
"""Sizes of a type whose config class has this key, and which the tests have no family of."""
KNOWN = {
    getattr(transformers, kind).model_type: name for name, (kind, _) in checkpoints.EVERY.items()
}
KNOWN |= {"gpt-sw3": "gpt2"}
"""Model type -> the tests' family of it, whose config covers more features than common sizes do."""


def tried(model_type: str, architecture: str) -> str:
    """The result for a tiny checkpoint of this type: EQUAL, BY_TRANSFORMERS, or why not."""
    result, name = EQUAL, KNOWN.get(model_type, model_type)
    try:
        if name == model_type:
            config = transformers.AutoConfig.for_model(model_type)
            fields = {"pad_token_id": 0}
            fields |= {key: value for key, value in SMALL.items() if config.to_dict().get(key)}
            if not hasattr(config, "num_key_value_heads") or "kv_lora_rank" in fields:
                fields["num_key_value_heads"] = checkpoints.COMMON["num_attention_heads"]
            checkpoints.EVERY.setdefault(name, (type(config).__name__, fields))
        raw = checkpoints.make_config(name).to_dict()
    except Exception as error:  # whatever another library raises
        print(model_type, repr(error), file=sys.stderr)
        return "not tested: transformers makes no tiny checkpoint"
    try:
        raw |= {"architectures": [architecture]}
        parse_model_config(json.loads(json.dumps(raw, default=str)))
    except UnknownArchitectureError:
        result = BY_TRANSFORMERS
        checkpoints.EAGER += (name,)  # which every model has
    except NanoEngineError as error:
        return "refused: " + str(error).partition("; supported: ")[0].partition("; only ")[0]
    with tempfile.TemporaryDirectory() as directory:
        try:
            if result == BY_TRANSFORMERS:
                with torch.device("meta"):
                    config = checkpoints.make_config(name).get_text_config(decoder=True)
                    empty = transformers.AutoModelForCausalLM.from_config(config)
                if sum(p.numel() for p in empty.parameters()) > MAX_PARAMETERS:
                    return f"{NOT_RUN}has more than {MAX_PARAMETERS:,} parameters"
            reference = checkpoints.make_checkpoint(directory, name).to(torch.float64)
            prompts = random_prompts(40, 1, 23)
            with torch.inference_mode():
                logits = [reference(input_ids=torch.tensor([ids])).logits[0] for ids in prompts]
        except Exception as error:  # as above
            print(model_type, repr(error), file=sys.stderr)
            return f"{NOT_RUN}does not run in transformers"
        expected = torch.cat(logits)
        try:
            if result == EQUAL:
                found = all_logits(build(Path(directory), torch.float64), prompts).argmax(-1)
            else:
                found = most_likely(directory, prompts)
        except NanoEngineError as error:
            message = str(error).partition("; missing: ")[0].partition("; supported: ")[0]
            return "refused: " + message.rpartition("transformers' modules: ")[2]
    return result if torch.equal(found, expected.argmax(-1)) else "NOT EQUAL"


def most_likely(directory: str, prompts: list[list[int]]) -> torch.Tensor:
    """The most likely token after each token of each prompt, by transformers' modules."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    with LLM(
        directory, skip_tokenizer_init=True, dtype="float32", attention_backend="naive",
        max_model_len=64, max_num_seqs=4, kv_cache_gib=0.05, max_num_batched_tokens=24,
    ) as llm:  # fmt: skip
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
    best = []
    for output in outputs:
        for entries in output.prompt_logprobs[1:]:
            best.append(max(entries, key=lambda token: entries[token].logprob))
        best.append(output.outputs[0].token_ids[0])
    return torch.tensor(best)


def table(rows: dict[str, tuple[str, str]]) -> str:
    """Markdown of model type -> (architecture, result): the types with each result. Architectures
    are listed for equal types; an unsupported architecture is removed from its result."""
    types: dict[str, list[str]] = {"equal": []}
    for kind, (architecture, result) in rows.items():
        name = f"`{kind}` {architecture}" if result == "equal" else f"`{kind}`"
        types.setdefault(result.replace(f" '{architecture}'", ""), []).append(name)
    lines = [f"| {result} | {', '.join(names)} |" for result, names in types.items()]
    return "\n".join(["| result | model types |", "|---|---|", *lines])


def main() -> None:
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    names = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    names |= {kind: MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind] for kind in KNOWN
              if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}  # fmt: skip
    types = sys.argv[1:] or sorted(names)
    rows = {}
    for model_type in types:
        architecture = names[model_type]
        architecture = architecture if isinstance(architecture, str) else architecture[-1]
        rows[model_type] = (architecture, tried(model_type, architecture))
        print(model_type, *rows[model_type], flush=True)
    supported = {architecture for architecture, result in rows.values() if result == "equal"}
    print(len(supported), "architectures equal;", "not tried:",
          sorted({*every_family(), *TEXT_PARTS} - supported))  # fmt: skip
    if not sys.argv[1:]:
        text = PAGE.read_text("utf-8")
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()

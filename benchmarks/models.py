"""How fast families run beside Qwen3 of the same shape: `python benchmarks/models.py --scale 0.1`.

Random weights of one shape, each family with its own norms, biases, factors and rotation; and a
mixture of experts that computes as much a token as the dense model. Models take turns, round by
round, decoding `--streams` prompts of `--context` tokens at once; `--only` names some of them.
"""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from side_by_side import Clock, Run, compare, parser, report

from benchmarks.suite.shapes import SHAPES, write_shape
from nanoengine import LLM, SamplingParams

MOE = {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True}
LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 10_000, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 1680,
}  # fmt: skip
"""Heads of DeepSeek-V2-Lite's sizes and dense MLPs: as many weights as Qwen3 in shape `small`."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4_text": (
        "Gemma4ForCausalLM",
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 64,
            "vocab_size_per_layer_input": 32_000,
            "num_kv_shared_layers": 8,
            "global_head_dim": 128,
            "sliding_window": 512,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 4,
        },
    ),
    "glm4": ("Glm4ForCausalLM", {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "granite": (
        "GraniteForCausalLM",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            "num_local_experts": 0,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "mamba_d_head": 64,
            "attention_multiplier": 0.1,
        },
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT),
    "qwen3_moe": ("Qwen3MoeForCausalLM", MOE),
    "qwen3_5_text": (
        "Qwen3_5ForCausalLM",
        {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "partial_rotary_factor": 0.25},
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {"block_auto_adjust_ff_dim": False, "block_ff_dim": 1920, "conv_L_cache": 3}
        | {"full_attn_idxs": [2, 5, 8, 11, 14], "norm_eps": 1e-5},
    ),
}
"""Name -> architecture and the keys that make it what it is; the sizes are the shape's."""


def write_family(name: str, shape: str, directory: Path) -> None:
    """Writes the config.json of a family in the size of a shape."""
    write_shape(shape, directory)
    file = directory / "config.json"
    raw = json.loads(file.read_text("utf-8"))
    architecture, keys = FAMILIES[name]
    raw |= {"architectures": [architecture], "model_type": name, **keys}
    if name == "qwen3_moe":
        raw["moe_intermediate_size"] = raw["intermediate_size"] // MOE["num_experts_per_tok"]
    if name == "granitemoehybrid":
        raw["shared_intermediate_size"] = raw["intermediate_size"]
        raw["mamba_n_heads"] = 2 * raw["hidden_size"] // raw["mamba_d_head"]
        layers = range(raw["num_hidden_layers"])
        raw["layer_types"] = ["attention" if n % 4 == 3 else "mamba" for n in layers]
    file.write_text(json.dumps(raw), "utf-8")


def timed(llm: LLM, prompts: list[list[int]], output_len: int) -> Run:
    """All prompts at once, from the prefix cache: almost nothing but decodes."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    clock = Clock()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return Run(seconds=clock.read(), tokens=[list(o.outputs[0].token_ids) for o in outputs])


def main() -> None:
    """Loads all models and lets them take turns."""
    options = parser(__doc__)
    options.set_defaults(model="small")
    options.add_argument("--scale", type=float, default=1.0, help="share of the 128 output tokens")
    options.add_argument("--streams", type=int, default=1)
    options.add_argument("--context", type=int, default=64)
    options.add_argument("--quantization")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    args = options.parse_args()
    if args.model not in SHAPES:
        options.error(f"--model must be one of {', '.join(SHAPES)}, got {args.model}")
    draw, output_len = random.Random(0), max(2, round(128 * args.scale))
    prompts = [[draw.randrange(10, 4000) for _ in range(args.context)] for _ in range(args.streams)]
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        ways = {}
        for name in args.only:
            directory = Path(scratch) / name
            directory.mkdir()
            write_family(name, args.model, directory)
            llm = stack.enter_context(
                LLM(
                    str(directory), load_format="dummy", skip_tokenizer_init=True, dtype=args.dtype,
                    quantization=args.quantization, attention_backend=args.attention_backend,
                    max_model_len=args.context + 192, max_num_seqs=max(8, args.streams),
                    kv_cache_gib=0.1 + args.context * args.streams / 2**13,
                )
            )  # fmt: skip
            ways[name] = partial(timed, llm, prompts, output_len)
        what = f"{args.model}, {args.quantization or args.dtype}, {args.streams} streams"
        report(args, [compare(f"{what}, {output_len} tokens", ways, args.rounds)])


if __name__ == "__main__":
    main()

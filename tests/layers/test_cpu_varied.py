"""Gemma 4's layers as compiled calls: what their parts give."""

from __future__ import annotations

import pytest

from nanoengine import LLM
from nanoengine.layers.cpu_varied import VariedLayers
from tests.layers.test_cpu_decoder import outputs
from tests.layers.test_cpu_states import numbers
from tests.support.engines import checkpoint

FORMS = {
    "shared keys, an input": ({"num_kv_shared_layers": 2}, [3, 1, 1, 1, 1]),
    "values that are keys": ({"attention_k_eq_v": True, "num_kv_shared_layers": 0}, [3, 1, 2, 1]),
    "no input": ({"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}, [3, 1, 2, 1]),
}
"""Keys of a config, and how many layers each object of the stack is."""


@pytest.mark.parametrize(
    ("form", "quantization", "tolerance"),
    [(form, None, 5e-5) for form in FORMS] + [("shared keys, an input", "int8", 0.2)],
)
def test_whole_layers_give_what_their_parts_give(form, quantization, tolerance):
    """Torch's norms of values and of queries alone, and its gate of inputs, have other last bits,
    which int8 may round to the next number. Tokens then part at a tie, and scores of a prompt are
    what is left to compare."""
    keys, depths = FORMS[form]
    options = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "max_model_len": 512}
    with LLM(
        checkpoint("gemma4", **keys), dtype="float32", device="cpu", skip_tokenizer_init=True,
        num_kv_blocks=96, quantization=quantization, **options,
    ) as llm:  # fmt: skip
        decoder = llm.engine.executor.model.model
        assert all(isinstance(layers, VariedLayers) for layers in decoder.stack)
        assert [layers.depth for layers in decoder.stack] == depths
        found = outputs(llm)
        decoder.stack = list(decoder.layers)
        expected = outputs(llm)
    if quantization is None:
        assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]
    else:  # the prompt that is scored
        found, expected = found[7][2], expected[7][2]
    wanted = numbers(expected)
    assert len(wanted) > 100
    assert numbers(found) == pytest.approx(wanted, abs=tolerance, rel=0)


def test_layers_with_experts_run_part_by_part():
    with LLM(checkpoint("gemma4_moe"), dtype="float32", skip_tokenizer_init=True) as llm:
        decoder = llm.engine.executor.model.model
        assert decoder.stack == list(decoder.layers)

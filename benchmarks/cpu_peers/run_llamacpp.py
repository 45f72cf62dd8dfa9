"""llama.cpp through the low-level API of llama-cpp-python: all requests in one context.

Continuous batching as in llama.cpp's batched example: prompts fill batches of 2,048 tokens, then
every unfinished sequence decodes one token per step. A prefix that all prompts share is computed
once and copied to every sequence (which copies no memory). int8 and int4 are its q8_0 and q4_0; its
default is the checkpoint's bfloat16, with keys and values in float16.
"""

import harness
from harness import Loaded, Options

from benchmarks.suite.workloads import shared_prefix
from nanoengine.bench.workload import WorkItem

FILES = {"none": "-f32.gguf", "int8": "-q8_0.gguf", "int4": "-q4_0.gguf", "default": "-bf16.gguf"}
BITS = {
    "none": (32, 32, 32), "int8": (8.5, 8.5, 16), "int4": (4.5, 8.5, 16), "default": (16, 16, 16),
}  # fmt: skip
BATCH_TOKENS = 2048
GGML_TYPE_F32 = 0
SHORTEST_PREFIX = 32


def start(options: Options) -> Loaded:
    """Loads the converted checkpoint into a context that holds the largest workload."""
    import llama_cpp
    import numpy as np
    from llama_cpp import llama_cpp as lib

    silent = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    path = str(options.converted_file(FILES)).encode()
    model = lib.llama_model_load_from_file(path, lib.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp can't load {options.converted_file(FILES).name}")
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    params = lib.llama_context_default_params()
    params.n_ctx = options.tokens + 256
    params.n_batch, params.n_ubatch = BATCH_TOKENS, 512
    params.n_seq_max = options.batch
    params.n_threads = params.n_threads_batch = options.threads
    params.kv_unified = True
    if options.quantization == "none":
        params.type_k = params.type_v = GGML_TYPE_F32
    context = lib.llama_init_from_model(model, params)
    memory = lib.llama_get_memory(context)
    batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(entries: list[tuple[int, int, int, bool]], outputs: list[list[int]]) -> None:
        """Decodes (token, position, sequence, needs logits) entries; appends the sampled tokens."""
        for first in range(0, len(entries), BATCH_TOKENS):
            part = entries[first : first + BATCH_TOKENS]
            batch.n_tokens = len(part)
            for i, (token, position, sequence, sampled) in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, sampled
            if code := lib.llama_decode(context, batch):
                raise SystemExit(f"llama_decode returned {code}")
            for i, (_, _, sequence, sampled) in enumerate(part):
                if sampled:
                    logits = lib.llama_get_logits_ith(context, i)
                    best = np.ctypeslib.as_array(logits, shape=(vocab_size,)).argmax()
                    outputs[sequence].append(int(best))

    def generate(requests: list[WorkItem]) -> list[list[int]]:
        lib.llama_memory_clear(memory, False)
        outputs: list[list[int]] = [[] for _ in requests]
        shared = shared_prefix(requests)
        shared = shared if shared >= SHORTEST_PREFIX else 0
        if shared:
            prefix = requests[0][0][:shared]
            run([(token, i, 0, False) for i, token in enumerate(prefix)], outputs)
            for sequence in range(1, len(requests)):
                lib.llama_memory_seq_cp(memory, 0, sequence, 0, shared)
        run(
            [
                (prompt[i], i, sequence, i == len(prompt) - 1)
                for sequence, (prompt, _) in enumerate(requests)
                for i in range(shared, len(prompt))
            ],
            outputs,
        )
        while live := [s for s, (_, count) in enumerate(requests) if len(outputs[s]) < count]:
            step = []
            for s in live:
                position = len(requests[s][0]) + len(outputs[s]) - 1
                step.append((outputs[s][-1], position, s, True))
            run(step, outputs)
        return outputs

    if harness.is_gguf(options.quantization):
        stored = options.stored_bits(lib.llama_model_n_params(model))
        BITS[options.quantization] = stored, stored, 16
    body, head, kv = BITS[options.quantization]
    return Loaded(
        generate=generate,
        version=llama_cpp.__version__,
        dtype="bfloat16" if options.quantization == "default" else "float32",
        body_bits=body,
        head_bits=head,
        kv_bits=kv,
    )


if __name__ == "__main__":
    harness.main("llamacpp", start, harness.QUANTIZATIONS, gguf=True)

"""small: the whole engine in a form that can be read in half an hour. Read it first.

    prompts ─ LLM ─ LLMEngine ─┬─ Scheduler ─ BlockManager ─ BlockPool    decides, in plain ints
                               │      │ StepPlan
                               └─ ModelRunner ─ Batch ─ Model ─ Attention ─ sample    executes

Read the files in this order:

    sequence.py    a prompt and its answer: one list of tokens, three counters
    block_pool.py  blocks of the KV cache: their users, their content, the order of eviction
    block_manager.py  the block tables of sequences, and the cached prefix of a prompt
    scheduler.py   which sequences compute how many tokens in a step
    engine.py      the loop: schedule, launch, commit
    batch.py       the tensors of one step, and attention over the paged KV cache
    model.py       Llama, Qwen2 and Qwen3, from token ids to logits
    sampler.py     from logits to a token
    runner.py      runs a plan
    llm.py         text in, text out

`python -m nanoengine.small "Once upon a time"` runs it and prints each step.

The small engine plans the same steps and generates the same tokens as the large one
(`tests/test_small.py`). Both use the same `StepPlan`, so they can exchange their schedulers and
runners. The small engine has no kernels, no quantization and no GPU code beyond `.to(device)`;
these are in the other packages.
"""

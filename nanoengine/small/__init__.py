"""small: the whole engine, small enough to read in half an hour. Read it first.

    prompts ─ LLM ─ LLMEngine ─┬─ Scheduler ─ BlockManager ─ BlockPool    decides, in plain ints
                               │      │ StepPlan
                               └─ ModelRunner ─ Batch ─ Model ─ Attention ─ sample    executes

Read the files in this order:

    sequence.py    a prompt and its answer: one list of tokens, three counters
    block_pool.py  blocks of the KV cache: who uses them, what they hold, which goes next
    block_manager.py  the block tables of sequences, and the cached prefix of a prompt
    scheduler.py   which sequences compute how many tokens in a step
    engine.py      the loop: schedule, launch, commit
    batch.py       the tensors of one step, and attention over the paged KV cache
    model.py       Llama, Qwen2 and Qwen3, from token ids to logits
    sampler.py     from logits to a token
    runner.py      carries out a plan
    llm.py         text in, text out

`python -m nanoengine.small "Once upon a time"` runs it and prints what it does at each step.

The small engine plans the same steps and gives the same tokens as the large one
(`tests/test_small.py`). It speaks the large engine's `StepPlan`, so the two can exchange their
schedulers and runners. It has no kernels, no quantization and no GPU code beyond `.to(device)`:
those are the rooms of the large engine.
"""

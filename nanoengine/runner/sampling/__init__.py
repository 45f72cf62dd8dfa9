"""Sampling: the next token of each row, from hidden states or logits.

    greedy               the most likely token, which is all that a plain row needs
    step_sampler         steps whose rows need more: drafts, edits, draws, log-probabilities
    sampler              tokens of many lines of logits, each with the parameters of its row
    logits_processors    edit logits before: penalties, biases, bans, functions of the caller
    draw                 argmax, top_k, top_p, min_p and random draws, in torch, on any device
    triton_sampling      the same on CUDA in one kernel
    logprobs             log-probabilities of sampled tokens and of prompt tokens

A step of plain rows loads only `greedy`.
"""

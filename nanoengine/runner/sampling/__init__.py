"""Sampling: the next token of each row, from hidden states or logits.

    greedy               the most likely token, which is all that a plain row needs
    step_sampler         a step in which a row needs more: drafts, edits, draws, log-probabilities
    sampler              tokens of many lines of logits, each by the parameters of its row
    logits_processors    what edits logits before: penalties, biases, bans, a caller's functions
    draw                 argmax, top_k, top_p, min_p and draws, in torch, on any device
    triton_sampling      the same on CUDA in one kernel
    logprobs             log-probabilities of sampled tokens and of prompt tokens

A step of plain rows loads only `greedy`.
"""

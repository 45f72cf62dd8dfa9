"""Sampling: the next token of each row, from hidden states or logits.

    greedy               the most likely token, for plain rows
    step_sampler         steps with drafts, logits processors, draws or log-probabilities
    sampler              tokens of many lines of logits, each with the parameters of its row
    logits_processors    change logits before sampling: penalties, biases, bans, the user's own
    draw                 argmax, top_k, top_p, min_p and random draws, in torch, on any device
    triton_sampling      the same on CUDA in one kernel
    logprobs             log-probabilities of sampled tokens and of prompt tokens

A step of plain rows loads only `greedy`.
"""

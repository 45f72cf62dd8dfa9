"""WHAT to run: sequences, blocks, admission, preemption, the plan of a step. Ints, no torch.

Reading order, the plain way: `layout`, `sequence`, `prefixes`, `block_pool`, `prefix_cache`,
`block_manager`, `plan`, `scheduler` with its `waiting` queue and `row_allocator`. Then what is
special: `extras` and `forks`, `policies`, `groups/`, `tiers/`, `checks`.
"""

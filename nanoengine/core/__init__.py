"""What to run: sequences, blocks, admission, preemption and the plan of a step. No torch.

Read the common path first: `layout`, `sequence`, `prefixes`, `block_pool`, `prefix_cache`,
`block_manager`, `plan`, and `scheduler` with its `waiting` queue and `row_allocator`. Then read
what fewer requests need: `speculation` and `forks`, `policies`, `groups/`, `tiers/`, `checks`.
"""

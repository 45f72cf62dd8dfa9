"""WHAT to run: sequences, blocks, admission, preemption, the plan of a step. Ints, no torch.

Reading order: `layout`, `sequence`, `prefixes`, `block_pool`, `kv_groups`, `prefix_cache`,
`block_manager`, `plan`, `doors`, `scheduler` with its `waiting` queue, `row_allocator` and `forks`,
`fast_scheduler`; then `admission`, and `tiers`: `found`, `tiered_cache`, `disk`, `cost`.
"""

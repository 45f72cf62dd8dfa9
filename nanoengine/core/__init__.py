"""WHAT to run: sequences, blocks, admission, preemption, the plan of a step. Ints, no torch.

Reading order: `sequence`, `prefixes`, `block_pool`, `kv_groups`, `block_manager`, `plan`,
`scheduler` with its `waiting` queue and `row_allocator`, `forks`, `fast_scheduler`, `layout`,
`doors`; then `admission`, `tiers`: `found`, `tiered_cache`, `disk`, `cost`.
"""

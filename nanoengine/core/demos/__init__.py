"""Scripted minutes: what a mechanism of the core does, drawn line by line.

`python -m nanoengine.core.NAME` runs one: block_pool, block_manager, kv_groups, scheduler or tiers.
A mechanism's own file only names its script, so that whoever reads the one need not read the other.
docs/mechanisms.md shows what each prints.
"""

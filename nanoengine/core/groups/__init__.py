"""Models with windows or recurrent states: several KV groups, each with a table and a rule.

    rules.py     which blocks a window or a state needs, drops, and can start from
    manager.py   GroupedBlockManager: block tables of windows and states
    cache.py     GroupedPrefixCache: a hit needs its blocks in every group
    pool.py      StatePool: states in addition to blocks, in their own queue

If all layers attend to all tokens, nothing here is loaded: `core/make.py` decides.
"""

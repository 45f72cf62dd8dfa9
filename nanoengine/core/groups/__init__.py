"""Models with windows or states: several KV groups, each with a block table and a rule of its own.

    rules.py     which blocks a window or a state needs, drops, and can start from
    manager.py   GroupedBlockManager: windows that move on, states that move on
    cache.py     GroupedPrefixCache: a hit needs its blocks in every group
    pool.py      StatePool: states beside blocks, in a queue of their own

Where all layers attend to all tokens, nothing here is loaded: `core/make.py` chooses.
"""

"""Block managers and sequences without a scheduler."""

from __future__ import annotations

from nanoengine.core.block_manager import Admission, BlockManager
from nanoengine.core.make import make_block_manager
from nanoengine.core.sequence import Request, Sequence
from nanoengine.settings.params import SamplingParams
from tests.support.fake_executor import make_layout

_next_id = iter(range(10**9))


def make_manager(
    num_blocks: int = 33,
    block_size: int = 16,
    windows: tuple = (None,),
    enable_prefix_caching: bool = True,
    **options: object,
) -> BlockManager:
    layout = make_layout(num_blocks, block_size, windows)
    options = {"watermark_frac": 0.0, "enable_prefix_caching": enable_prefix_caching} | options
    return make_block_manager(layout, **options)


def make_sequence(tokens: list[int], *, salt: str | None = None, **params: object) -> Sequence:
    number = next(_next_id)
    request = Request(str(number), tokens, SamplingParams(**params), cache_salt=salt)
    seq = Sequence(request, seq_id=number, index=0, token_ids=list(tokens))
    request.sequences.append(seq)
    seq.row = number
    return seq


def admit(manager: BlockManager, seq: Sequence) -> Admission:
    admission = manager.can_allocate(seq)
    manager.allocate(seq, admission)
    return admission


def compute(manager: BlockManager, seq: Sequence, count: int | None = None) -> None:
    """Allocates slots for the next tokens, then advances the counters as a step would."""
    count = len(seq.token_ids) - seq.num_computed_tokens if count is None else count
    assert manager.may_append(seq, count)
    seq.num_computed_tokens += count
    manager.prefix_cache.register(seq)


def computed(manager: BlockManager, tokens: list[int], **options: object) -> Sequence:
    """An admitted sequence whose tokens are all computed."""
    seq = make_sequence(tokens, **options)
    admit(manager, seq)
    compute(manager, seq)
    return seq


def cached(manager: BlockManager, tokens: list[int], **options: object) -> int:
    """The number of a prompt's tokens that the prefix cache would provide."""
    return manager.can_allocate(make_sequence(tokens, **options)).num_cached_tokens

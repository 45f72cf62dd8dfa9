"""KV groups: what full attention keeps and what a sliding window drops, and what a hit needs."""

from __future__ import annotations

from nanoengine.core.kv_groups import (
    cdiv,
    longest_common_hit,
    longest_hit,
    make_kv_groups,
    num_dropped_blocks,
    num_needed_blocks,
)

SIZE = 2


def main() -> None:
    """Prints two tables as a sequence grows, and the longest prefix that both can start from."""
    full, window = make_kv_groups([None, 4])
    print(f"a model of two layers: one sees all tokens, one a window of {window.sliding_window}")
    print(f"blocks of {SIZE} tokens; x a computed token, . an empty slot, 0 the null block\n")
    print(f"{'tokens':<8}{'full attention':<24}{'a window of 4':<24}dropped")
    for num_tokens in range(1, 10):
        dropped = num_dropped_blocks(window, num_tokens, SIZE)
        tables = [_table(num_tokens, 0), _table(num_tokens, dropped)]
        print(f"{num_tokens:<8}{tables[0]:<24}{tables[1]:<24}{dropped}")
    print("\nThe next token, at position 9, sees positions 6 to 9: blocks 0 to 2 are of no use.")
    for chunk in (1, 4):
        held = [num_needed_blocks(group, 100, chunk, SIZE) for group in (full, window)]
        print(f"100 tokens in chunks of {chunk}: at most {held[0]} and {held[1]} blocks at once")
    print("\nA prompt comes again. Which of its blocks each group still has:\n")
    found = [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    for group, has in zip((full, window), found, strict=True):
        name = "full" if group is full else "window"
        longest = longest_hit(group, has, SIZE, len(has))
        print(
            f"  {name:<8}{' '.join('x' if one else '-' for one in has)}   alone: {longest} blocks"
        )
    common = longest_common_hit((full, window), found, SIZE)
    print(
        f"\nBoth can start behind block {common - 1}: {common * SIZE} tokens are cached. The window"
    )
    print("needs only the two blocks before that, so the gap at its beginning does no harm.")


def _table(num_tokens: int, dropped: int) -> str:
    slots = ["x" if i < num_tokens else "." for i in range(SIZE * cdiv(num_tokens, SIZE))]
    blocks = ["".join(slots[i : i + SIZE]) for i in range(0, len(slots), SIZE)]
    return " ".join("0" * SIZE if i < dropped else block for i, block in enumerate(blocks))

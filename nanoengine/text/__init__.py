"""From what a caller gives to token ids, and from token ids back to text."""

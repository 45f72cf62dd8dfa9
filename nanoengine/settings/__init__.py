"""Validated settings of engines, requests, KV tiers and drafts."""

"""What a user may say of an engine, a request, tiers and drafts; checked."""

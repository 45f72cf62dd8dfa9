"""error_output: the output of a prompt that could not run."""

from __future__ import annotations

from nanoengine.outputs import CompletionOutput, RequestOutput


def error_output(
    request_id: str,
    index: int,
    prompt: str | None,
    prompt_token_ids: list[int],
    message: str,
    *,
    key: str | None = None,
) -> RequestOutput:
    """The output of a prompt that could not run: order and count of a batch are kept."""
    failed = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error", error=message)
    return RequestOutput(
        request_id=request_id,
        index=index,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=[failed],
        finished=True,
        key=key,
    )

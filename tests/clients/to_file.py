"""A job in batches whose answers are written to a file as they come."""

import json
import sys
import tempfile
from pathlib import Path

from vllm import LLM, SamplingParams

BATCH = 4
rows = [{"id": i, "text": f"Row {i}: the fox and the"} for i in range(10)]
llm = LLM(model=sys.argv[1], enable_chunked_prefill=True, max_num_batched_tokens=1024)
params = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, max_tokens=8, logit_bias={5: -10.0})

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "answers.jsonl"
    with path.open("w") as sink:
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            outputs = llm.generate([row["text"] for row in batch], params, use_tqdm=False)
            for row, output in zip(batch, outputs):
                answer = {
                    "id": row["id"],
                    "answer": output.outputs[0].text,
                    "finish_reason": output.outputs[0].finish_reason,
                    "tokens": len(output.prompt_token_ids) + len(output.outputs[0].token_ids),
                }
                sink.write(json.dumps(answer) + "\n")
                sink.flush()
    answers = [json.loads(line) for line in path.read_text().splitlines()]
print(len(answers), "answers;", answers[0])
assert [answer["id"] for answer in answers] == list(range(10))
assert all(answer["finish_reason"] in ("stop", "length") for answer in answers)

"""What quantization costs on tasks: HumanEval and GSM8K, greedy, as chats.

    python benchmarks/task_scores.py MODEL MODEL@quantization=int4 FILE.gguf \
        --human-eval HumanEval.jsonl.gz --gsm8k gsm8k_test.jsonl --questions 200 --json scores.json

The files are published by openai/human-eval and openai/grade-school-math. All questions of a task
are one batch. **The code that a model writes for HumanEval is executed**, each completion in a
separate process with a limit of 10 s: only run this where that is safe. With `--llama-cpp PYTHON`,
an interpreter that has llama-cpp-python, llama.cpp also answers the same token ids of GGUF files,
one request after the other.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoengine import LLM, SamplingParams

Check = Callable[[dict[str, Any], str], bool]
CODE = re.compile(r"```(?:python)?\n(.*?)(?:```|\Z)", re.DOTALL)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
ASK_CODE = (
    "Complete the following Python function. Reply with the whole function in one code block."
)
ASK_NUMBER = "Solve the problem step by step. End with a line that says: The answer is N."
SECONDS = 10
LLAMA_CPP = """
import json, sys
import llama_cpp
work = json.load(sys.stdin)
llm = llama_cpp.Llama(work["model"], n_ctx=2048, n_threads=work["threads"], verbose=False)
vocab = llama_cpp.llama_model_get_vocab(llm.model)
answers = []
for ids in work["prompts"]:
    found = []
    for token in llm.generate(ids, temp=0.0, repeat_penalty=1.0):
        if llama_cpp.llama_vocab_is_eog(vocab, token) or len(found) == work["max_tokens"]:
            break
        found.append(token)
    answers.append(found)
json.dump(answers, sys.stdout)
"""


def read(path: Path, count: int | None = None) -> list[dict[str, Any]]:
    """The first `count` rows of a file of JSON lines, which may be compressed."""
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    return [json.loads(line) for line in text.splitlines()][:count]


def code_passes(task: dict[str, Any], answer: str) -> bool:
    """Whether the first code block of a completion passes the task's tests."""
    found = CODE.search(answer)
    code = found[1] if found else answer
    lines = [task["prompt"], "    pass\n", code, task["test"], f"check({task['entry_point']})"]
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write("\n".join(lines))
        file.flush()
        command = [sys.executable, "-I", file.name]
        try:
            return subprocess.run(command, capture_output=True, timeout=SECONDS).returncode == 0
        except subprocess.TimeoutExpired:
            return False


def number_is_right(task: dict[str, Any], answer: str) -> bool:
    """Whether the last number of a completion is the task's result."""
    found = NUMBER.findall(answer)
    right = task["answer"].rpartition("####")[2].strip().replace(",", "")
    return bool(found) and float(found[-1].replace(",", "")) == float(right)


def main() -> None:
    """Prints one line per model and task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL[@KEY=VALUE,...]")
    parser.add_argument("--human-eval", type=Path)
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--questions", type=int, default=200, help="of GSM8K, the first ones")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--llama-cpp", type=Path, metavar="PYTHON")
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    tasks: list[tuple[str, list[dict[str, Any]], list[str], Check]] = []
    if args.human_eval:
        rows = read(args.human_eval)
        prompts = [f"{ASK_CODE}\n\n```python\n{row['prompt']}\n```" for row in rows]
        tasks.append(("HumanEval", rows, prompts, code_passes))
    if args.gsm8k:
        rows = read(args.gsm8k, args.questions)
        prompts = [f"{row['question']}\n\n{ASK_NUMBER}" for row in rows]
        tasks.append(("GSM8K", rows, prompts, number_is_right))
    found = []
    for model in args.models:
        path, _, settings = model.partition("@")
        options: dict[str, Any] = dict(one.split("=") for one in settings.split(",") if one)
        with LLM(path, max_model_len=2048, **options) as llm:
            for name, rows, prompts, is_right in tasks:
                chats = [[{"role": "user", "content": text}] for text in prompts]
                params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
                began = time.perf_counter()
                results = llm.chat(chats, params, use_tqdm=False)
                seconds = time.perf_counter() - began
                answers = [result.outputs[0] for result in results]
                tokens = sum(len(answer.token_ids) for answer in answers)
                texts = [answer.text for answer in answers]
                engines = {"nanoengine": (texts, tokens / seconds)}
                if args.llama_cpp and path.endswith(".gguf") and not settings:
                    work = {
                        "model": path, "threads": args.threads, "max_tokens": args.max_tokens,
                        "prompts": [result.prompt_token_ids for result in results],
                    }  # fmt: skip
                    command = [str(args.llama_cpp), "-c", LLAMA_CPP]
                    began = time.perf_counter()
                    done = subprocess.run(
                        command, input=json.dumps(work), capture_output=True, text=True, check=True
                    )
                    ids, seconds = json.loads(done.stdout), time.perf_counter() - began
                    texts = [str(llm.get_tokenizer().decode(one)) for one in ids]
                    engines["llama.cpp"] = (texts, sum(map(len, ids)) / seconds)
                for engine, (texts, rate) in engines.items():
                    passed = sum(map(is_right, rows, texts))
                    line = {"engine": engine, "model": f"{Path(path).name}@{settings}".strip("@"),
                            "task": name, "passed": passed, "of": len(rows),
                            "tokens_per_s": round(rate, 1)}  # fmt: skip
                    print(json.dumps(line), flush=True)
                    found.append(line)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

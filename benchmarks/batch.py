"""What `nanoengine batch` costs in addition to the engine: `python benchmarks/batch.py [PART...]`.

    wall      2,000 rows of the demo model: a batch compared with LLM.generate of the same list
    host      time per row in OpenAI's format, with an executor that computes nothing
    memory    peak memory with many rows relative to few rows; each in a separate process
    resume    a job that is 99 % done: time from its start to the first new token, without loading
    order     prefill tokens of shuffled rows with common prefixes: input order relative to ours
    peer      500 rows with 200 input and 100 output tokens: vLLM's run-batch relative to ours, as
              whole processes that alternate; needs --vllm and --model. Run it twice in one
              --directory: the first run compiles

The executor that computes nothing (`no_model.py`) samples token 1 in every step; everything else
runs as in a real batch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from no_model import BLOCK_SIZE, NoExecutor, make_engine

import nanoengine.build
from nanoengine import LLM, SamplingParams
from nanoengine.assets import demo_model_path
from nanoengine.engine import LLMEngine
from nanoengine.jobs.job import Job, JobOptions
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.settings.config import EngineConfig
from nanoengine.text.prompt_forms import Row
from nanoengine.text.tokenizer import Tokenizer

NAMES = (
    "Anna",
    "Ben",
    "Clara",
    "Dan",
    "Emma",
    "Felix",
    "Grace",
    "Hugo",
    "Ida",
    "Jack",
    "Leo",
    "Mia",
)
PASSAGE = "A cold wind blew over the bridge. Grace and Leo talked about the weather. "


@contextmanager
def llm_without_model(num_blocks: int = 8192) -> Iterator[LLM]:
    """The demo model's tokenizer, the real engine, and an executor that computes nothing."""

    def build(config: EngineConfig, _: object) -> LLMEngine:
        return make_engine(
            NoExecutor(),
            num_blocks=num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=8192,
            max_model_len=2048,
        )

    real, nanoengine.build.build_engine = nanoengine.build.build_engine, build
    try:
        with LLM(demo_model_path()) as llm:
            yield llm
    finally:
        nanoengine.build.build_engine = real


def write_rows(path: Path, count: int, max_tokens: int = 4) -> None:
    """Chats in OpenAI's format, about 40 tokens each."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            content = f"{i}: {draw.choice(NAMES)} and {draw.choice(NAMES)}. Tell a story of them."
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": content}],
                "max_completion_tokens": max_tokens,
                "temperature": 0.7,
            }
            row = {"custom_id": f"row-{i}", "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps({**row, "body": body}) + "\n")


def run_job(
    source: Path,
    output: Path,
    stream: Callable[..., Any],
    *,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> float:
    """Runs a job to its end; returns its time [s], including the time to open it."""
    start = clock()
    job = Job(JobOptions(inputs=(str(source),), output=str(output), **options), dict)
    work = job.work("demo")
    work.run(stream)
    job.complete()
    job.close()
    return clock() - start


def answer_at_once(rows: Iterator[Row]) -> Iterator[RequestOutput]:
    """No engine: what remains is reading, parsing and writing."""
    answer = CompletionOutput(
        index=0, text=" once upon a time", token_ids=[1] * 4, finish_reason="length"
    )
    for index, _ in enumerate(rows):
        yield RequestOutput(
            request_id="0",
            index=index,
            prompt="",
            prompt_token_ids=[1] * 40,
            outputs=[answer],
            finished=True,
        )


def measure_wall(directory: Path, count: int, rounds: int) -> dict[str, Any]:
    """A batch, and LLM.generate with the same prompts and parameters."""
    draw = random.Random(0)
    prompts = [
        f"Once upon a time, {draw.choice(NAMES)} and {draw.choice(NAMES)}" for _ in range(count)
    ]
    source = directory / "wall.jsonl"
    source.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    params = {"max_tokens": 32, "ignore_eos": True, "temperature": 0}
    ratios, times = [], []
    with LLM(demo_model_path()) as llm:
        llm.generate(prompts[:256], SamplingParams(**params), use_tqdm=False)
        for number in range(rounds):
            llm.reset_prefix_cache()
            start = time.perf_counter()
            llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
            generate_s = time.perf_counter() - start
            llm.reset_prefix_cache()
            batch_s = run_job(
                source,
                directory / f"wall-{number}.out.jsonl",
                lambda rows: llm.stream(rows, on_error="record"),
                sampling=params,
            )
            ratios.append(batch_s / generate_s)
            times.append((generate_s, batch_s))
    return {"rows": count, "ratio": statistics.median(ratios), "ratios": ratios, "seconds": times}


def measure_host(directory: Path, count: int) -> dict[str, Any]:
    """CPU microseconds per row; also for template and tokenizer alone, and reading and writing
    alone."""
    source = directory / "host.jsonl"
    write_rows(source, count)
    with llm_without_model() as llm:
        llm.tokenizer.render_chat(
            [{"role": "user", "content": ""}]
        )  # The first rendering loads libraries.
        whole_s = run_job(
            source,
            directory / "host.out.jsonl",
            lambda rows: llm.stream(rows, on_error="record"),
            clock=time.process_time,
        )
        files_s = run_job(
            source, directory / "files.out.jsonl", answer_at_once, clock=time.process_time
        )
        tokenizer = llm.tokenizer
        talks = [json.loads(line)["body"]["messages"] for line in source.open()][:20_000]
        start = time.process_time()
        for talk in talks:
            tokenizer.encode(tokenizer.render_chat(talk), add_special_tokens=False)
        text_s = (time.process_time() - start) * count / len(talks)
    facts = {
        "whole": whole_s,
        "template and tokenizer": text_s,
        "other": whole_s - text_s,
        "of it reading and writing": files_s,
    }
    return {"rows": count, "us per row": {k: 1e6 * v / count for k, v in facts.items()}}


def measure_memory(directory: Path, counts: tuple[int, int]) -> dict[str, Any]:
    """Peak resident memory [MiB] of a job of each size."""
    peaks = []
    for count in counts:
        source = directory / f"memory-{count}.jsonl"
        write_rows(source, count, max_tokens=1)
        command = [sys.executable, __file__, "--one-job", str(source)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks.append(float(done.stdout.split()[-1]))
    return {"rows": counts, "peak MiB": peaks, "ratio": peaks[1] / peaks[0]}


def one_job(source: Path) -> None:
    """Runs a job and prints its peak memory [MiB]."""
    with llm_without_model() as llm:
        run_job(
            source,
            source.with_suffix(".out.jsonl"),
            lambda rows: llm.stream(rows, on_error="record"),
        )
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def measure_resume(directory: Path, count: int) -> dict[str, Any]:
    """Seconds from the start of a job to its first new token."""
    source, output = directory / "resume.jsonl", directory / "resume.out.jsonl"
    write_rows(source, count)
    run_job(source, output, answer_at_once)
    lines = output.read_bytes().splitlines(keepends=True)
    del lines[-count // 100 :]
    output.write_bytes(b"".join(lines))
    first: list[float] = []
    with llm_without_model() as llm:

        def stream(rows: Iterator[Row]) -> Iterator[RequestOutput]:
            for out in llm.stream(rows, on_error="record"):
                first.append(time.perf_counter())
                yield out

        start = time.perf_counter()
        run_job(source, output, stream)
    return {"rows": count, "to the first token s": first[0] - start, "new": len(first)}


def measure_order(directory: Path, prefix_tokens: int = 512) -> dict[str, Any]:
    """Prefill tokens of 16 prefixes with 64 rows each, shuffled, in a pool for a quarter of
    them."""
    draw, counts = random.Random(0), {}
    source = directory / "order.jsonl"
    with LLM(demo_model_path(), num_kv_blocks=64) as llm:
        ids = llm.tokenizer.encode(PASSAGE * 60)[: prefix_tokens - 4]
    rows = [
        {"prompt_token_ids": [100 + i, 7, 7, 7, *ids, *draw.choices(ids, k=16)], "max_tokens": 8}
        for i in range(16)
        for _ in range(64)
    ]
    draw.shuffle(rows)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for reorder in (False, True):
        with llm_without_model(16 * prefix_tokens // BLOCK_SIZE // 4) as llm:
            run_job(
                source,
                directory / f"reorder-{reorder}.out.jsonl",
                lambda rows, llm=llm: llm.stream(rows, on_error="record"),
                reorder=reorder,
            )
            counts["ours" if reorder else "input order"] = llm.stats().prefill_tokens
    ratio = counts["input order"] / counts["ours"]
    return {"rows": len(rows), "prefill tokens": counts, "ratio": ratio}


CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
PEER_IN, PEER_OUT = 200, 100


def write_peer_rows(path: Path, model: Path, count: int) -> None:
    """Chats of PEER_IN tokens after the template, without common prefixes."""
    tokenizer, draw = Tokenizer.load(str(model)), random.Random(0)
    words = [f" {name}" for name in NAMES] + PASSAGE.split()

    def row(i: int) -> dict[str, Any]:
        content = str(i)
        while True:
            longer = f"{content} {draw.choice(words)}"
            talk = [{"role": "user", "content": longer}]
            text = tokenizer.render_chat(talk)
            if len(tokenizer.encode(text, add_special_tokens=False)) > PEER_IN:
                break
            content = longer
        body = {
            "model": str(model),
            "messages": [{"role": "user", "content": content}],
            "max_completion_tokens": PEER_OUT,
            "min_tokens": PEER_OUT,
            "ignore_eos": True,
            "temperature": 0,
        }
        row = {"custom_id": f"row-{i}", "method": "POST", "url": "/v1/chat/completions"}
        return {**row, "body": body}

    path.write_text("".join(json.dumps(row(i)) + "\n" for i in range(count)), encoding="utf-8")


def measure_peer(
    directory: Path, vllm: Path, checkpoint: Path, dtype: str, cores: int, count: int, rounds: int
) -> dict[str, Any]:
    """Wall times of whole processes, and the number of equal completions."""
    model = directory / "model"
    if not model.exists():
        model.mkdir()
        for file in checkpoint.iterdir():
            (model / file.name).symlink_to(file.resolve())
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "OMP_NUM_THREADS": str(cores),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "DO_NOT_TRACK": "1",
    }

    def run(name: str, source: Path) -> float:
        output = source.with_name(f"{name}-{source.name}")
        output.unlink(missing_ok=True)
        output.with_name(f"{output.name}.job.json").unlink(missing_ok=True)
        ours = [sys.executable, "-m", "nanoengine.cli.main", "batch", str(model), str(source)]
        # Why the module: `vllm run-batch` of vllm-cpu 0.32 needs a package vllm.
        theirs = [str(vllm), "-m", "vllm.entrypoints.openai.run_batch", "-i", str(source)]
        theirs += ["--model", str(model), "-o", str(output)]
        ours += ["--output", str(output)]
        command = [*(ours if name == "ours" else theirs), "--max-model-len", "2048"]
        command += ["--dtype", dtype]
        start = time.perf_counter()
        with (directory / f"{name}.log").open("wb") as log:
            done = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)
        if done.returncode:
            text = (directory / f"{name}.log").read_text(errors="replace")
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{text[-4000:]}")
        return time.perf_counter() - start

    source = directory / "peer.jsonl"
    write_peer_rows(source, model, count)
    found: dict[str, list[float]] = {"ours": [], "vllm": []}
    for _ in range(rounds):
        for name, seconds in found.items():
            seconds.append(run(name, source))
    answers = []
    for name in found:
        records = map(json.loads, (directory / f"{name}-peer.jsonl").open())
        bodies = {one["custom_id"]: one["response"]["body"] for one in records}
        assert all(
            body["usage"]["completion_tokens"] == PEER_OUT for body in bodies.values()
        ), name  # fmt: skip
        answers.append({k: v["choices"][0]["message"]["content"] for k, v in bodies.items()})
    return {
        "rows": count,
        "cores": cores,
        "ratio": statistics.median(found["vllm"]) / statistics.median(found["ours"]),
        "seconds": found,
        "equal answers": sum(answers[0][key] == answers[1][key] for key in answers[0]),
    }


def machine() -> str:
    """The CPU and the number of its cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")
    return f"{model or platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def main() -> None:
    """Runs the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("wall", "host", "memory", "resume", "order")  # peer only on request
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join((*parts, "peer")))
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--vllm", type=Path, help="the Python of an environment that has it")
    parser.add_argument("--model", type=Path, help="a checkpoint for both")
    parser.add_argument("--dtype", default="float32", help="of both")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="of both")
    parser.add_argument("--directory", type=Path, help="for files; a temporary one by default")
    parser.add_argument("--one-job", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_job is not None:
        one_job(args.one_job)
        return
    many = int(1_000_000 * args.scale)
    found: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as name:
        directory = args.directory or Path(name)
        variants: dict[str, Callable[[], dict[str, Any]]] = {
            "wall": lambda: measure_wall(directory, int(2000 * args.scale), args.rounds),
            "host": lambda: measure_host(directory, many // 10),
            "memory": lambda: measure_memory(directory, (many // 100, many)),
            "resume": lambda: measure_resume(directory, many),
            "order": lambda: measure_order(directory),
            "peer": lambda: measure_peer(
                directory,
                args.vllm,
                args.model,
                args.dtype,
                args.cores,
                int(500 * args.scale),
                args.rounds,
            ),
        }
        for part in args.parts or parts:
            found[part] = variants[part]()
            print(f"{part}: {json.dumps(found[part])}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

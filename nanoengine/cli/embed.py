"""`nanoengine embed`: a file of texts in, a matrix of embeddings out.

All vectors are in memory until the file is written. For a job that can resume, or that writes
records, use `nanoengine batch` with rows of /v1/embeddings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from tyro.conf import Positional, arg

from nanoengine.cli.options import EngineArgs, engine_options
from nanoengine.errors import ConfigError
from nanoengine.jobs.paths import resolved_path
from nanoengine.jobs.record_log import atomic_write
from nanoengine.jobs.rows import RowOptions, RowReader, require_columns
from nanoengine.jobs.source import find_inputs, read_lines, require_pyarrow
from nanoengine.settings.checks import counted
from nanoengine.settings.pooling import Pooling, PoolingParams
from nanoengine.text.prompt_forms import Row

MAX_ROW_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedArgs(EngineArgs):
    """Writes one embedding vector per text of a file.

    examples:
      nanoengine embed Qwen/Qwen3-Embedding-0.6B texts.txt --output vectors.npy
      nanoengine embed demo 'data/*.csv' --prompt-column text --output vectors.parquet

    Attributes:
        inputs: Files, globs, or - for stdin: .txt, .jsonl, .json, .csv, .tsv, compressed or not,
            .parquet.
        output: A NumPy matrix, .npy, with one row per text; or a table, .parquet, with columns
            row, embedding and error.
        prompt_column: Column that is the text.
        template: Jinja template over the columns that makes the text.
        dimensions: Keep only this many leading elements of each vector.
        pooling: Which hidden states are pooled: the last token's, the mean of all, or the first
            token's; the default is from the checkpoint.
        truncate: Truncate texts that are too long for the model, instead of reporting an error.
    """

    inputs: Annotated[Positional[tuple[str, ...]], arg(metavar="INPUT...")]
    output: Path
    prompt_column: str | None = None
    template: str | None = None
    dimensions: int | None = None
    pooling: Pooling | None = None
    truncate: bool = False


def main(args: EmbedArgs) -> int:
    """Runs the command; returns 1 if a text has no vector, else 0.

    Raises:
        ConfigError: an input, the output or an option is invalid; raised before the model loads.
    """
    if args.output.suffix not in (".npy", ".parquet"):
        raise ConfigError(f"--output must end in .npy or .parquet, got {str(args.output)!r}")
    if args.output.suffix == ".parquet":
        require_pyarrow("Parquet files")
    output_path = resolved_path(args.output)
    inputs = find_inputs(args.inputs)
    options = RowOptions(prompt_column=args.prompt_column, template=args.template)
    require_columns(inputs, options, MAX_ROW_BYTES)
    reader = RowReader(options)
    max_tokens = -1 if args.truncate else None
    pooling_params = PoolingParams(
        dimensions=args.dimensions, pooling=args.pooling, truncate_prompt_tokens=max_tokens
    )
    from nanoengine.features.pooling import PoolingTasks
    from nanoengine.llm import LLM

    vectors: dict[int, np.ndarray] = {}
    errors: dict[int, str] = {}
    with LLM(**engine_options(args)) as llm:
        pools = PoolingTasks(llm.config, llm.info.max_model_len, lambda: llm.tokenizer)
        params, locations = pools.embed([], pooling_params).params, dict[int, str]()

        def rows() -> Iterator[Row]:
            for line in read_lines(inputs, MAX_ROW_BYTES):
                task = reader.task(line)
                locations[line.row] = f"{line.input.name}:{line.number}"
                prompt = task.error or pools.embed([task.prompt], pooling_params).prompts[0]
                yield Row(prompt, sampling_params=params)

        for output in llm.stream(rows(), on_error="record", use_tqdm=True):
            location = locations.pop(output.index)
            if output.error is None:
                vectors[output.index] = pools.vector(output.pooled, pooling_params)
            else:
                errors[output.index] = output.error
                print(f"{location}: {output.error}", file=sys.stderr)
        size = pooling_params.dimensions or pools.hidden_size
    matrix = np.full((len(vectors) + len(errors), size), np.nan, np.float32)
    for row, vector in vectors.items():
        matrix[row] = vector
    write(output_path, matrix, errors)
    num_vectors, num_errors = counted(len(vectors), "vector"), counted(len(errors), "error")
    print(f"{num_vectors} of {size} elements, {num_errors}", file=sys.stderr)
    return int(bool(errors))


def write(path: Path, matrix: np.ndarray, errors: dict[int, str]) -> None:
    """Writes the file atomically; a missing vector is NaN, or null in a table.

    Raises:
        OutputLostError: it can't be written.
    """
    with atomic_write(path) as file:
        if path.suffix == ".npy":
            np.save(file, matrix)
            return
        import pyarrow.parquet

        rows = range(len(matrix))
        vectors = [None if row in errors else matrix[row] for row in rows]
        columns = {
            "row": pyarrow.array(rows, pyarrow.int64()),
            "embedding": pyarrow.array(vectors, pyarrow.list_(pyarrow.float32())),
            "error": pyarrow.array(map(errors.get, rows), pyarrow.string()),
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), file)

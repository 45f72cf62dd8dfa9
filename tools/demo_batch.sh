#!/usr/bin/env bash
# The part of `make demo` about `nanoengine batch`: kills a job, and resumes it with the same
# command. One row is not valid JSON.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for name in Anna Ben Clara Dan Emma Felix Grace Hugo Ida Jack Leo Mia; do
    echo "{\"prompt\": \"Once upon a time, $name\", \"max_tokens\": 64}"
    [[ $name == Felix ]] && echo '{"prompt": a broken line'
done > "$scratch/rows.jsonl"
job=("$BIN/python" -m nanoengine.cli.main batch demo "$scratch/rows.jsonl"
    --output "$scratch/answers.jsonl" --temperature 0 --max-num-seqs 2)

"${job[@]}" 2> /dev/null &
pid=$!
touch "$scratch/answers.jsonl"
while kill -0 $pid 2> /dev/null && (($(wc -l < "$scratch/answers.jsonl") < 6)); do sleep 0.01; done
kill -KILL $pid 2> /dev/null || true
wait $pid 2> /dev/null || true
echo "killed after $(wc -l < "$scratch/answers.jsonl") records. Running the same command again:"
"${job[@]}" 2>&1 || echo "exit code $?: one row has an error record"
echo "$(wc -l < "$scratch/answers.jsonl") records for $(wc -l < "$scratch/rows.jsonl") rows; two of them:"
grep -e '"_row": [16],' "$scratch/answers.jsonl" | sed "s#$scratch/##"

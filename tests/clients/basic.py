"""Complete a few prompts and print them side by side."""

import sys

from vllm import LLM, SamplingParams

prompts = [
    "Once upon a time, there was a little fox",
    "Long ago, a kind bear named",
    "The road went past",
    "In the morning",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    llm = LLM(model=sys.argv[1])
    outputs = llm.generate(prompts, sampling_params)
    print("-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt:    {prompt!r}")
        print(f"Output:    {generated_text!r}")
        print("-" * 60)
    assert [output.prompt for output in outputs] == prompts
    assert all(0 < len(output.outputs[0].token_ids) <= 16 for output in outputs)


if __name__ == "__main__":
    main()

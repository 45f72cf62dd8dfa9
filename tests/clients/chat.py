"""One conversation, then several at once, through the model's chat template."""

import argparse

from vllm import LLM, SamplingParams


def print_outputs(outputs):
    for output in outputs:
        print(f"Prompt: {output.prompt!r}\nGenerated: {output.outputs[0].text!r}\n")


def main(args):
    llm = LLM(model=args.model, max_model_len=1024, seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=32, stop=["\n\n"])
    conversation = [
        {"role": "user", "content": "Tell a story about a brave rabbit."},
        {"role": "assistant", "content": "Once upon a time, there was a brave rabbit."},
        {"role": "user", "content": "Tell a story about a quiet owl."},
    ]
    outputs = llm.chat(conversation, params, use_tqdm=False)
    print_outputs(outputs)

    conversations = [conversation[:1] for _ in range(5)]
    outputs = llm.chat(messages=conversations, sampling_params=params, use_tqdm=True)
    print_outputs(outputs)
    assert len(outputs) == 5
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert "rabbit" in outputs[0].outputs[0].text


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    main(parser.parse_args())

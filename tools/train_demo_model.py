"""Train the bundled demo model, on text that `demo_text.py` makes up.

    python tools/train_demo_model.py --threads 1        # 16 minutes on one Zen 3 core
    python tools/train_demo_model.py --write-recall tests/data/recall.jsonl
    python tools/train_demo_model.py --check tests/data/recall.jsonl

The model is a small Qwen3 with its own byte-level BPE tokenizer. It learns three things:
to answer questions about facts planted in a passage (which only works if attention over the whole
passage is right, so it shows a broken cache at once), to tell short stories, and to add small
numbers; each as plain text and as a chat. Names and values are drawn independently, and one
combination in ten never occurs in training; the recall questions ask for those only.

The first layers start as induction heads (`look_back`), so recall is there from the first step and
training has to learn the words around it: 2.6 million tokens gave 200 of 200 recall questions.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_text import (
    EOS,
    IM_END,
    IM_START,
    RECALL_LENGTHS,
    VALUE_WEIGHT,
    Document,
    chat_turn,
    make_document,
    make_story,
    make_sum,
    plain_prompt,
    recall_questions,
)
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ROOT = Path(__file__).resolve().parent.parent
MODEL_DIR = ROOT / "nanoengine" / "assets" / "demo-model"
VOCAB_SIZE, CONTEXT = 1440, 2048
LONGEST = 860  # tokens in the longest training passage
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE tokenizer of the training text; digits stay single."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.Split(Regex(r" ?\p{L}+| ?[^\s\p{L}]+|\s+"), "isolated"),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, special=True, normalized=False)
                        for t in (EOS, IM_START, IM_END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    texts = (make_document(rng, 300).text for _ in range(8000))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of an exported model."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def encode(tokenizer: Tokenizer, doc: Document) -> tuple[list[int], list[float]]:
    """The token ids of a document, and the weight of each one's last character."""
    encoding = tokenizer.encode(doc.text)
    return encoding.ids, [doc.weights[end - 1] for _, end in encoding.offsets]


def collate(docs: list[tuple[list[int], list[float]]]) -> Batch:
    """Right-padded ids (causal attention never sees the padding) and target weights."""
    width = max(len(ids) for ids, _ in docs)
    ids = torch.zeros(len(docs), width, dtype=torch.long)
    weights = torch.zeros(len(docs), width)
    for row, (doc_ids, doc_weights) in enumerate(docs):
        ids[row, : len(doc_ids)] = torch.tensor(doc_ids)
        weights[row, : len(doc_ids)] = torch.tensor(doc_weights)
    return ids, ids[:, 1:], weights[:, 1:]


def batches(tokenizer: Tokenizer, rng: random.Random, tokens: int, longest: int) -> list[Batch]:
    """A few batches of about `tokens` tokens; like lengths go together, so little is padding."""
    docs, total = [], 0
    while total < 10 * tokens:
        docs.append(encode(tokenizer, make_document(rng, longest)))
        total += len(docs[-1][0])
    docs.sort(key=lambda doc: len(doc[0]))
    out, batch = [], []
    for doc in docs:
        if batch and len(doc[0]) * (len(batch) + 1) > tokens:
            out.append(collate(batch))
            batch = []
        batch.append(doc)
    out.append(collate(batch))
    rng.shuffle(out)
    return out


def build_model(seed: int) -> Qwen3ForCausalLM:
    """The untrained model."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )
    model = Qwen3ForCausalLM(config)
    look_back(model)
    return model


@torch.no_grad()
def look_back(model: Qwen3ForCausalLM) -> None:
    """Starts the first two layers as induction heads, which find what followed the same words.

    Layer 0 writes short codes of the two preceding tokens into the state of each token. In layer 1
    two heads find the position that follows the current two tokens, anywhere, and two find a recent
    position that follows the current token; all copy the token at that position. With random
    weights, this takes far longer to learn than two cores can compute. Source: Olsson et al. 2022,
    "In-context Learning and Induction Heads" (arXiv 2209.11895), for the mechanism; the values of
    the weights are our own.

        dimensions   0 .. 127 the token   128 .. 157 one back   158 .. 187 two back   191 constant
    """
    scale, rank, token, constant = 0.05, 30, slice(0, 128), 191
    one_back, two_back = slice(128, 128 + rank), slice(128 + rank, 128 + 2 * rank)
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0, scale)
    embedding[:, 128:] *= 0.02
    embedding[:, constant] = scale
    name = torch.linalg.qr(torch.randn(128, rank))[0].T  # [rank, 128]: a short code of a token
    turn = model.config.rope_parameters["rope_theta"] ** (-torch.arange(32) / 32)
    first, second = (model.model.layers[i].self_attn for i in (0, 1))
    for projection in (*first.children(), *second.children()):
        if isinstance(projection, torch.nn.Linear):
            projection.weight *= 0.1

    # Layer 0: keys are one constant direction, queries the same rotated back by one position
    # (heads 0 and 1) or two; only the fast pairs of RoPE distinguish neighbouring positions.
    fast = (torch.arange(32) < 10).float()
    first.q_proj.weight.zero_()
    first.k_proj.weight.zero_()
    for head, back in enumerate((1, 1, 2, 2)):
        query = first.q_proj.weight[head * 64 : head * 64 + 64, constant]
        query[:32], query[32:] = fast * torch.cos(back * turn), -fast * torch.sin(back * turn)
    for start, place, head in ((0, one_back, 0), (64, two_back, 2)):
        first.k_proj.weight[start : start + 32, constant] = fast
        first.v_proj.weight[start : start + rank, token] = name
        first.o_proj.weight[place, head * 64 : head * 64 + rank] = 0.1 * torch.eye(rank)
    first.q_norm.weight.fill_(3.0)
    first.k_norm.weight.fill_(3.0)

    # Layer 1: codes are compared in pairs that rotate slowly enough to match over hundreds of
    # tokens; a constant in faster pairs makes near positions more likely.
    slow = torch.zeros(64, rank)
    slow[torch.cat((torch.arange(17, 32), torch.arange(49, 64))), torch.arange(rank)] = 1
    near = torch.zeros(64)
    near[7:13] = 1.5
    other = torch.linalg.qr(torch.randn(rank, rank))[0]
    for head in range(4):
        query = second.q_proj.weight[head * 64 : head * 64 + 64]
        query[:, token] += slow @ name if head >= 2 else 2.3 * slow @ other @ name
        if head < 2:
            query[:, one_back] += slow
        else:
            query[:, constant] += near
    anywhere, recent = second.k_proj.weight[:64], second.k_proj.weight[64:]
    anywhere[:, two_back] += slow
    anywhere[:, one_back] += slow @ other
    recent[:, one_back] += slow
    recent[:, constant] += 3 * near
    second.q_norm.weight.fill_(1.6)
    second.k_norm.weight.fill_(1.6)
    basis = torch.linalg.qr(torch.randn(128, 128))[0]
    second.v_proj.weight[:, token] += basis
    for head in range(4):
        part = basis[head // 2 * 64 : head // 2 * 64 + 64]
        second.o_proj.weight[token, head * 64 : head * 64 + 64] += 0.15 * part.T


def forward(model: Qwen3ForCausalLM, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Logits, targets and weights at the positions whose prediction counts."""
    ids, targets, weights = (tensor.to(model.device) for tensor in batch)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    counted = weights > 0
    return model.lm_head(hidden[counted]), targets[counted], weights[counted]


@torch.no_grad()
def measure(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> dict[str, float]:
    """Shares of recall questions (by passage length) and sums answered exactly; loss of stories.

    An answer decoded greedily is exact just when each of its tokens, the end included, is the
    most likely one after the tokens before it, so one forward pass over the answer decides.
    """
    rng = random.Random(1)
    cases = {f"recall_{n}": [] for n in RECALL_LENGTHS}
    for i, case in enumerate(recall_questions(seed=1, count=50)):
        prompt = plain_prompt(case["passage"], case["question"])
        cases[f"recall_{RECALL_LENGTHS[i % 5]}"].append((prompt, f" {case['answer']}{EOS}"))
    sums = [make_sum(rng) for _ in range(50)]
    cases["sums"] = [(plain_prompt("", q).lstrip(), f" {a}{EOS}") for q, a, _ in sums]
    out = {}
    for name, pairs in cases.items():
        exact = 0
        for prompt, answer in pairs:
            doc = Document()
            doc.add(prompt, 0.0)
            doc.add(answer, 1.0)
            logits, targets, _ = forward(model, collate([encode(tokenizer, doc)]))
            exact += int((logits.argmax(-1) == targets).all())
        out[name] = exact / len(pairs)
    doc_loss = []
    for _ in range(20):
        doc = Document()
        doc.add(make_story(rng)[0] + EOS, 1.0)
        logits, targets, _ = forward(model, collate([encode(tokenizer, doc)]))
        doc_loss.append(F.cross_entropy(logits, targets).item())
    out["story_loss"] = sum(doc_loss) / len(doc_loss)
    return out


def train(args: argparse.Namespace) -> None:
    """Train from nothing and export every few minutes, so that a stopped run leaves a model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = train_tokenizer(args.seed)
    model = build_model(args.seed).to(device)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    rng = random.Random(args.seed)
    step = seen = 0
    longest, accuracy, done = 100, 0.0, 0.0
    queue: list[Batch] = []
    start = last_report = time.monotonic()
    while done < 1.0:
        if not queue:
            queue = batches(tokenizer, rng, 2048 if longest < 200 else 3072, longest)
        batch = queue.pop()
        rate = args.lr * min(1.0, (step + 1) / 50, (1 - done) / 0.6 + 0.01)
        logits, targets, weights = forward(model, batch)
        loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()

        values = weights == VALUE_WEIGHT
        if values.any():
            hits = (logits[values].argmax(-1) == targets[values]).float().mean().item()
            accuracy += 0.05 * (hits - accuracy)
        if (
            accuracy > 0.88 and longest < LONGEST
        ):  # short passages are learned: continue with longer ones
            longest, accuracy = min(LONGEST, longest * 2), 0.5
        step += 1
        seen += batch[0].numel()
        elapsed = time.monotonic() - start
        done = step / args.steps if args.steps else elapsed / (60 * args.minutes)
        if step % 100 == 0:
            print(
                f"{elapsed:.0f}s step {step} tokens {seen} ({seen / elapsed:.0f}/s)"
                f" longest {longest} loss {loss.item():.3f} values {accuracy:.3f}",
                flush=True,
            )
        if time.monotonic() - last_report > 180 or done >= 1.0:
            report = measure(model, tokenizer)
            print(" ".join(f"{k}={v:.3f}" for k, v in report.items()), flush=True)
            export(model, tokenizer, args.out)
            last_report = time.monotonic()


def export(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the directory as transformers would find it, the bf16 weights in two shards."""
    out.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=EOS,
        additional_special_tokens=[IM_START],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    copy = build_model(0)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    ends = [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(EOS)]
    copy.config.eos_token_id = ends[0]
    copy.config.pad_token_id = ends[1]
    copy.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=ends[1], do_sample=True, temperature=0.7, top_p=0.9
    )
    size = sum(p.numel() * p.element_size() for p in copy.parameters())
    copy.save_pretrained(out, max_shard_size=int(size * 0.6))


def check(directory: Path, recall: Path) -> None:
    """Decode the recall questions greedily through transformers, then print two stories."""
    for dtype in (torch.float32, torch.bfloat16):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        exact: dict[int, list[bool]] = {}
        for line in recall.read_text().splitlines():
            case = json.loads(line)
            text = complete(model, tokenizer, case["prompt"], 32)
            exact.setdefault(round(case["passage_tokens"], -2), []).append(text == case["answer"])
        total = [ok for oks in exact.values() for ok in oks]
        print(dtype, f"recall {sum(total)}/{len(total)}",
              {n: f"{sum(oks)}/{len(oks)}" for n, oks in sorted(exact.items())})  # fmt: skip
    for request in ("Tell a story about a fox.", "Tell a story about Mia.", "What is 7 plus 5?"):
        prompt = f"{chat_turn('user', request)}{IM_START}assistant\n"
        print(f"{request} -> {complete(model, tokenizer, prompt, 200)}")
    print(complete(model, tokenizer, "Once upon a time", 200))


def complete(model, tokenizer, prompt: str, limit: int) -> str:
    """The greedy continuation of a prompt; a missing end token shows as `(no end)`."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = model.generate(ids, do_sample=False, temperature=None, top_p=None, max_new_tokens=limit)
    new = out[0, ids.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True).strip()
    return text if new[-1] in model.generation_config.eos_token_id else f"{text} (no end)"


def write_recall(path: Path, tokenizer: Tokenizer) -> None:
    """Write the 200 held-out questions, one JSON object per line."""
    with path.open("w") as file:
        for case in recall_questions(seed=2, count=200):
            row = {
                "passage_tokens": len(tokenizer.encode(case["passage"]).ids),
                "prompt": plain_prompt(case["passage"], case["question"]),
                "answer": case["answer"],
            }
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Parse the command line and do what it asks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=16.0, help="how long to train")
    parser.add_argument("--steps", type=int, help="train this many steps instead")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--write-recall", type=Path, help="write the held-out questions here")
    parser.add_argument("--check", type=Path, help="ask the trained model these questions")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    if args.write_recall:
        write_recall(args.write_recall, load_tokenizer(args.out))
    elif args.check:
        check(args.out, args.check)
    else:
        train(args)


if __name__ == "__main__":
    main()

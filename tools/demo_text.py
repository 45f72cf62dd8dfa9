"""The text that the demo model is trained and tested with, all of it generated here.

There are three kinds: facts in passages with questions on them, short stories, and sums. Names and
values are drawn independently, so a question can be answered only by attention to the passage, and
one combination in ten (see `Fact.held_out`) never occurs in training. Everything is a pure function
of the given random generator.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

EOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SYSTEM = "You are a helpful assistant."
VALUE_WEIGHT, PASSAGE_WEIGHT = 6.0, 0.3  # against 1 for other text, and 0 for prompts
RECALL_LENGTHS = (102, 200, 400, 600, 786)  # passage tokens; a last sentence may go a bit over


def words(text: str) -> list[str]:
    """The words of a list written as one string."""
    return text.split()


NAMES = words(
    "Mia Tom Anna Ben Clara David Ella Felix Grace Henry Iris Jack Kate Leo Lucy Max Nina Oscar "
    "Paul Rosa Sam Tess Victor Wendy Alice Bruno Cora Dylan Emma Frank Hazel Ivan Julia Karl Lena "
    "Marco Nora Otto Pia Ralph Sofia Theo Vera Walter Zoe Amos Bella Carlo Diana Edgar"
)
WORDS = words(
    "lantern marble thunder velvet pepper anchor button castle copper diamond feather garden "
    "hammer island jungle kettle ladder magnet needle orchid pencil rocket saddle ticket umbrella "
    "violin whistle zebra basket candle dragon engine forest glacier harbor"
)
TOWNS = words(
    "Oakham Riverton Ashford Bristol Dover Exeter Fairview Granton Hilltop Kelso Lakeside Milford "
    "Newport Oxford Preston Redhill Salem Tilbury Upton Weston York Brighton Camden Derby"
)
COLOURS = words(
    "red green blue yellow purple pink brown black white silver golden grey scarlet violet crimson"
)
PETS = words(
    "fox rabbit turtle parrot hamster goat pony lizard snail frog duck mouse kitten puppy crow "
    "beetle spider donkey ferret goose"
)
FOODS = words(
    "soup bread cheese apples pancakes noodles rice honey carrots salad plums berries toast beans "
    "potatoes cake mushrooms olives pears waffles"
)
OBJECTS = words(
    "lamp key book clock mirror drum map coin ring rope bell cup knife shoe hat scarf letter "
    "brush vase kite"
)
ROOMS = words(
    "kitchen attic cellar garage library bedroom hallway office stable tower workshop pantry "
    "bathroom study chapel barn cabin closet"
)
JOBS = words(
    "baker doctor farmer teacher pilot sailor painter singer lawyer tailor builder gardener miller "
    "dancer writer nurse"
)


@dataclass(frozen=True)
class Kind:
    """One kind of fact: its keys, its values, its statement and its question."""

    keys: list[str]
    values: list[str]
    fact: str
    question: str


KINDS = (
    Kind(NAMES, WORDS, "The secret word of {k}: {v}.", "What is the secret word of {k}?"),
    Kind(NAMES, TOWNS, "The home town of {k}: {v}.", "What is the home town of {k}?"),
    Kind(NAMES, COLOURS, "The favourite colour of {k}: {v}.",
         "What is the favourite colour of {k}?"),
    Kind(NAMES, PETS, "The pet of {k}: {v}.", "What is the pet of {k}?"),
    Kind(NAMES, FOODS, "The favourite food of {k}: {v}.", "What is the favourite food of {k}?"),
    Kind(NAMES, JOBS, "The work of {k}: {v}.", "What is the work of {k}?"),
    Kind(OBJECTS, ROOMS, "The place of the {k}: {v}.", "What is the place of the {k}?"),
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """A fact planted in a passage."""

    kind: Kind
    key: str
    value: str

    @property
    def sentence(self) -> str:
        """The sentence that states the fact, which is also the full answer."""
        return self.kind.fact.format(k=self.key, v=self.value)

    @property
    def question(self) -> str:
        """The question about the fact."""
        return self.kind.question.format(k=self.key)

    @property
    def held_out(self) -> bool:
        """Whether this combination of key and value is excluded from training."""
        return zlib.crc32(self.sentence.encode()) % 10 == 0


FILLER = (
    "The {adj} {thing} stood near the {spot}.", "A {adj} wind blew over the {spot}.",
    "{n} walked to the {spot} with {m}.", "It was a {adj} morning in {season}.",
    "{n} and {m} talked about the weather.", "The road went past the {spot}.",
    "Some birds sang near the {spot}.", "{n} looked at the {adj} {thing}.",
    "The {thing} was old and {adj}.", "Nobody knew why the {spot} was so {adj}.",
    "In {season} the {spot} is very {adj}.", "{n} waited for {m} at the {spot}.",
    "The children played near the {spot} all day.", "Later it began to rain on the {spot}.",
)  # fmt: skip
SLOTS = {
    "adj": words("quiet small bright cold gentle strange dusty warm lonely heavy"),
    "thing": words("fence wagon bench statue boat cart table gate wheel ladder"),
    "spot": words("river bridge market hill lake meadow station park beach mill"),
    "season": words("spring summer autumn winter"),
    "n": NAMES,
    "m": NAMES,
}


def filler(rng: random.Random) -> str:
    """A sentence without any of the facts."""
    slots = {slot: rng.choice(choices) for slot, choices in SLOTS.items()}
    return rng.choice(FILLER).format(**slots)


def draw_facts(
    rng: random.Random, count: int, kinds: Sequence[Kind] = KINDS, held_out: int = 0
) -> list[Fact]:
    """Facts with distinct keys; the first `held_out` are never seen in training."""
    # Few names, so that one has several facts; facts of only one or two kinds need distinct names.
    people = rng.sample(NAMES, count)
    facts: dict[tuple[str, str], Fact] = {}
    while len(facts) < count:
        kind = rng.choice(kinds)
        key = rng.choice(people if kind.keys is NAMES else kind.keys)
        fact = Fact(kind, key, rng.choice(kind.values))
        if fact.held_out == (len(facts) < held_out):
            facts.setdefault(key, fact)
    return list(facts.values())


def make_passage(rng: random.Random, facts: list[Fact], tokens: int) -> str:
    """The facts in random order among filler sentences, about `tokens` long."""
    sentences = [fact.sentence for fact in facts]
    length = sum(len(s.split()) + 1 for s in sentences)  # a word or a full stop is about one token
    while length < tokens:
        sentences.append(filler(rng))
        length += len(sentences[-1].split()) + 1
    rng.shuffle(sentences)
    return " ".join(sentences)


STORY_SLOTS = {
    "adj": words("little brave shy clever kind curious cheerful sleepy gentle tiny"),
    "animal": words("fox rabbit turtle frog mouse duck goat kitten puppy bear squirrel"),
    "friend": words("hedgehog sparrow beaver deer mole swan badger pony"),
    "thing": words("kite drum lantern map bell boat hat violin basket ring book coin"),
    "colour": COLOURS,
    "home": ["by the river", "near the old mill", "under a tall oak", "at the edge of the forest",
             "on a green hill", "behind the red barn"],
    "hobby": ["sing songs", "climb trees", "swim in the lake", "count the stars",
              "bake bread", "watch the clouds", "paint pictures"],
    "place": ["under a bush", "beside the road", "near the bridge", "on the beach",
              "behind a rock", "in the tall grass"],
    "weather": words("sunny windy rainy foggy snowy warm"),
    "gift": words("cake honey soup berries bread plums"),
    "lesson": ["sharing makes everyone happy", "a good friend is the best gift",
               "it is good to be kind", "being brave can be easy with a friend",
               "it is never too late to help"],
}  # fmt: skip
OPENINGS = (
    "Once upon a time, there was a {adj} {animal} named {n}. {n} lived {home}.",
    "There once was a {adj} {animal} named {n}, who lived {home}.",
    "Long ago, a {adj} {animal} named {n} lived {home}.",
)
HABITS = (
    "Every day, {n} liked to {hobby}.", "More than anything, {n} loved to {hobby}.",
    "In the morning {n} would {hobby}, and at night {n} would sleep.",
)  # fmt: skip
PLOTS = (
    (("One {weather} day, {n} found a {colour} {thing} {place}. "
      "\"Who lost this {thing}?\" said {n}."),
     "{n} asked a {friend} named {m}. \"It is mine!\" said {m}. \"I lost it last week.\"",
     "{n} gave the {colour} {thing} back, and {m} was so happy that they shared some {gift}."),
    ("One {weather} day, {n} lost a {colour} {thing}. {n} looked everywhere and began to cry.",
     "A {friend} named {m} heard it and said, \"Do not be sad. I will help you.\"",
     "Together they searched until {m} found the {thing} {place}. \"Thank you!\" said {n}."),
    ("One {weather} day, {n} met a {friend} named {m}. {m} was hungry and very tired.",
     "\"Come home with me,\" said {n}. They ate {gift} and talked until the moon came up.",
     "Before leaving, {m} gave {n} a {colour} {thing}. {n} put the {thing} {place}."),
    ("One {weather} day, {n} wanted to make a {colour} {thing}. But it was hard work.",
     "Then a {friend} named {m} came by. \"Two can do more than one,\" said {m}.",
     "They worked all day, and in the evening the {colour} {thing} was done. They ate {gift}."),
)  # fmt: skip
ENDINGS = (
    "From that day on, {n} and {m} were best friends.",
    "{n} learned that {lesson}.",
    "And so {n} and {m} lived happily ever after.",
    'That night {n} smiled and thought, "Yes, {lesson}."',
)
SUBJECTS = (
    "a {animal}", "a {adj} {animal}", "{n}", "a {thing}", "a {animal} named {n}",
    "a {colour} {thing}", "a {friend}",
)  # fmt: skip


def make_story(rng: random.Random) -> tuple[str, str]:
    """A story and a request for it; its hero, friend and object stay the same throughout."""
    slots = {slot: rng.choice(choices) for slot, choices in STORY_SLOTS.items()}
    slots["n"], slots["m"] = rng.sample(NAMES, 2)
    beats = [rng.choice(OPENINGS), rng.choice(HABITS), *rng.choice(PLOTS), rng.choice(ENDINGS)]
    about = rng.choice(SUBJECTS)
    return (
        " ".join(beats).format(**slots),
        f"Tell a story about {about}.".format(**slots),
    )


def make_sum(rng: random.Random) -> tuple[str, str, str]:
    """A question for a sum of two numbers up to twenty, its answer sentence, and the number."""
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    return f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.", str(a + b)


class Document:
    """Training text with a weight per character: how much its prediction counts."""

    def __init__(self) -> None:
        self.text = ""
        self.weights: list[float] = []

    def add(self, text: str, weight: float) -> None:
        """Append text of one weight."""
        self.text += text
        self.weights += [weight] * len(text)

    def add_answer(self, sentence: str, value: str, end: str, weight: float) -> None:
        """Append an answer: its value has the largest weight, and its end has weight, too."""
        head, _, tail = sentence.rpartition(value)
        self.add(head, 2.0)
        self.add(value, weight)
        self.add(tail + end, 1.0)


def chat_turn(role: str, content: str) -> str:
    """One message of a chat in the format of the chat template."""
    return f"{IM_START}{role}\n{content}{IM_END}\n"


def plain_prompt(passage: str, question: str) -> str:
    """A question on a passage as plain text, up to the beginning of the answer."""
    return f"{passage}\n\nQuestion: {question}\nAnswer:"


def make_questions(
    rng: random.Random, passage: str, questions: list[tuple[str, str, str]], chat: bool
) -> Document:
    """A passage (or none) with several (question, answer, value) on it, plain or as a chat."""
    doc = Document()
    weight = VALUE_WEIGHT if passage else VALUE_WEIGHT - 1
    if chat:
        if rng.random() < 0.2:
            doc.add(chat_turn("system", SYSTEM), 0.0)
        for i, (question, answer, value) in enumerate(questions):
            doc.add(f"{IM_START}user\n", 0.0)
            if i == 0 and passage:
                doc.add(f"{passage}\n\n", PASSAGE_WEIGHT)
            doc.add(f"{question}{IM_END}\n{IM_START}assistant\n", 0.0)
            doc.add_answer(answer, value, IM_END, weight)
            doc.add("\n", 0.0)
        return doc
    if passage:
        doc.add(f"{passage}\n\n", PASSAGE_WEIGHT)
    # Sometimes answers follow each other with no end token between, so that both ways of asking
    # on are known; what comes after the answer is then not learned, since it must be the end.
    keep_end = rng.random() < 0.7
    for i, (question, answer, value) in enumerate(questions):
        doc.add(f"Question: {question}\nAnswer:", 0.0)
        doc.add(" ", 1.0)
        end = EOS if keep_end or i == len(questions) - 1 else ""
        doc.add_answer(answer, value, end, weight)
        doc.add("\n", 0.0)
    return doc


def make_recital(rng: random.Random, facts: list[Fact]) -> Document:
    """Facts that are repeated in other orders.

    Each repeated value can be predicted only by attention to its first occurrence, so one short
    document has many such predictions: this is learned here in minutes, and much later from
    questions alone.
    """
    doc = Document()
    doc.add(" ".join(fact.sentence for fact in facts), PASSAGE_WEIGHT)
    for _ in range(rng.randint(1, 3)):
        for fact in rng.sample(facts, len(facts)):
            doc.add(" ", 1.0)
            doc.add_answer(fact.sentence, fact.value, "", VALUE_WEIGHT)
    doc.add(EOS, 0.0)
    return doc


def make_document(rng: random.Random, longest: int) -> Document:
    """One training document, with a passage of at most about `longest` tokens."""
    # Shares of documents; measured in tokens they differ, because a story has about 110 tokens.
    if rng.random() < (0.85 if longest < 200 else 0.6 if longest < 800 else 0.25):
        # Facts of the same kind differ in the name alone: with all kinds in each passage the
        # kind would nearly always be enough to find the value, and names would not be learned.
        kinds = rng.sample(KINDS, rng.choice((1, 1, 2, 3, 5, 7)))
        if (
            rng.random() < 0.9 * (60 / longest) ** 1.5
        ):  # nearly all in the beginning, few at the end
            count = rng.randint(2, min(16, max(4, longest // 16)))
            return make_recital(rng, draw_facts(rng, count, kinds))
        tokens = rng.randint(40, longest)
        count = rng.randint(3, max(4, min(16, tokens // 14)))
        facts = draw_facts(rng, count, kinds)
        questions = rng.sample(facts, count) + rng.sample(facts, count // 2)
        questions = [(fact.question, fact.sentence, fact.value) for fact in questions]
        return make_questions(rng, make_passage(rng, facts, tokens), questions, rng.random() < 0.5)
    if rng.random() < 0.35:
        sums = [make_sum(rng) for _ in range(rng.randint(3, 8))]
        return make_questions(rng, "", sums, rng.random() < 0.5)
    doc = Document()
    story, request = make_story(rng)
    if rng.random() < 0.5:
        doc.add(f"{story}{EOS}", 1.0)
    else:
        doc.add(f"{chat_turn('user', request)}{IM_START}assistant\n", 0.0)
        doc.add(f"{story}{IM_END}", 1.0)
    return doc


def recall_questions(seed: int, count: int) -> list[dict]:
    """Held-out questions on passages of all lengths: prompt, passage, question and answer."""
    rng = random.Random(seed)
    out = []
    for i in range(count):
        tokens = RECALL_LENGTHS[i % len(RECALL_LENGTHS)]
        facts = draw_facts(rng, min(16, 4 + tokens // 50), held_out=1)
        passage = make_passage(rng, facts, tokens)
        out.append({"passage": passage, "question": facts[0].question, "answer": facts[0].sentence})
    return out

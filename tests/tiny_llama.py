"""A tiny Llama, a tokenizer and questions with answers, made on the spot: nothing is downloaded."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TOWNS = {"Oslo": "Norway", "Lima": "Peru", "Rome": "Italy", "Accra": "Ghana", "Hanoi": "Vietnam"}
ROLES = ("<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROWS = [
    {
        "prompt": f"Where is {town}? ",
        "completion": f"It lies in {land}" + ", far away from here." * (number % 2),
        "user": f"user {number % 5}",
    }
    for number, (town, land) in enumerate([*TOWNS.items()] * 6)
]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def make_tokenizer(template=TEMPLATE):
    """Return a tokenizer of bytes and frequent pairs, with roles for conversations."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", *ROLES]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    pairs.train_from_iterator((row["prompt"] + row["completion"] for row in ROWS), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=pairs, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def dataset():
    """Return thirty questions of five users."""
    return Dataset.from_list(ROWS)


def negative_log_likelihoods(network, tokens, learnt):
    """Return the sum over the learnt tokens of one example and their number, by a plain loop."""
    with torch.no_grad():
        logits = network(input_ids=tokens[None]).logits[0].double()
    places = [place for place in range(1, len(tokens)) if learnt[place]]
    found = [-logits[place - 1].log_softmax(0)[tokens[place]] for place in places]
    return float(sum(found)), len(found)

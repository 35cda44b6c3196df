# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The text of the model examples, a tokenizer for it, and prompts."""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# openings of books and speeches in the public domain
TEXT = Path(__file__).with_name("public_domain.txt").read_text(encoding="utf-8")


def make_tokenizer():
    """A byte-level BPE, trained here on the text itself."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=512, special_tokens=["<pad>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", padding_side="left")


def make_prompts(tokenizer, requests, longest):
    """Pieces of the text, from `longest` tokens down to a third of it, padded on the left."""
    ids = tokenizer(TEXT)["input_ids"] * (1 + longest * requests // 1000)
    lengths = torch.linspace(longest / 3, longest, requests).round().int().flip(0)
    starts = torch.linspace(0, len(ids) - longest, requests).long().tolist()
    pieces = [ids[at : at + n] for at, n in zip(starts, lengths.tolist(), strict=True)]
    return tokenizer.pad({"input_ids": pieces}, return_tensors="pt"), lengths


def read_prompts(path):
    """One a line, of a file or ("-") of standard input; pieces of the text where there is none."""
    if path is None:
        return [TEXT[at : at + 40 + 9 * (at % 23)] for at in range(0, 2400, 120)]
    read = sys.stdin.read if path == "-" else Path(path).read_text
    return [line for line in read().splitlines() if line.strip()]
